"""A device that is late: copies end and values arrive some time after they were asked for, in a thread of its own.

Host and device are both the CPU, and kernels run at once, so that orders which a GPU hides most of the time show each
time. What is not there yet is poison: nan in values that have not arrived, 0xA5 in memory that a copy will fill. So
whoever reads too early computes other bits; whoever writes too early, or gives memory away that a copy still reads, is
noted in `violations`.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

POISON = 0xA5


class Moment:
    """An event."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self.come = self._come.set

    def synchronize(self) -> None:
        assert self._come.wait(30), "the device did not come to an event within 30 s"

    def query(self) -> bool:
        return self._come.is_set()


class LateFuture(torch.futures.Future):
    """A future that must be set on the exchanges' stream."""

    def __init__(self, device: "LateDevice") -> None:
        super().__init__()
        self._device = device

    def set_result(self, result: Any) -> None:
        self._device.check(self._device.inside, "a future was set off the exchanges' stream")
        super().set_result(result)


class LateDevice:
    """See the module. `hides` says whether values are hidden until they arrive."""

    def __init__(self, delay_s: float = 1e-4, *, hides: bool = True) -> None:
        self.violations: list[str] = []
        self.num_copies = 0
        self._delay_s, self._hides = delay_s, hides
        self._pinned: dict[int, int] = {}  # address -> bytes
        self._local = threading.local()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="late-device").start()

    def close(self) -> None:
        """End the thread; what was noted must be nothing."""
        self._work.put(None)
        assert not self.violations, self.violations

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._delay_s)
            work()

    def check(self, right: bool, otherwise: str) -> None:
        if not right:
            self.violations.append(otherwise)

    @property
    def inside(self) -> bool:
        return getattr(self._local, "inside", False)

    def queue(self) -> AbstractContextManager[Any]:
        return self._queue()

    @contextmanager
    def _queue(self) -> Iterator[None]:
        before, self._local.inside = self.inside, True
        yield
        self._local.inside = before

    def mark(self) -> Moment:
        moment = Moment()
        self._work.put(moment.come)
        return moment

    def arrival(self, *values: Tensor) -> Moment:
        moment = Moment()
        hidden = {value.data_ptr(): value for value in values} if self._hides else {}
        kept = [(value, value.clone()) for value in hidden.values()]
        for value, _ in kept:
            value.fill_(float("nan") if value.is_floating_point() else POISON)

        def arrive() -> None:
            for value, true in kept:
                value.copy_(true)
            moment.come()

        self._work.put(arrive)
        return moment

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self._pinned[memory.data_ptr()] = nbytes
        return memory

    def _is_pinned(self, tensor: Tensor) -> bool:
        start, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        return self._pinned.get(start) == nbytes

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.num_copies += 1
        self.check(self.inside, "a copy was queued off the exchanges' stream")
        self.check(
            target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes, "a strided copy"
        )
        to_device = self._is_pinned(source)
        self.check(to_device != self._is_pinned(target), "a copy that does not go between device and pinned memory")
        target_bytes, source_bytes = target.view(torch.uint8), source.view(torch.uint8)
        true = source_bytes.clone()
        if to_device:  # kernels behind it run at once: only the reading is late
            target_bytes.copy_(true)
            self._work.put(lambda: self.check(torch.equal(source_bytes, true), "pinned memory was rewritten too early"))
            return
        target_bytes.fill_(POISON)

        def arrive() -> None:
            self.check(bool((target_bytes == POISON).all()), "pinned memory was written to before a copy into it")
            target_bytes.copy_(true)

        self._work.put(arrive)

    def future(self) -> "torch.futures.Future[Any]":
        return LateFuture(self)


class HastyDevice(LateDevice):
    """One whose events say nothing: tests of order must notice."""

    def mark(self) -> Moment:
        moment = super().mark()
        moment.come()
        return moment
