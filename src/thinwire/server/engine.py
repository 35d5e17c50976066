"""Engine threads: each works on the contents pinned to it, the one nearest to completion first."""

import itertools
import threading
import time
from collections.abc import Callable

from thinwire.server.service import Served


class Engines:
    """Threads that decode and encode.

    What is nearest to completion is found anew whenever a thread is free, among what then has work: contents do not
    lie in a heap, whose order would break when a contribution arrives.

    Args:
        count: threads.
        work: does all there is to do for a content.
        missing: how many contributions a content still waits for.

    Attributes:
        busy_s: seconds of work done, by thread.
    """

    def __init__(self, count: int, work: Callable[[Served], None], missing: Callable[[Served], int]) -> None:
        self.busy_s = [0.0] * count
        self._work, self._missing = work, missing
        self._ready: list[dict[Served, int]] = [{} for _ in range(count)]  # and when each was put there
        self._turns = itertools.count()
        self._changed = [threading.Condition() for _ in range(count)]
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(thread,), name=f"thinwire-engine-{thread}", daemon=True)
            for thread in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def wake(self, served: Served) -> None:
        """Let the thread of a content work on it."""
        with self._changed[served.thread]:
            self._ready[served.thread].setdefault(served, next(self._turns))
            self._changed[served.thread].notify()

    def close(self) -> None:
        """End the threads once they have done what they are at."""
        self._closed = True
        for changed in self._changed:
            with changed:
                changed.notify()
        for thread in self._threads:
            thread.join()

    def _run(self, thread: int) -> None:
        ready, changed = self._ready[thread], self._changed[thread]
        while True:
            with changed:
                changed.wait_for(lambda: ready or self._closed)
                if self._closed:
                    return
                served = min(ready, key=lambda one: (self._missing(one), ready[one]))
                del ready[served]
            started = time.perf_counter()
            self._work(served)
            self.busy_s[thread] += time.perf_counter() - started
