"""Which recipe is fastest where the training runs: settings, and the rules that choose, from numbers alone."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.aggregators import Aggregator, Dense, Gather
from thinwire.errors import RecipeError
from thinwire.feedback import ErrorFeedback
from thinwire.recipes import parse_candidates

NAME = "auto"  # the recipe that means `Auto()`
NUM_ROUNDS = 3  # turns of a candidate that stays near the best
NEAR = 1.25  # times the best: what is slower is not tried again
FAR = 3.0  # times the best: what is bound to be slower is not tried at all; processors' part in seconds is no line
LEAST_TIE, MOST_TIE = 0.02, 0.05  # of the best: what is always a tie, and what never is, however much times scatter
DRIFT = 1.25  # times what was measured, or a part of it: a step has become another one
WIRE_DRIFT = 1.5  # the same of seconds inside collectives, which scatter more, as ranks wait for each other in them


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto:
    r"""Tries recipes while training goes on, and keeps the fastest: `attach(model, "auto")`, or with candidates.

    Seconds are those from a step's first bucket to its last mean, on the slowest rank: what recipes differ by. Each
    candidate gets turns of a few steps, the fewest bytes first. With m_c the median of candidate c, b_c its bytes, y
    the last one that was measured, and s the least of all slopes (m_y - m_x) / (b_y - b_x) from one to the next so far,
    those that are still to come are skipped where

        m_y + s (b_c - b_y) - seconds of encoding and decoding of y > 3 min m:

    where the wire decides, seconds grow with bytes at least as fast as they have, and a slow network is spared the
    large ones. Candidates with a step within 1.25 min m take further turns. In the end the first one, in the order of
    `candidates`, that is not slower than the fastest by more than a tie is chosen; a tie is twice the standard error
    of the difference, at least 2 % and at most 5 %.

    Until the choice steps count like any others: what a candidate owes, the next delivers or leaves where it is. Once
    an all-reduce is chosen, one step through owners delivers all that is owed, and from then on "dense" is DDP's own
    all-reduce of each bucket, to the bit. Every 20 steps ranks compare medians with what was measured at the choice;
    where two such windows (four, after a trial that changed nothing) differ from it in the same direction, by a
    quarter, or half in the seconds inside collectives, the trial begins anew. Decisions are made by all ranks from the
    same numbers.

    Args:
        candidates: recipes or settings (`Aggregator`), "dense" first, then in the order of how little they lose. What
            one owes, any other with feedback must be able to deliver: error feedback or none, and no votes.

    Raises:
        RecipeError: fewer than two candidates, one twice, another first than "dense", or one that cannot be.

    Example:
        >>> Auto(candidates=("dense", "int8", "topk:0.01")).names
        ('dense', 'int8', 'topk:0.01')
    """

    candidates: Sequence[str | Aggregator] = ("dense", "bf16", "int8", "int4")

    def __post_init__(self) -> None:
        settings = parse_candidates("Auto", self.candidates)
        for candidate in settings:
            _check_interchangeable(candidate)
        if settings[0] != Dense():
            names = ", ".join(candidate.recipe() for candidate in settings)
            raise RecipeError(f"Auto: expected 'dense' first, and then what loses more and more, got {names}")
        object.__setattr__(self, "candidates", settings)

    @property
    def settings(self) -> tuple[Aggregator, ...]:
        """The candidates."""
        return tuple(candidate for candidate in self.candidates if isinstance(candidate, Aggregator))

    @property
    def names(self) -> tuple[str, ...]:
        """Their recipes."""
        return tuple(candidate.recipe() for candidate in self.settings)


def read_auto(recipe: Any) -> Any:
    """Return `Auto()` for "auto", and anything else as it is."""
    return Auto() if isinstance(recipe, str) and recipe.strip() == NAME else recipe


def _check_interchangeable(settings: Aggregator) -> None:
    votes = isinstance(settings, Gather) and settings.votes
    if votes or not (settings.feedback is None or isinstance(settings.feedback, ErrorFeedback)):
        raise RecipeError(
            f"Auto: {settings.recipe()!r} cannot take turns with others: expected error feedback or none, and no "
            "votes, as in 'int4' or 'topk:0.01'"
        )


class Trial:
    """Candidates take turns: `candidate` says whose turn it is, `add` what was measured in it, `choose` who wins.

    Args:
        nbytes: what the busiest rank sends in a step, by candidate; candidates in the order of how little they lose.

    Attributes:
        seconds: of each step that counted, by candidate.
        bounds: of the candidates that were skipped: seconds that they would take at least.

    Example:
        >>> trial = Trial([800, 200, 100])
        >>> for seconds in ([1.0, 1.0], [2.0, 2.0]):
        ...     trial.add(seconds)
        >>> trial.candidate, trial.bounds, trial.choose()
        (None, {0: 8.0}, 2)
    """

    def __init__(self, nbytes: Sequence[int]) -> None:
        self._nbytes = nbytes
        self._left = sorted(range(len(nbytes)), key=lambda candidate: (nbytes[candidate], candidate))
        self._rounds = 0
        self._slope = math.inf  # seconds per byte
        self.seconds: dict[int, list[float]] = {}
        self.bounds: dict[int, float] = {}

    @property
    def candidate(self) -> int | None:
        """Whose turn it is; None once there is a winner."""
        return self._left[0] if self._left else None

    def add(self, seconds: Sequence[float], codec_s: float = 0.0) -> None:
        """Count a turn: seconds of its steps, and of encoding and decoding in one of them."""
        tried = self._left.pop(0)
        self.seconds.setdefault(tried, []).extend(seconds)
        if self._rounds == 0:
            self._skip(codec_s)
        if not self._left:
            self._rounds += 1
            near = [one for one in self.seconds if min(self.seconds[one]) <= NEAR * self._best()]  # noise only adds
            if self._rounds < NUM_ROUNDS and len(near) > 1:
                self._left = near  # by bytes still, since that is how they came in

    def _skip(self, codec_s: float) -> None:
        """Skip what must be slower: seconds are at least linear in bytes, but for codecs, which "dense" has none of."""
        if len(self.seconds) < 2:
            return
        x, y = list(self.seconds)[-2:]
        if (grown := self._nbytes[y] - self._nbytes[x]) > 0:
            self._slope = min(self._slope, max(0.0, self._median(y) - self._median(x)) / grown)
        if math.isinf(self._slope):
            return
        for candidate in list(self._left):
            bound = self._median(y) + self._slope * (self._nbytes[candidate] - self._nbytes[y]) - codec_s
            if bound > FAR * self._best():
                self.bounds[candidate] = bound
                self._left.remove(candidate)

    def _median(self, candidate: int) -> float:
        return statistics.median(self.seconds[candidate])

    def _best(self) -> float:
        return min(map(self._median, self.seconds))

    def medians(self) -> Mapping[int, float]:
        """Return the seconds of a step, by candidate that was tried."""
        return {candidate: self._median(candidate) for candidate in sorted(self.seconds)}

    def choose(self) -> int:
        """Return the first candidate that is as fast as any, but for a tie."""
        return choose(self.seconds)


def choose(seconds: Mapping[int, Sequence[float]]) -> int:
    """Return the candidate with the lowest number that is not slower than the fastest by more than a tie.

    Args:
        seconds: of steps, by candidate.

    Example:
        >>> choose({0: [1.01, 1.01], 1: [1.0, 1.0]}), choose({0: [1.1, 1.1], 1: [1.0, 1.0]})
        (0, 1)
    """
    medians = {candidate: statistics.median(found) for candidate, found in seconds.items()}
    fastest = min(medians, key=lambda candidate: (medians[candidate], candidate))
    best = medians[fastest]
    for candidate in sorted(medians):
        noise = math.hypot(_standard_error(seconds[candidate]), _standard_error(seconds[fastest]))
        tie = min(MOST_TIE, max(LEAST_TIE, 2 * noise / best if best > 0 else 0.0))
        if medians[candidate] <= best * (1 + tie):
            return candidate
    return fastest


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a median, from the median absolute deviation, as of normal values."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Pace:
    """What a window of steps took, as medians over steps of the slowest rank's seconds.

    Attributes:
        step_s: from the first bucket to the last mean.
        wire_s: inside collectives, added up.
    """

    step_s: float
    wire_s: float

    def drift(self, now: "Pace") -> int:
        """Return 1 where steps have become slower, -1 where faster, 0 where neither.

        >>> Pace(1.0, 0.5).drift(Pace(1.1, 0.5)), Pace(1.0, 0.5).drift(Pace(1.0, 0.1))
        (0, -1)
        """
        for before, after, factor in ((self.step_s, now.step_s, DRIFT), (self.wire_s, now.wire_s, WIRE_DRIFT)):
            if after > factor * before:
                return 1
            if factor * after < before:
                return -1
        return 0
