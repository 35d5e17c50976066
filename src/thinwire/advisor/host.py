"""What ranks compute while they exchange: the backward pass, and the cores that it shares with kernels."""

from dataclasses import dataclass

import numpy as np

from thinwire.advisor.occupancy import Numbers
from thinwire.advisor.profile import Computation, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """How fast a thread of kernels and the backward pass are, beside each other and alone.

    Attributes:
        beside: cores that the thread gets while backward runs.
        alone: and when it does not; at most one.
        backward: the speed of backward while the thread runs, 1 where there is a core to spare.
        one: whether a rank has no more than one, which kernels, sockets and Python then share.
    """

    beside: float
    alone: float
    backward: float
    one: bool

    @staticmethod
    def of(profile: Profile) -> "Cores":
        """Share a rank's part of its machine's cores as an operating system does.

        With c cores a rank, of which backward keeps b busy, the thread gets what is left, or c / (1 + max(b, 1)), a
        thread's fair share, if that is more; backward loses what it then lacks. Of a core that ranks share, backward
        takes all it can get: where that is less than c, other programs have the rest, and kept it while exchanging.
        """
        cores, busy = profile.kernels.cores / profile.kernels.ranks_per_machine, profile.computation.busy_cores
        if 0 < busy < cores <= 1:
            cores = busy
        beside = min(1.0, max(cores - busy, cores / (1 + max(busy, 1.0)))) if busy else min(1.0, cores)
        backward = min(1.0, (cores - beside) / busy) if busy else 1.0
        return Cores(beside=beside, alone=min(1.0, cores), backward=backward, one=cores <= 1)


class Backward:
    """The backward passes of some ranks, delayed by what runs on the same cores.

    Args:
        computation: of a rank that nothing delays.
        slow: (num_ranks,) how many times longer each takes to compute.
        cores: who gets how much of them.
    """

    def __init__(self, computation: Computation, slow: Numbers, cores: Cores) -> None:
        self._cores, self._slow = cores, slow
        self._begin = computation.forward_s * slow
        self._whole = computation.backward_s * slow
        self._lost = np.zeros_like(slow)
        self._to_come: list[tuple[Numbers, Numbers]] = []  # (when, seconds) that backward will lose

    def reached(self, progress_s: float) -> Numbers:
        """Return when each has come so far, given all that ran beside it until then. Ask in ascending order."""
        at = self._begin + progress_s * self._slow + self._lost
        changed = True
        while changed:
            changed = False
            for when, seconds in self._to_come:
                hit = (when < at) & (seconds > 0)
                if hit.any():
                    changed = True
                    at[hit] += seconds[hit]
                    self._lost[hit] += seconds[hit]
                    seconds[hit] = 0.0
        self._to_come = [(when, seconds) for when, seconds in self._to_come if seconds.any()]
        return at

    def interrupt(self, at: Numbers, seconds: float) -> Numbers:
        """Let the thread of backward do something else for so long, wherever it has come; return when it goes on."""
        self._lost += seconds
        return at + seconds

    def beside(self, start: Numbers, core_s: Numbers) -> Numbers:
        """Return how long so many core-seconds take from `start` on, and note what backward loses by them."""
        cores = self._cores
        end = self._begin + self._whole + self._lost + sum(seconds for _, seconds in self._to_come)
        left = np.maximum(end - start, 0.0)
        # What runs beside backward also makes it end later, so that more of it does.
        together = np.minimum(core_s / cores.beside, left / cores.backward if cores.backward else np.inf)
        if cores.backward < 1:
            self._to_come.append((start, together * (1 - cores.backward)))
        return together + (core_s - together * cores.beside) / cores.alone
