"""Value types that every layer shares."""

import math
from dataclasses import dataclass

import torch

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
