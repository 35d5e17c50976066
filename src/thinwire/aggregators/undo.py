"""What a step that must not count takes back."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.aggregators.buffers import BufferPool
from thinwire.wire import split


class Undo:
    """Residuals of some blocks with their values from before this step, between `save` and `forget`."""

    def __init__(self, residuals: Sequence[tuple[int, Tensor]]) -> None:
        self.residuals = residuals  # (place, residual)
        self._runs = _joined([residual for _, residual in residuals])
        self._buffer: Tensor | None = None

    def save(self, buffers: BufferPool) -> None:
        """Copy the residuals to a buffer, taken from `buffers`."""
        if not self._runs:
            return
        assert self._buffer is None, "encoded twice in one step"
        self._buffer = buffers.take(4 * sum(run.numel() for run in self._runs))
        for run, saved in zip(self._runs, self._pieces(self._runs), strict=True):
            saved.copy_(run)

    def saved(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield (residual, saved values)."""
        if self._buffer is None:
            return ()
        owed = [residual for _, residual in self.residuals]
        return zip(owed, self._pieces(owed), strict=True)

    def forget(self, buffers: BufferPool) -> None:
        """Give the buffer back."""
        if self._buffer is not None:
            buffers.give(self._buffer)
            self._buffer = None

    def _pieces(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        assert self._buffer is not None
        return split(self._buffer.view(torch.float32), [tensor.numel() for tensor in tensors])


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the same memory as fewer tensors, in the same order: neighbours in memory become one."""
    joined: list[Tensor] = []
    for tensor in tensors:
        if joined and tensor.data_ptr() == joined[-1].data_ptr() + 4 * joined[-1].numel():
            last = joined[-1]
            if tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
                joined[-1] = last.as_strided((last.numel() + tensor.numel(),), (1,))
                continue
        joined.append(tensor)
    return joined
