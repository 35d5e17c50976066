"""Norms that ranks agree on, one a block: `shared_norms` of reference_global.py."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.jobs import EncodeJob
from thinwire.kernels.packing_shared import check_norms, pack_statistics
from thinwire.kernels.reference_global import SMALLEST_SQUARE
from thinwire.kernels.reference_steps import FLOAT32_MAX
from thinwire.kernels.triton_elements import INF_BITS, encode_row, form_q, input_of, job_and_tile, magnitude, pointer_to
from thinwire.kernels.triton_launch import ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_quantise import block_of, sums_of_squares
from thinwire.kernels.triton_tree_sum import tree_sum

TILE = 2048
LARGEST = tl.constexpr(FLOAT32_MAX)
SMALLEST = tl.constexpr(SMALLEST_SQUARE)


@jobs_kernel
def _norms(
    flags,
    table,
    num_tiles,
    sums,
    num_sums,
    most_blocks,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    L2: tl.constexpr,
    SQUARED: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
    """Write the norms of ROWS blocks, inf where not all is finite: then the sum of squares is inf or NaN."""
    job, tile = job_and_tile(num_tiles)
    first_block = tile.to(tl.int64) * ROWS
    first = first_block * BLOCK
    x, residual, has_residual, residual_scale, left = input_of(table, job, first, REGULAR)
    row = tl.arange(0, ROWS)[:, None]
    num_blocks = 1 if WHOLE else tl.cdiv(left + first, BLOCK)  # one also of nothing
    mask = row < num_blocks - first_block
    if L2:
        term = tl.arange(0, SUMS)[None, :]
        sums += (job.to(tl.int64) * most_blocks + first_block + row) * num_sums
        square = tree_sum(tl.load(sums + term, mask=mask & (term < num_sums), other=0.0), ROWS, SUMS)
    else:
        begin = row * BLOCK
        end = tl.minimum(tl.maximum(left, 0), ROWS * BLOCK).to(tl.int32)
        peak = tl.zeros((ROWS, 1), tl.int32)
        for start in range(0, BLOCK, WIDTH):
            i = start + tl.arange(0, WIDTH)[None, :]
            q = form_q(x, residual, has_residual, residual_scale, begin + i, (i < BLOCK) & (begin + i < end))
            peak = tl.maximum(peak, tl.max(magnitude(q), axis=1, keep_dims=True))
        largest = tl.minimum(peak, INF_BITS).to(tl.float32, bitcast=True).to(tl.float64)
        square = largest * largest
    if SQUARED:
        norm = tl.where(square > 0.0, tl.maximum(square.to(tl.float32), SMALLEST), 0.0)
    else:
        norm = tl.minimum(tl.sqrt(square).to(tl.float32), LARGEST)
    norm = tl.where(square < float("inf"), norm, float("inf"))
    shared = pointer_to(tl.load(encode_row(table, job) + 2) + 4 * first_block, tl.float32, 4)
    tl.store(shared + row, norm, mask=mask)


def shared_norms(jobs: Sequence[EncodeJob], *, block: int, l2: bool, squared: bool, threads: int = 1) -> None:
    """Write one norm per `block` elements (0: of all) into `job.shared`."""
    packing.check_threads(threads)
    check_norms(block)
    if not jobs:
        return
    device = jobs[0].x.device
    table = Table.of_statistics(pack_statistics(jobs, block, device), device)
    n, whole = max(table.most(ENCODE_N), 1), block == 0
    block = block_of(block, n)
    num_blocks = triton.cdiv(n, block)
    width = min(triton.next_power_of_2(block), TILE)
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0 and block % 16 == 0
    sums, num_sums = table.scratch(1, torch.float64), 1
    if l2:
        sums, num_sums = sums_of_squares(table, num_blocks, block, regular)
    table.launch(
        _norms,
        triton.cdiv(num_blocks, TILE // width),
        *(sums, num_sums, num_blocks),
        BLOCK=block,
        WHOLE=whole,
        L2=l2,
        SQUARED=squared,
        SUMS=triton.next_power_of_2(num_sums),
        ROWS=TILE // width,
        WIDTH=width,
        REGULAR=regular,
    )
