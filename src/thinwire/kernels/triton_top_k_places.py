"""Where the parts of top-k's blocks lie: a row of words a job, beside the table of jobs.

A row holds the addresses of the values, of 16-bit indices, of packed ones, of a bitmap and of counts, 0 for those that
a block has not, and then its length in bytes. Where a block has no 16-bit indices their address is one beside it: they
are what the other forms are made from, and read into.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.top_k_layout import payload_nbytes, top_k_layout
from thinwire.kernels.triton_launch import Table

_PARTS = ("values", "indices", "packed", "bitmap", "counts")
VALUES, INDICES, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BITMAP, COUNTS, END = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)


@triton.jit
def place_word(places, job, WHICH: tl.constexpr):
    """Return a word of a job's row."""
    return tl.load(places + job * 6 + WHICH)


@functools.lru_cache(maxsize=4096)
def _offsets(n: int, k: int, dtype: torch.dtype, chunked: bool) -> tuple[int, ...]:
    """Return where the parts begin, -1 for those that the block has not, and where the last one ends."""
    layout = top_k_layout(n, k, dtype, chunked)
    offsets = {part.name: part.offset for part in layout.parts}
    return *(offsets.get(part, -1) for part in _PARTS), payload_nbytes(layout)


class Places:
    """The rows of a call's jobs, on the device, and which forms of indices there are among them."""

    def __init__(
        self, table: Table, address_column: int, n_column: int, k: Sequence[int], dtype: torch.dtype, chunked: bool
    ) -> None:
        lengths = table.words[:, n_column].tolist()
        rows = np.array([_offsets(n, kept, dtype, chunked) for n, kept in zip(lengths, k, strict=True)])
        there = rows >= 0
        there[:, END.value] = False
        self.packed, self.bitmap, self.counts = (bool(there[:, part.value].any()) for part in (PACKED, BITMAP, COUNTS))
        rows += np.where(there, table.words[:, [address_column]], 0)
        rows[:, : END.value] *= there[:, : END.value]
        self._indices: Tensor | None = None
        if not there[:, INDICES.value].all():
            room = max(k)
            self._indices = table.scratch(room, torch.uint16)  # lives as long as what reads it
            beside = self._indices.data_ptr() + 2 * room * np.arange(table.num_jobs)
            rows[:, INDICES.value] = np.where(there[:, INDICES.value], rows[:, INDICES.value], beside)
        self.on_device = table.send(rows)
