"""What a kernel is asked to do: one job per partition, many jobs per call.

A *batch* is a list of jobs that recurs every step: the same blocks and residuals, the encoded bytes at fixed places of
a buffer that may be another one each time. Compiled kernels pack a batch once and then only rewrite what moved, since
building jobs anew takes more processor time than encoding most blocks does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from thinwire.random import Key


class EncodeJob(NamedTuple):
    """Encode q = x + residual_scale * residual into `out`; leave residual = q - decode(out)."""

    x: Tensor  # (n,) float32, contiguous
    out: Tensor  # (layout.nbytes,) uint8, a slice of the send buffer
    residual: Tensor | None = None  # (n,) float32; read, then overwritten in the same pass
    residual_scale: float = 1.0
    key: Key | None = None  # stochastic kinds only


class DecodeJob(NamedTuple):
    """Set out = decode(data), or out += alpha * decode(data) when `alpha` is given."""

    data: Tensor  # (layout.nbytes,) uint8
    out: Tensor  # (n,) float32, contiguous
    alpha: float | None = None


class _Places:
    """Where the encoded blocks of a batch lie in its buffer.

    Attributes:
        starts: (num,) uint64, first byte of each block.
        packed: what the kernels in use keep with the batch.
    """

    def __init__(self, starts: Sequence[int], nbytes: Sequence[int]) -> None:
        self.starts = np.array(starts, dtype=np.uint64)
        self.packed: Any = None
        self._spans = [(start, start + size) for start, size in zip(starts, nbytes, strict=True)]
        self._end = max((stop for _, stop in self._spans), default=0)

    def check(self, buffer: Tensor) -> Tensor:
        """Return `buffer` if all blocks lie in it."""
        if buffer.dtype is not torch.uint8 or not buffer.is_contiguous() or buffer.numel() < self._end:
            raise ValueError(
                f"batch: expected a contiguous uint8 buffer of at least {self._end} bytes, got {buffer.dtype} of shape "
                f"{tuple(buffer.shape)}"
            )
        return buffer

    def block(self, buffer: Tensor, index: int) -> Tensor:
        start, stop = self._spans[index]
        return buffer[start:stop]

    def __len__(self) -> int:
        return len(self._spans)


class EncodeBatch(Sequence[EncodeJob]):
    """Encode jobs that recur. Keeps `xs` and `residuals` alive; call `at` before each use."""

    def __init__(
        self,
        xs: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        keys: Sequence[Key],
        starts: Sequence[int],
        nbytes: Sequence[int],
    ) -> None:
        self.places = _Places(starts, nbytes)
        self.out: Tensor | None = None
        self.step = 0
        self.residual_scales: Sequence[float] = ()
        self._xs, self._residuals, self._keys = xs, residuals, keys

    def at(self, out: Tensor, *, step: int, residual_scales: Sequence[float]) -> "EncodeBatch":
        """Set what is new in this step: the buffer that bytes go to, the step that keys random streams, the factors."""
        self.out, self.step, self.residual_scales = self.places.check(out), step, residual_scales
        return self

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> EncodeJob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EncodeJob]: ...
    def __getitem__(self, index: int | slice) -> EncodeJob | Sequence[EncodeJob]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        assert self.out is not None
        key, out = self._keys[index], self.places.block(self.out, index)
        key = Key(key.key, self.step, key.stream, key.offset)
        return EncodeJob(self._xs[index], out, self._residuals[index], self.residual_scales[index], key)


class DecodeBatch(Sequence[DecodeJob]):
    """Decode jobs that recur. Keeps `outs` alive; call `at` before each use."""

    def __init__(self, outs: Sequence[Tensor], starts: Sequence[int], nbytes: Sequence[int]) -> None:
        self.places = _Places(starts, nbytes)
        self.data: Tensor | None = None
        self.alpha: float | None = None
        self._outs = outs

    def at(self, data: Tensor, *, alpha: float | None = None) -> "DecodeBatch":
        """Set what is new: the buffer that bytes come from, and whether to add."""
        self.data, self.alpha = self.places.check(data), alpha
        return self

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> DecodeJob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DecodeJob]: ...
    def __getitem__(self, index: int | slice) -> DecodeJob | Sequence[DecodeJob]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        assert self.data is not None
        return DecodeJob(self.places.block(self.data, index), self._outs[index], self.alpha)
