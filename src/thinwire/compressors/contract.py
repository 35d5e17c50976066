"""What a compressor promises about its error. Tests hold every compressor to it; feedback rules follow from it."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SMALLEST_NORMAL = 2.0**-126  # below it float32 has too few bits for a scale to be accurate


@dataclass(frozen=True, slots=True)
class Unbiased:
    """E C(x) = x and E ||C(x) - x||^2 <= omega ||x||^2.

    Holds for blocks whose non-zero |x_i| all lie in [smallest, largest]. Below, the mean is still x. Kinds that round
    by chance do so with 16 random bits: their mean is x to 2^-17 of the distance between the levels beside x_i, and
    what is nearer than that to a level, 0 too, always becomes it.
    """

    omega: float
    smallest: float = SMALLEST_NORMAL
    largest: float = math.inf


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
class Additive:
    """|C(x)_i - x_i| <= error * (max_B x - min_B x) for every value, B the `block` values (None: all) that hold x_i.

    The rounding of x_i to float32 comes on top: 2^-22 max_B |x|, or 2^-149. So ||C(x) - x||^2 is at most error^2 times
    the sum over i of squared ranges, however small ||x|| is: values near 0 in a block of wide range may grow. In the
    largest magnitude C is a contraction by 2 * error, for feedback to keep residuals bounded where that is below 1.
    """

    error: float
    block: int | None


@dataclass(frozen=True, slots=True)
class NoContract:
    """No bound that holds for every x; `why` says where it fails."""

    why: str


def dither_omega(numel: int, smallest_level: float, norm: Literal["max", "l2"], *, base: float = 0.0) -> float:
    r"""Return the least omega that holds for every block of d values that share the scale ||x||_max or ||x||_2.

    With t = `smallest_level` (relative to the scale; 0 is a level too) a value below t has variance |x| (t - |x|), and
    one above it no more than `base` x^2. The worst block has its peak and d - 1 equal values below t (max), or d equal
    values (l2). Then, with a = sqrt(d) t:

        max: omega = max(base, (sqrt(1 + (d - 1) t^2) - 1) / 2),
        l2:  omega = v + a^2 / (4 (1 + v))  with  v = max(base, a / 2 - 1).

    Linear dithering has base = 0 (steps above the first have no more variance than it has), natural dithering 1/8,
    which its blocks only come near to.
    """
    d = max(numel, 2)  # a value alone still errs by its scale's rounding
    if norm == "max":
        return max(base, (math.sqrt(1 + (d - 1) * smallest_level**2) - 1) / 2)
    a = math.sqrt(d) * smallest_level
    v = max(base, a / 2 - 1)
    return v + a**2 / (4 * (1 + v))


def nearest_delta(levels: Sequence[float], numel: int) -> float:
    """Return the largest delta that holds for every block of d values rounded to the nearest of `levels`, ascending.

    The largest value lies on the largest level F. The worst that the d - 1 others can do is to lie half-way between the
    same two neighbours l < h: a block's error is e^2 - (1 - delta) x^2 summed over its values, and each value by itself
    makes the most of it there.

        1 - delta = max over l < h of  (d - 1) (h - l)^2 / 4 / (F^2 + (d - 1) (h + l)^2 / 4)
    """
    others = numel - 1
    worst = max(
        others * (high - low) ** 2 / 4 / (levels[-1] ** 2 + others * (high + low) ** 2 / 4)
        for low, high in itertools.pairwise(levels)
    )
    return 1 - worst


Contract = Unbiased | Contractive | Additive | NoContract

FEEDBACK_BELOW_DELTA = 0.9  # a contraction weaker than this loses too much of each step to go without feedback


def needs_feedback(contract: Contract) -> bool:
    """Return whether training without feedback would lose a part of the gradient that matters."""
    match contract:
        case Unbiased():
            return False
        case Contractive(delta):
            return delta < FEEDBACK_BELOW_DELTA
        case Additive() | NoContract():
            return True


def is_exact(contract: Contract) -> bool:
    """Return whether nothing is lost, so that there is nothing to remember."""
    return isinstance(contract, Contractive) and contract.delta == 1.0
