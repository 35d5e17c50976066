"""Min-max quantisation: the ends of a block's range, then codes; reference_min_max.py defines both rules.

As in triton_quantise.py, a program works on ROWS blocks, WIDTH columns at a time, and decoding is one flat pass.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.codes import packed_nbytes
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import FLOAT32_MAX, max_scale
from thinwire.kernels.triton_codes import code_at, in_blocks, pack_codes
from thinwire.kernels.triton_elements import (
    INF_BITS,
    decode_row,
    deliver,
    encode_row,
    flag_non_finite,
    form_q,
    input_of,
    job_and_tile,
    leave,
    magnitude,
    only_if,
    output_of,
    pointer_to,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, DECODE_OUT, ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_philox import uniform
from thinwire.kernels.triton_quantise import SHIFT, block_of, chunked, scale_of
from thinwire.wire import align

TILE = 2048
LARGEST = tl.constexpr(FLOAT32_MAX)


@triton.jit
def _ordered(bits):
    """Turn the bits of floats into integers that order as the floats do, -0 below 0; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _rounded(y):
    """Return integers, ties to even, of numbers far below 2**22."""
    return (y + SHIFT) - SHIFT


@triton.jit
def _affine(lo, hi, max_scale, LEVELS: tl.constexpr):
    """Return the factor that q is multiplied by, and the base, scale and step of what comes of it."""
    width = hi - lo
    tiny = (width > 0.0) & (width < 2.0**-100)  # N / width might overflow
    factor = tl.where(magnitude(width) >= INF_BITS, 0.5, tl.where(tiny, 2.0**100, 1.0))
    base = lo * factor
    width = hi * factor - base
    levels = tl.full(width.shape, LEVELS, tl.float32)
    scale = tl.where(width > 0.0, tl.div_rn(levels, tl.where(width > 0.0, width, 1.0)), 0.0)
    return factor, base, scale, scale_of(width, max_scale, LEVELS)


@triton.jit
def _affine_value(code, hi, factor, base, step):
    value = (code * step + base) * tl.where(factor == 0.5, 2.0, tl.where(factor == 1.0, 1.0, 2.0**-100))
    return tl.where(value < hi, value, hi)


@triton.jit
def _bagua(lo, hi, LEVELS: tl.constexpr):
    """Return the base, the scale and the step, and the first and the last of the steps that have codes."""
    wide = hi.to(tl.float64) - lo.to(tl.float64) + 1e-7
    scale = (tl.full(wide.shape, LEVELS, tl.float64) / wide).to(tl.float32)
    step = (wide / LEVELS).to(tl.float32)
    peak = tl.maximum(tl.abs(lo), tl.abs(hi))
    near = (peak * scale < 65536.0) & (lo != hi)
    last = tl.where(near, _rounded(tl.where(near, hi * scale, 0.0)), LEVELS * 1.0)
    return tl.where(near, 0.0, lo), scale, step, last - LEVELS, last


@triton.jit
def _bagua_value(code, base, step, first):
    value = (code + first) * step + base
    return tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))  # NaN stays


