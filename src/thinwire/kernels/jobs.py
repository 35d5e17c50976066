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
    shared: Tensor | None = None  # (m,) float32, kinds with a statistic only: first written, then, reduced, encoded by


class DecodeJob(NamedTuple):
    """Set out = decode(data), or out += alpha * decode(data) when `alpha` is given."""

    data: Tensor  # (layout.nbytes,) uint8
    out: Tensor  # (n,) float32, contiguous
    alpha: float | None = None
    key: Key | None = None  # kinds with a shared key only
    shared: Tensor | None = None  # (m,) float32, kinds with a statistic only: what the bytes were encoded by


class ReduceJob(NamedTuple):
    """Leave in `acc` one encoding of what `acc` and `data` stand for together. Reducible kinds only."""

    acc: Tensor  # (layout.nbytes,) uint8
    data: Tensor  # as many
    numel: int
    key: Key
    counts: tuple[int, int] = (1, 1)  # how many blocks have gone into `acc` and into `data`


class VoteJob(NamedTuple):
    """Write into `out`, a bitmap, what most of `rows` say of each of `numel` elements; `key` draws the ties."""

    rows: Sequence[Tensor]  # each (at least ceil(numel / 8),) uint8
    out: Tensor  # likewise; zeros beyond numel
    numel: int
    key: Key | None = None  # None: a tie is 0


class Batch:
    """Jobs that recur: their encoded blocks lie at fixed places of `buffer`, which may be another one each time.

    Attributes:
        buffer: (at least the end of the last block,) uint8, as of the last `at`.
        starts: (num,) uint64, first byte of each block in it.
        packed, packed_for: what the kernels keep with the batch, and for which payloads it was checked.
        shared: the `shared` of every job, the same tensors every step.
        packed_shared: what the kernels keep of those.
        kept: what compressors that work through others keep with the batch, by compressor: batches of their own.
    """

    def __init__(self, starts: Sequence[int], nbytes: Sequence[int]) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.starts = np.array(starts, dtype=np.uint64)
        self.packed: Any = None
        self.packed_for: Any = None
        self.shared: Sequence[Tensor] | None = None
        self.packed_shared: dict[tuple[str, int], Any] = {}
        self.kept: dict[Any, Any] = {}
        self._spans = [(start, start + size) for start, size in zip(starts, nbytes, strict=True)]
        self._end = max((stop for _, stop in self._spans), default=0)

    def _move(self, buffer: Tensor) -> None:
        if buffer.dtype is not torch.uint8 or not buffer.is_contiguous() or buffer.numel() < self._end:
            raise ValueError(
                f"batch: expected a contiguous uint8 buffer of at least {self._end} bytes, got {buffer.dtype} of shape "
                f"{tuple(buffer.shape)}"
            )
        self.buffer = buffer

    def _block(self, index: int) -> Tensor:
        start, stop = self._spans[index]
        return self.buffer[start:stop]

    def __len__(self) -> int:
        return len(self._spans)


class EncodeBatch(Batch, Sequence[EncodeJob]):
    """Encode jobs that recur. Keeps `xs` and `residuals` alive; call `at` before each use."""

    def __init__(
        self,
        xs: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        keys: Sequence[Key],
        starts: Sequence[int],
        nbytes: Sequence[int],
        shared: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(starts, nbytes)
        self.shared = shared
        self.step = 0
        self.residual_scales: Sequence[float] = ()
        self.any_residual = any(residual is not None for residual in residuals)
        self.every_residual = all(residual is not None for residual in residuals)
        self.xs, self.residuals, self.keys = xs, residuals, keys

    def at(self, out: Tensor, *, step: int, residual_scales: Sequence[float]) -> None:
        """Set what is new in this step: the buffer that bytes go to, the step that keys random streams, the factors."""
        self._move(out)
        if len(residual_scales) != len(self):
            raise ValueError(f"batch: expected {len(self)} residual scales, got {len(residual_scales)}")
        self.step, self.residual_scales = step, residual_scales

    @overload
    def __getitem__(self, index: int) -> EncodeJob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EncodeJob]: ...
    def __getitem__(self, index: int | slice) -> EncodeJob | Sequence[EncodeJob]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        key = _at_step(self.keys[index], self.step)
        scale = self.residual_scales[index]
        shared = None if self.shared is None else self.shared[index]
        return EncodeJob(self.xs[index], self._block(index), self.residuals[index], scale, key, shared)


class DecodeBatch(Batch, Sequence[DecodeJob]):
    """Decode jobs that recur. Keeps `outs` alive; call `at` before each use.

    With `factors`, alpha is multiplied by the job's own: decode adds alpha * factors[j] * decode(data).
    """

    def __init__(
        self,
        outs: Sequence[Tensor],
        starts: Sequence[int],
        nbytes: Sequence[int],
        keys: Sequence[Key] | None = None,
        shared: Sequence[Tensor] | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        super().__init__(starts, nbytes)
        self.shared = shared
        self.alpha: float | None = None
        self.step = 0
        self.outs, self.base_keys = outs, keys  # the keys at step 0
        self.factors = np.array([1.0] * len(self) if factors is None else factors)

    def at(self, data: Tensor, *, step: int = 0, alpha: float | None = None) -> None:
        """Set what is new: the buffer that bytes come from, the step that keys random streams, and whether to add."""
        self._move(data)
        self.step, self.alpha = step, alpha

    def keys(self) -> list[Key | None]:
        """Return the key of every job in this step."""
        return [None] * len(self) if self.base_keys is None else [_at_step(key, self.step) for key in self.base_keys]

    @overload
    def __getitem__(self, index: int) -> DecodeJob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DecodeJob]: ...
    def __getitem__(self, index: int | slice) -> DecodeJob | Sequence[DecodeJob]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        key = None if self.base_keys is None else _at_step(self.base_keys[index], self.step)
        shared = None if self.shared is None else self.shared[index]
        alpha = None if self.alpha is None else self.alpha * float(self.factors[index])
        return DecodeJob(self._block(index), self.outs[index], alpha, key, shared)


def _at_step(key: Key, step: int) -> Key:
    return Key(key.key, step, key.stream, key.offset)
