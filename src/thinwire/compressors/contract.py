"""What a compressor promises about its error. Tests hold every compressor to it; feedback rules follow from it."""

import math
from dataclasses import dataclass

SMALLEST_NORMAL = 2.0**-126  # below it float32 has too few bits for a scale to be accurate


@dataclass(frozen=True, slots=True)
class Unbiased:
    """E C(x) = x and E ||C(x) - x||^2 <= omega ||x||^2, for blocks without denormal values."""

    omega: float


@dataclass(frozen=True, slots=True)
class Contractive:
    """E ||C(x) - x||^2 <= (1 - delta) ||x||^2 with 0 < delta <= 1; delta = 1 is exact.

    Holds for blocks whose non-zero |x_i| all lie in [smallest, largest]: float16 has a range, and scales of denormal
    values are coarse.
    """

    delta: float
    smallest: float = 0.0
    largest: float = math.inf


@dataclass(frozen=True, slots=True)
class NoContract:
    """No bound that holds for every x; `why` says where it fails."""

    why: str


Contract = Unbiased | Contractive | NoContract

FEEDBACK_BELOW_DELTA = 0.9  # a contraction weaker than this loses too much of each step to go without feedback


def needs_feedback(contract: Contract) -> bool:
    """Return whether training without feedback would lose a part of the gradient that matters."""
    match contract:
        case Unbiased():
            return False
        case Contractive(delta):
            return delta < FEEDBACK_BELOW_DELTA
        case NoContract():
            return True
