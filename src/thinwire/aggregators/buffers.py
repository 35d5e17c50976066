"""Work memory."""

import functools
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.comm.device import Device, Event


def pooled_nbytes(nbytes: int) -> int:
    """Return the size of the buffer that a pool lends for so many bytes: a power of two, so that few sizes exist."""
    return 1 << max(nbytes - 1, 63).bit_length()


class BufferPool:
    """Keeps work buffers between messages: fresh memory costs more in page faults than the kernels that fill it.

    A buffer belongs to its taker until given back; the pool holds every buffer for its own lifetime. Thread-safe.

    Args:
        allocate: makes (nbytes,) uint8; by default on the CPU.
    """

    def __init__(self, allocate: Callable[[int], Tensor] | None = None) -> None:
        self._allocate = allocate or functools.partial(torch.empty, dtype=torch.uint8)
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self.allocated_nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialised uint8 tensor of `nbytes`, a view of a pooled buffer."""
        size = pooled_nbytes(nbytes)
        with self._lock:
            free = self._free.setdefault(size, [])
            buffer = free.pop() if free else None
            if buffer is None:
                self.allocated_nbytes += size
        if buffer is None:
            buffer = self._allocate(size)
        return buffer[:nbytes]

    def give(self, view: Tensor) -> None:
        """Give back what `take` returned, or any view of it."""
        # Views of other dtypes name no base.
        buffer = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
        with self._lock:
            self._free[buffer.numel()].append(buffer)


class PinnedPool(BufferPool):
    """Work buffers of the host that a device copies from and to.

    What is given back is lent again once the device has done all that was queued until then: a copy may still read it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device.allocate_pinned)
        self._device = device
        self._given: deque[tuple[Event, Tensor]] = deque()  # in the order of the stream

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialised uint8 tensor of `nbytes` that the device is done with."""
        while True:
            with self._lock:
                if not self._given or not self._given[0][0].query():
                    break
                _, view = self._given.popleft()
            super().give(view)
        return super().take(nbytes)

    def give(self, view: Tensor) -> None:
        """Give back what `take` returned, or any view of it, while copies of it may be under way."""
        given = self._device.mark(), view
        with self._lock:
            self._given.append(given)
