"""When something that serves one task at a time is busy: an interface, or a thread. Many of them at once."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class Occupancy:
    """Busy intervals of `num` equal things, each of which serves what comes earlier in the program first.

    A task takes whatever time is free from its start on: where an earlier one comes in between, it waits and goes on,
    as bytes on a wire and threads of an operating system do. Nothing is idle while a task waits for it.

    Example:
        >>> wire = Occupancy(1)
        >>> for start, seconds in ((0.0, 2.0), (5.0, 1.0), (1.0, 4.0)):
        ...     print(wire.take(np.array([start]), np.array([seconds])))
        [2.]
        [6.]
        [7.]
    """

    def __init__(self, num: int) -> None:
        # Per row disjoint intervals in order of time; unused places hold inf.
        self._starts = np.full((num, 1), np.inf)
        self._ends = np.full((num, 1), np.inf)
        self.busy_s = np.zeros(num)

    def take(self, start: Numbers, seconds: Numbers) -> Numbers:
        """Serve one task on each for so many seconds from `start` at the earliest; return when each is done."""
        starts, ends = self._starts, self._ends
        self.busy_s += seconds
        # Walk through the gaps. Of a task that begins inside an interval, none is left before its end.
        begins = np.maximum(start[:, None], np.hstack([np.full((len(start), 1), -np.inf), ends]))
        used = np.isfinite(begins)
        ends_of_gaps = np.hstack([starts, np.full((len(start), 1), np.inf)])
        gaps = np.where(used, np.maximum(ends_of_gaps - np.where(used, begins, 0.0), 0.0), 0.0)
        filled = np.cumsum(gaps, axis=1)
        place = (filled < seconds[:, None]).sum(axis=1)  # the gap in which it ends
        rows = np.arange(len(start))
        done = begins[rows, place] + seconds - np.where(place > 0, filled[rows, np.maximum(place - 1, 0)], 0.0)
        # A task of no length is done when it starts, also inside a gapless stretch.
        done = np.where(seconds > 0, done, start)
        self._occupy(start, done, seconds > 0)
        return done

    def free_from(self, start: Numbers) -> Numbers:
        """Return when each begins a task that could start at `start`."""
        inside = (self._starts <= start[:, None]) & (self._ends > start[:, None])
        return np.maximum(start, np.where(inside, self._ends, -np.inf).max(axis=1))

    def _occupy(self, start: Numbers, done: Numbers, real: NDArray[np.bool_]) -> None:
        """Merge [start, done] with every interval that it touches: no time between is left."""
        first, last = np.where(real, start, np.inf)[:, None], np.where(real, done, np.inf)[:, None]
        touched = (self._starts <= last) & (self._ends >= first) & np.isfinite(self._starts) & real[:, None]
        first = np.minimum(first, np.where(touched, self._starts, np.inf).min(axis=1, keepdims=True))
        last = np.where(
            real[:, None], np.maximum(last, np.where(touched, self._ends, -np.inf).max(axis=1, keepdims=True)), np.inf
        )
        # Disjoint intervals stay paired when starts and ends are sorted alone.
        self._starts = np.sort(np.hstack([np.where(touched, np.inf, self._starts), first]), axis=1)
        self._ends = np.sort(np.hstack([np.where(touched, np.inf, self._ends), last]), axis=1)
        self._trim()

    def forget(self, before: float) -> None:
        """Forget intervals that end before a time, at or after which all further tasks start."""
        old = self._ends <= before
        self._starts[old] = np.inf
        self._ends[old] = np.inf
        self._starts.sort(axis=1)
        self._ends.sort(axis=1)
        self._trim()

    def _trim(self) -> None:
        used = max(int(np.isfinite(self._starts).sum(axis=1).max()), 1)
        self._starts, self._ends = self._starts[:, :used], self._ends[:, :used]
