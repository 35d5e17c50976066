"""What a kernel is asked to do: one job per partition, many jobs per call."""

from typing import NamedTuple

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
