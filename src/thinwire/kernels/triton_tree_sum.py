"""Sums in the one tree that all backends share: `tree_sum` of reference_steps.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference_steps import TREE_CHUNK
from thinwire.kernels.triton_launch import Table, jobs_kernel

CHUNK = tl.constexpr(TREE_CHUNK)


@triton.jit
def tree_sum(terms, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum each row of up to 1024 float64, a power of two of them, by halving; return a column.

    Each step adds two terms, so no reduction chooses an order. Zeros that would fill a row up to 1024 change nothing.
    """
    for level in tl.static_range(10):
        if (WIDTH >> level) > 1:
            terms = tl.sum(tl.reshape(terms, (ROWS, 2, WIDTH >> (level + 1))), axis=1)
    return terms


@jobs_kernel
def _level(flags, table, num_tiles, sums, num_sums, above, num_above):
    """Sum up to 1024 of a row's sums."""
    program = tl.program_id(0)
    row, group = program // num_above, program % num_above
    place = group * CHUNK + tl.arange(0, CHUNK)[None, :]
    terms = tl.load(sums + row.to(tl.int64) * num_sums + place, mask=place < num_sums, other=0.0)
    tl.store(above + program + tl.arange(0, 1)[None, :], tree_sum(terms, 1, CHUNK))


def to_one_chunk(table: Table, sums: Tensor, num_rows: int, num_sums: int) -> tuple[Tensor, int]:
    """Sum `num_sums` chunks in each of a job's `num_rows` rows, level by level, until at most 1024 sums are left."""
    while num_sums > TREE_CHUNK:
        num_above = triton.cdiv(num_sums, TREE_CHUNK)
        above = table.scratch(num_rows * num_above, torch.float64)
        table.launch(_level, num_rows * num_above, sums, num_sums, above, num_above, num_warps=1)
        sums, num_sums = above, num_above
    return sums, num_sums
