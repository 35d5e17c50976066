"""Fixed-point codes: a float16 scale a block, then codes; reference_fixed_point.py defines both.

As in triton_quantise.py, a program works on ROWS blocks, WIDTH columns at a time, and decoding is one flat pass.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.codes import packed_nbytes
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.triton_codes import code_at, in_blocks, pack_codes
from thinwire.kernels.triton_elements import (
    decode_row,
    deliver,
    encode_row,
    flag_non_finite,
    form_q,
    input_of,
    job_and_tile,
    leave,
    magnitude,
    output_of,
    pointer_to,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, DECODE_OUT, ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_quantise import SHIFT, block_of
from thinwire.wire import align

TILE = 2048


@jobs_kernel
def _encode(
    flags,
    table,
    num_tiles,
    codes,
    stride,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
    HALF: tl.constexpr = 2 ** (BITS - 1)
    job, tile = job_and_tile(num_tiles)
    first_block = tile.to(tl.int64) * ROWS
    first = first_block * BLOCK
    x, residual, has_residual, residual_scale, left = input_of(table, job, first, REGULAR)
    row = tl.arange(0, ROWS)[:, None]
    begin = row * BLOCK
    end = tl.minimum(tl.maximum(left, 0), ROWS * BLOCK).to(tl.int32)
    n = left + first
    num_blocks = tl.cdiv(n, BLOCK)

    peak = tl.zeros((ROWS, 1), tl.int32)
    for start in range(0, BLOCK, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        q = form_q(x, residual, has_residual, residual_scale, begin + i, (i < BLOCK) & (begin + i < end))
        peak = tl.maximum(peak, tl.max(magnitude(q), axis=1, keep_dims=True))
    narrow = peak.to(tl.float32, bitcast=True).to(tl.float16)
    scale = narrow.to(tl.float32)
    flag_non_finite(flags, job, tl.maximum(tl.max(peak), tl.max(magnitude(scale))))
    divisor = scale + 1e-6

    out = tl.load(encode_row(table, job) + 2)
    if BITS == 8:
        to = pointer_to(out + 2 * num_blocks + first, tl.uint8, 1 if BLOCK % 4 else 2)
    else:
        to = codes + job.to(tl.int64) * stride + first
    for start in range(0, BLOCK, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        place = begin + i
        mask = (i < BLOCK) & (place < end)
        q = form_q(x, residual, has_residual, residual_scale, place, mask)
        y = tl.div_rn(q, divisor) * HALF
        y = tl.minimum(tl.maximum(y, -HALF * 1.0), HALF - 1.0)
        code = (y + SHIFT) - SHIFT
        leave(residual, has_residual, place, mask, q - code * (1.0 / HALF) * scale)
        tl.store(to + place, (code + HALF).to(tl.int32).to(tl.uint8), mask=mask)
    scales = (out + 2 * first_block).to(tl.pointer_type(tl.float16))
    tl.store(scales + row, narrow, mask=row < num_blocks - first_block)
    if BITS == 8:
        zero_padding(table, job, tile, num_tiles, 2 * num_blocks + n, 1024)


@jobs_kernel
def _decode(
    flags,
    table,
    num_tiles,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    HALF: tl.constexpr = 2 ** (BITS - 1)
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    data = tl.load(decode_row(table, job))
    n = left + first
    block, inside, m = in_blocks(first, place, n, BLOCK)
    scale = tl.load(data.to(tl.pointer_type(tl.float16)) + block, mask=mask, other=0.0).to(tl.float32)
    packed = (data + 2 * tl.cdiv(n, BLOCK)).to(tl.pointer_type(tl.uint8)) + block * SPAN
    code = code_at(packed, inside, m, mask, BITS).to(tl.float32) - HALF
    deliver(out, alpha, accumulate, place, mask, code * (1.0 / HALF) * scale)


def encode_fixed_point(jobs: Sequence[EncodeJob], *, bits: int, block: int, threads: int = 1) -> list[bool]:
    """Write a float16 scale for every block (`block` = 0: the whole partition), then the codes."""
    packing.check_threads(threads)
    packing.check_fixed_point(bits, block)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.fixed_point_nbytes(bits, block), device=device), device)
    n = max(table.most(ENCODE_N), 1)
    block = block_of(block, n)
    width = min(triton.next_power_of_2(block), TILE)
    stride = align(n, 16)  # so that codes move by the 16
    codes = table.scratch(0 if bits == 8 else stride, torch.uint8)
    table.launch(
        _encode,
        triton.cdiv(triton.cdiv(n, block), TILE // width),
        *(codes, stride),
        BITS=bits,
        BLOCK=block,
        ROWS=TILE // width,
        WIDTH=width,
        REGULAR=table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0 and block % 16 == 0,
    )
    if bits < 8:
        pack_codes(table, codes, stride, bits=bits, block=block, header=2)
    return table.finite()


def decode_fixed_point(jobs: Sequence[DecodeJob], *, bits: int, block: int, threads: int = 1) -> None:
    """Set value = (code - H) / H times the scale of its block."""
    packing.check_threads(threads)
    packing.check_fixed_point(bits, block)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.fixed_point_nbytes(bits, block), device=device), device)
    block = block_of(block, table.most(DECODE_N))
    table.launch(
        _decode,
        max(1, triton.cdiv(table.most(DECODE_N), TILE)),
        BITS=bits,
        BLOCK=block,
        SPAN=packed_nbytes(block, bits),
        REGULAR=table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0,
        TILE=TILE,
    )
