"""Byte layouts. One layout is the source for buffers, plans, the cost model and the counters alike.

All numbers on the wire are little-endian.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError

if sys.byteorder != "little":
    raise ImportError("thinwire's wire format is little-endian and this machine is not")

WIRE_FORMAT = 3  # raised whenever the bytes of any compressor or message change
ALIGNMENT = 4  # every encoded block starts and ends on a multiple of this many bytes


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def split(data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut a flat tensor into blocks of these sizes, one after another; views."""
    ends = list(itertools.accumulate(sizes))
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Part:
    """A named run of numbers inside an encoded block.

    Attributes:
        name: what it holds, e.g. "scales".
        dtype: dtype of its numbers.
        shape: their shape.
        offset: first byte, from the start of the block.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Named parts of an encoded block, in order, with exact offsets; `nbytes` includes the padding at the end.

    Example:
        >>> layout = Layout.of(scales=(torch.float32, (2,)), codes=(torch.int8, (1000,)))
        >>> layout.nbytes, layout["codes"].offset
        (1008, 8)
    """

    parts: tuple[Part, ...]
    nbytes: int

    @staticmethod
    def of(**parts: tuple[torch.dtype, tuple[int, ...]]) -> "Layout":
        """Lay parts one after another. Wider dtypes must come first, so that each is aligned to its own size."""
        placed: list[Part] = []
        offset = 0
        for name, (dtype, shape) in parts.items():
            assert offset % dtype.itemsize == 0, f"{name}: {dtype} at byte {offset}"
            part = Part(name, dtype, shape, offset)
            placed.append(part)
            offset += part.nbytes
        return Layout(tuple(placed), align(offset))

    def __getitem__(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def view(self, data: Tensor, name: str) -> Tensor:
        """Return one part of an encoded block as a typed view that shares its memory."""
        part = self[name]
        return data[part.offset : part.offset + part.nbytes].view(part.dtype).view(part.shape)

    def check(self, data: Tensor, what: str) -> None:
        """Raise `WireError` unless `data` is a 1-D uint8 tensor of exactly this size, without gaps and aligned."""
        if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != self.nbytes:
            raise WireError(
                f"{what}: expected a 1-D uint8 tensor of {self.nbytes} bytes, got {data.dtype} of shape "
                f"{tuple(data.shape)}; was it encoded with other settings or cut short?"
            )
        if not data.is_contiguous() or data.data_ptr() % ALIGNMENT:
            raise WireError(
                f"{what}: expected a contiguous uint8 tensor of {self.nbytes} bytes at a multiple of {ALIGNMENT}, got "
                f"stride {data.stride(0)} at byte {data.data_ptr() % ALIGNMENT}; pass a clone"
            )
