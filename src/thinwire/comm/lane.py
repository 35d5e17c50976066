"""A lane: a process group, what moves blocks beside it, and the one thread that uses them, first in, first out."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist

from thinwire.comm.mesh import Mesh
from thinwire.comm.nccl import Nccl

EXIT_GRACE_S = 2.0  # for lanes to end before the interpreter does

_live: "weakref.WeakSet[Lane]" = weakref.WeakSet()


class Lane:
    """Runs functions on a thread of its own, in the order they were submitted.

    The thread is a daemon, so that a collective that hangs does not keep an interrupted program from ending. Idle lanes
    end before the interpreter does: a thread that meets a finalising interpreter inside C++ code aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup, mesh: Mesh | Nccl | None, name: str) -> None:
        self.group, self.mesh = group, mesh
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._work,), name=name, daemon=True)
        self._thread.start()
        _live.add(self)
        weakref.finalize(self, self._work.put, None)  # a lane that is dropped unclosed takes its thread along

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a function; it must not raise."""
        self._work.put(work)

    def close(self, timeout: float | None = None) -> None:
        """End the thread when all that was submitted is done, waiting at most `timeout` seconds."""
        self._work.put(None)
        self._thread.join(timeout)

    def interrupt(self) -> None:
        """End what it waits for, with an error there."""
        if self.mesh is not None:
            self.mesh.interrupt()


def _run(submitted: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (work := submitted.get()) is not None:
        work()
        del work  # what it holds must not outlive it until the next one comes


@atexit.register
def _end_lanes() -> None:
    deadline = time.monotonic() + EXIT_GRACE_S
    lanes = list(_live)
    for lane in lanes:
        lane.close(timeout=0)
    for lane in lanes:
        lane.close(timeout=max(0.0, deadline - time.monotonic()))
        lane.interrupt()
    for lane in lanes:
        lane.close(timeout=max(0.0, deadline + 0.5 - time.monotonic()))
