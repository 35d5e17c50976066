"""How much is sent of each parameter, under a budget for the error: settings, and the choice itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.aggregators import Aggregator, Dense, Gather
from thinwire.errors import RecipeError
from thinwire.feedback import EF21
from thinwire.recipes import parse_candidate, parse_candidates

NUM_BINS = 10_000  # in which errors are counted, up to the budget
_LARGEST = np.finfo(np.float64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate:
    r"""Chooses a recipe for every parameter anew every so often: the fewest bytes whose error keeps a budget.

    With e_{lc} the error of the gradient of parameter l under candidate c (the norm of all that is lost by all ranks in
    the steps that are measured), s_{lc} the bytes that all ranks then send for it in a step, and d the default:

        minimise sum_l s_{l c(l)}   subject to   sum_l e_{l c(l)} <= budget * sum_l e_{ld}.

    Solved by dynamic programming over the error in 10,000 bins, every e_{lc} rounded up, so that the budget is kept;
    and never worse than one candidate for all where that keeps the budget. Where no choice does, all get the candidate
    with the least error. Until the first choice all have the default. What a plan leaves dense by its thresholds stays
    so. Where an exchange compresses both ways, the error is that of both, the way back measured on the same gradient.
    What `hier:fp16` rounds inside a node counts, too.

    In each of the last `samples` steps before a choice every rank encodes its own gradient by every candidate, on the
    way, in the backward pass: these steps cost as many encodings more. Every rank then gathers all ranks' errors and
    comes to the same choice, which is compared before the first byte. What is owed stays owed and is delivered by
    whatever is chosen next; warm starts of PowerSGD go on with their first columns. Steps that are not finite are not
    measured; without any that was, the choice stays.

    Args:
        candidates: recipes or settings (`Aggregator`), at least two, any of which can deliver what another owes,
            without statistics that ranks agree on, votes or EF21. "dense" may be one.
        default: the candidate by whose error the budget is measured.
        budget: above 0; at 1 no choice sends more bytes than the default. Higher allows more error, for fewer bytes.
        every: steps between choices, counted from the end of `start_after`.
        samples: steps before each choice in which errors are measured, at least 1 and at most `every`.

    Raises:
        RecipeError: a field out of range, a candidate twice, or one that cannot be.

    Example:
        >>> Allocate(candidates=["int2", "int4", "int8"], default="int4", every=200).names
        ('int2', 'int4', 'int8')

    References:
        Mohammadreza Alimohammadi, Ilia Markov, Elias Frantar, Dan Alistarh, "L-GreCo: Layerwise-Adaptive Gradient
        Compression for Efficient and Accurate Deep Learning", 2022. Differs from the paper: errors
        are those of single gradients, not of their sum over the steps in between; candidates are listed; every rank
        solves.
    """

    candidates: Sequence[str | Aggregator]
    default: str | Aggregator
    budget: float = 1.0
    every: int = 1000
    samples: int = 4

    def __post_init__(self) -> None:
        settings = parse_candidates("Allocate", self.candidates)
        default = parse_candidate("Allocate", self.default)
        for candidate in (*settings, default):
            _check_measurable(candidate)
        if default not in settings:
            names = ", ".join(candidate.recipe() for candidate in settings)
            raise RecipeError(f"Allocate: expected a default among {names}, got {default.recipe()!r}")
        if not (self.budget > 0 and math.isfinite(self.budget)):
            raise RecipeError(f"Allocate: expected a finite budget above 0, got {self.budget}")
        if not 1 <= self.samples <= self.every:
            raise RecipeError(f"Allocate: expected 1 <= samples <= every, got {self.samples} and {self.every}")
        object.__setattr__(self, "candidates", settings)
        object.__setattr__(self, "default", default)

    @property
    def settings(self) -> tuple[Aggregator, ...]:
        """The candidates."""
        return tuple(candidate for candidate in self.candidates if isinstance(candidate, Aggregator))

    @property
    def names(self) -> tuple[str, ...]:
        """Their recipes."""
        return tuple(candidate.recipe() for candidate in self.settings)

    @property
    def default_index(self) -> int:
        """The place of the default among the candidates."""
        return [*self.candidates].index(self.default)


def _check_measurable(settings: Aggregator) -> None:
    alone = isinstance(settings, Dense) or settings.up.statistic_reduction is None
    if not alone or isinstance(settings.feedback, EF21) or (isinstance(settings, Gather) and settings.votes):
        raise RecipeError(
            f"Allocate: {settings.recipe()!r} has no error that a rank could measure of its gradient alone: expected "
            "kinds without statistics of all ranks, votes or EF21, as 'int4', 'topk:0.01' or 'powersgd:4'"
        )


def choose(errors: Sequence[Sequence[float]], nbytes: Sequence[Sequence[int]], budget: float) -> list[int]:
    """Return a candidate for each row: errors add up to at most `budget`, and sizes to as few bytes as can be.

    Errors are rounded up to multiples of `budget` / `NUM_BINS`: what is found is at least as good as the best choice
    with a budget smaller by as many bins as there are rows, and as every candidate that can be given to all.

    Args:
        errors: not negative; rows x candidates. Infinite where a candidate cannot be.
        nbytes: rows x candidates.
        budget: not negative, in the unit of `errors`.

    Returns:
        One candidate per row; where the budget cannot be kept, those with the least error.

    Example:
        >>> choose([[4.0, 1.0], [4.0, 1.0], [0.2, 0.1]], [[10, 20], [30, 60], [5, 10]], budget=5.5)
        [1, 0, 0]
    """
    if not errors:
        return []
    bins = [[_bins(error, budget) for error in row] for row in errors]
    far = np.iinfo(np.int64).max // 2
    least = np.zeros(NUM_BINS + 1, dtype=np.int64)  # bytes of the rows so far whose errors take at most so many bins
    chosen = np.zeros((len(errors), NUM_BINS + 1), dtype=np.int16)
    for row, (used, sizes) in enumerate(zip(bins, nbytes, strict=True)):
        options = np.full((len(used), NUM_BINS + 1), far, dtype=np.int64)
        for candidate, (width, size) in enumerate(zip(used, sizes, strict=True)):
            if width <= NUM_BINS:
                options[candidate, width:] = np.minimum(least[: NUM_BINS + 1 - width] + size, far)
        chosen[row] = options.argmin(axis=0)
        least = options.min(axis=0)
    uniform = [[candidate] * len(errors) for candidate in range(len(errors[0]))]
    kept = [choice for choice in uniform if _total(errors, choice) <= min(budget, _LARGEST)]
    if least[NUM_BINS] < far:
        left, found = NUM_BINS, list[int]()
        for row in reversed(range(len(errors))):
            found.append(int(chosen[row, left]))
            left -= bins[row][found[-1]]
        kept.append(found[::-1])
    if not kept:
        return [min(range(len(row)), key=row.__getitem__) for row in errors]
    return min(kept, key=lambda choice: _total(nbytes, choice))


def _bins(error: float, budget: float) -> int:
    """Return how many bins an error takes; more than there are where it is above the budget, or infinite."""
    if error <= 0:
        return 0
    return math.ceil(error / budget * NUM_BINS) if error <= budget and math.isfinite(error) else NUM_BINS + 1


def _total(table: Sequence[Sequence[float]], choice: Sequence[int]) -> float:
    return math.fsum(row[candidate] for row, candidate in zip(table, choice, strict=True))