@jobs_kernel
def _encode(
    flags,
    table,
    num_tiles,
    max_scale,
    codes,
    stride,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BAGUA: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    job, tile = job_and_tile(num_tiles)
    first_block = tile.to(tl.int64) * ROWS
    first = first_block * BLOCK
    x, residual, has_residual, residual_scale, left = input_of(table, job, first, REGULAR)
    row = tl.arange(0, ROWS)[:, None]
    begin = row * BLOCK
    end = tl.minimum(tl.maximum(left, 0), ROWS * BLOCK).to(tl.int32)
    n = left + first
    num_blocks = tl.cdiv(n, BLOCK)

    least = tl.full((ROWS, 1), 0x7FFFFFFF, tl.int32)
    most = tl.full((ROWS, 1), -0x80000000, tl.int32)
    for start in range(0, BLOCK, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        mask = (i < BLOCK) & (begin + i < end)
        q = form_q(x, residual, has_residual, residual_scale, begin + i, mask)
        order = _ordered(q.to(tl.int32, bitcast=True))
        least = tl.minimum(least, tl.min(tl.where(mask, order, 0x7FFFFFFF), axis=1, keep_dims=True))
        most = tl.maximum(most, tl.max(tl.where(mask, order, -0x80000000), axis=1, keep_dims=True))
    some = begin < end
    lo = _ordered(tl.where(some, least, 0)).to(tl.float32, bitcast=True)
    hi = _ordered(tl.where(some, most, 0)).to(tl.float32, bitcast=True)
    flag_non_finite(flags, job, tl.maximum(tl.max(magnitude(lo)), tl.max(magnitude(hi))))
    if BAGUA:
        base, scale, step, low, high = _bagua(lo, hi, LEVELS)
    else:
        factor, base, scale, step = _affine(lo, hi, max_scale, LEVELS)

    out = tl.load(encode_row(table, job) + 2)
    random = encode_row(table, job) + 5
    key, offset, steps = tl.load(random), tl.load(random + 1) + first, tl.load(random + 2)
    if BITS == 8:
        to = pointer_to(out + 8 * num_blocks + first, tl.uint8, 1 if BLOCK % 4 else 4)
    else:
        to = codes + job.to(tl.int64) * stride + first
    for start in range(0, BLOCK, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        place = begin + i
        mask = (i < BLOCK) & (place < end)
        q = form_q(x, residual, has_residual, residual_scale, place, mask)
        if BAGUA:
            y = tl.minimum(tl.maximum((q - base) * scale, low), high)
            code = _rounded(y) - low
            value = _bagua_value(code, base, step, low)
        else:
            y = (q * factor - base) * scale
            if STOCHASTIC:  # no denormal reaches the floor: u has 17 bits below the point
                y = tl.floor(y + uniform(key, steps, offset + begin + start, ROWS, WIDTH, CHUNKED))
            code = _rounded(tl.minimum(tl.maximum(y, 0.0), LEVELS * 1.0))
            value = _affine_value(code, hi, factor, base, step)
        rest = q - value
        peak = tl.where(mask, magnitude(value), 0)
        peak = tl.maximum(peak, tl.where(only_if(mask, has_residual), magnitude(rest), 0))
        flag_non_finite(flags, job, tl.max(peak))
        leave(residual, has_residual, place, mask, rest)
        tl.store(to + place, code.to(tl.int32).to(tl.uint8), mask=mask)
    ranges = (out + 8 * first_block).to(tl.pointer_type(tl.float32))
    tl.store(ranges + 2 * row, lo, mask=row < num_blocks - first_block)
    tl.store(ranges + 2 * row + 1, hi, mask=row < num_blocks - first_block)
    if BITS == 8:
        zero_padding(table, job, tile, num_tiles, 8 * num_blocks + n, 1024)


@jobs_kernel
def _decode(
    flags,
    table,
    num_tiles,
    max_scale,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    BAGUA: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    data = tl.load(decode_row(table, job))
    n = left + first
    block, inside, m = in_blocks(first, place, n, BLOCK)
    ranges = data.to(tl.pointer_type(tl.float32)) + 2 * block
    lo, hi = tl.load(ranges, mask=mask, other=0.0), tl.load(ranges + 1, mask=mask, other=0.0)
    packed = (data + 8 * tl.cdiv(n, BLOCK)).to(tl.pointer_type(tl.uint8)) + block * SPAN
    code = code_at(packed, inside, m, mask, BITS).to(tl.float32)
    if BAGUA:
        base, _, step, low, _ = _bagua(lo, hi, LEVELS)
        value = _bagua_value(code, base, step, low)
    else:
        factor, base, _, step = _affine(lo, hi, max_scale, LEVELS)
        value = _affine_value(code, hi, factor, base, step)
    deliver(out, alpha, accumulate, place, mask, value)


def encode_min_max(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, bagua: bool, stochastic: bool, threads: int = 1
) -> list[bool]:
    """Write float32 lo, hi for every block (`block` = 0: the whole partition), then the codes."""
    packing.check_threads(threads)
    packing.check_min_max(bits, block, bagua, stochastic)
    if stochastic:
        packing.check_keys(jobs)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.min_max_nbytes(bits, block), device=device), device)
    n = max(table.most(ENCODE_N), 1)
    block = block_of(block, n)
    width = min(triton.next_power_of_2(block), TILE)
    stride = align(n, 16)  # so that codes move by the 16
    codes = table.scratch(0 if bits == 8 else stride, torch.uint8)
    table.launch(
        _encode,
        triton.cdiv(triton.cdiv(n, block), TILE // width),
        *(max_scale(2**bits - 1), codes, stride),
        BITS=bits,
        BLOCK=block,
        BAGUA=bagua,
        STOCHASTIC=stochastic,
        CHUNKED=stochastic and chunked(table, block),
        ROWS=TILE // width,
        WIDTH=width,
        REGULAR=table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0 and block % 16 == 0,
    )
    if bits < 8:
        pack_codes(table, codes, stride, bits=bits, block=block, header=8)
    return table.finite()


def decode_min_max(jobs: Sequence[DecodeJob], *, bits: int, block: int, bagua: bool, threads: int = 1) -> None:
    """Set each value from its code and the range of its block."""
    packing.check_threads(threads)
    packing.check_min_max(bits, block, bagua, stochastic=False)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.min_max_nbytes(bits, block), device=device), device)
    block = block_of(block, table.most(DECODE_N))
    table.launch(
        _decode,
        max(1, triton.cdiv(table.most(DECODE_N), TILE)),
        max_scale(2**bits - 1),
        BITS=bits,
        BLOCK=block,
        SPAN=packed_nbytes(block, bits),
        BAGUA=bagua,
        REGULAR=table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0,
        TILE=TILE,
    )
