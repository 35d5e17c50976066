"""Work memory."""

import threading

import torch
from torch import Tensor


class BufferPool:
    """Keeps work buffers between messages: fresh memory costs more in page faults than the kernels that fill it.

    A buffer belongs to its taker until given back; the pool holds every buffer for its own lifetime. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self.allocated_nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialised uint8 tensor of `nbytes`, a view of a pooled buffer."""
        size = 1 << max(nbytes - 1, 63).bit_length()
        with self._lock:
            free = self._free.setdefault(size, [])
            buffer = free.pop() if free else None
            if buffer is None:
                self.allocated_nbytes += size
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8)
        return buffer[:nbytes]

    def give(self, view: Tensor) -> None:
        """Give back what `take` returned, or any view of it."""
        buffer = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())  # views of other dtypes name no base
        with self._lock:
            self._free[buffer.numel()].append(buffer)
