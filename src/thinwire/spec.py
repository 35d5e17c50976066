"""Value types that every layer shares."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COMPRESSIBLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """What is known of a block of floats before its values are: enough to lay out its bytes.

    Attributes:
        shape: the block's shape; a slice of a parameter has one dimension.
        dtype: the dtype its owner keeps it in. Compressors compute in float32 whatever it is.

    Example:
        >>> BlockSpec(shape=(3, 4)).numel
        12
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def raw_nbytes(self) -> int:
        """Bytes without any compression."""
        return self.numel * self.dtype.itemsize


def fills_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements lie side by side, in whatever order of dimensions.

    DDP's buckets keep the strides of such parameters (channels_last among them), and are contiguous for the rest.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def memory_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's sizes from the outermost dimension to the innermost, as its gradient lies in DDP's buckets.

    Example:
        >>> memory_shape(torch.zeros(2, 3).t()), memory_shape(torch.zeros(2, 3)[:, ::2])
        ((2, 3), (2, 2))
    """
    if tensor.is_contiguous() or not fills_memory(tensor):
        return tuple(tensor.shape)
    by_stride = sorted(zip(tensor.stride(), tensor.shape, strict=True), key=lambda dim: dim[0], reverse=True)
    return tuple(size for _, size in by_stride)
