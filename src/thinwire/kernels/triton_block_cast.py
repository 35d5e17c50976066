"""Block casts: one float32 scale a block, then floats of 8 or 4 bits, put together from the bits of float32.

A program works on ROWS blocks, WIDTH columns at a time, as in triton_quantise.py, and leaves a code a byte: in place
for 8 bits, else beside, for `pack_codes`. Decoding is one flat pass.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.codes import packed_nbytes
from thinwire.kernels.float_formats import FORMATS, FloatFormat
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import max_scale
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
    output_of,
    pointer_to,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, DECODE_OUT, ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_quantise import SHIFT, scale_of
from thinwire.wire import align

TILE = 2048


@triton.jit
def _code_of(y, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the code nearest to y, ties to the even one; |y| is at most the largest value."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = magnitude(y)
    small = tl.abs(y) * (2.0 ** (BIAS - 1 + MANTISSA)) + SHIFT  # in units of the lowest level, rounded
    rounded = bits + (2 ** (DROPPED - 1) - 1) + ((bits >> DROPPED) & 1)
    code = tl.where(
        tl.abs(y) < 2.0 ** (1 - BIAS),
        small.to(tl.int32, bitcast=True) & 0x3FFFFF,
        (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA),
    )
    return tl.where(y.to(tl.int32, bitcast=True) < 0, code + 2 ** (BITS - 1), code) & (2**BITS - 1)


@triton.jit
def _value_of(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the value of a code; infinity and nan, too, of those that no encoder writes."""
    size = code & (2 ** (BITS - 1) - 1)
    bits = (size << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    if MANTISSA == 3:
        bits = tl.where(size == 127, 0x7FC00000, bits)
    if MANTISSA == 2:
        bits = tl.where(size >= 124, bits | INF_BITS, bits)
    small = size.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
    value = tl.where(size < 2**MANTISSA, small, bits.to(tl.float32, bitcast=True))
    return tl.where(code >= 2 ** (BITS - 1), -value, value)


@jobs_kernel
def _encode(
    flags,
    table,
    num_tiles,
    max_scale,
    codes,
    stride,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
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
    flag_non_finite(flags, job, tl.max(peak))
    scale = scale_of(tl.where(peak < INF_BITS, peak, 0).to(tl.float32, bitcast=True), max_scale, LARGEST)
    divisor = tl.where(scale > 0.0, scale, 1.0)

    out = tl.load(encode_row(table, job) + 2)
    if BITS == 8:
        to = pointer_to(out + 4 * num_blocks + first, tl.uint8, 1 if BLOCK % 4 else 4)
    else:
        to = codes + job.to(tl.int64) * stride + first
    for start in range(0, BLOCK, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        place = begin + i
        mask = (i < BLOCK) & (place < end)
        q = form_q(x, residual, has_residual, residual_scale, place, mask)
        y = tl.minimum(tl.maximum(tl.div_rn(q, divisor), -LARGEST), LARGEST)
        code = _code_of(tl.where(scale > 0.0, y, 0.0), BITS, MANTISSA, BIAS)  # a block of zeros has no signs
        leave(residual, has_residual, place, mask, q - _value_of(code, BITS, MANTISSA, BIAS) * scale)
        tl.store(to + place, code.to(tl.uint8), mask=mask)
    scales = (out + 4 * first_block).to(tl.pointer_type(tl.float32))
    tl.store(scales + row, scale, mask=row < num_blocks - first_block)
    if BITS == 8:
        zero_padding(table, job, tile, num_tiles, 4 * num_blocks + n, 1024)


@jobs_kernel
def _decode(
    flags,
    table,
    num_tiles,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    data = tl.load(decode_row(table, job))
    n = left + first
    num_blocks = tl.cdiv(n, BLOCK)
    block, inside, m = in_blocks(first, place, n, BLOCK)
    scale = tl.load(data.to(tl.pointer_type(tl.float32)) + block, mask=mask, other=0.0)
    packed = (data + 4 * num_blocks).to(tl.pointer_type(tl.uint8)) + block * SPAN
    value = _value_of(code_at(packed, inside, m, mask, BITS), BITS, MANTISSA, BIAS)
    deliver(out, alpha, accumulate, place, mask, value * scale)


def _check(format: FloatFormat, block: int, threads: int) -> None:
    packing.check_threads(threads)
    if format not in FORMATS or block < 1:
        raise ValueError(
            f"block cast: expected a format of {', '.join(FORMATS)} and a block of at least 1, got {format!r} and "
            f"{block}"
        )


def encode_block_cast(jobs: Sequence[EncodeJob], *, format: FloatFormat, block: int, threads: int = 1) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes."""
    _check(format, block, threads)
    if not jobs:
        return []
    to, device = FORMATS[format], jobs[0].x.device
    packed = packing.pack_encode(jobs, packing.block_quant_nbytes(to.bits, block), device=device)
    table = Table.of_encode(packed, device)
    n = max(table.most(ENCODE_N), 1)
    width = min(triton.next_power_of_2(block), TILE)
    rows, stride = TILE // width, align(n, 16)  # so that codes move by the 16
    codes = table.scratch(0 if to.bits == 8 else stride, torch.uint8)
    table.launch(
        _encode,
        triton.cdiv(triton.cdiv(n, block), rows),
        *(max_scale(to.largest), codes, stride),
        LARGEST=to.largest,
        BITS=to.bits,
        MANTISSA=to.mantissa,
        BIAS=to.bias,
        BLOCK=block,
        ROWS=rows,
        WIDTH=width,
        REGULAR=table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0 and block % 16 == 0,
    )
    if to.bits < 8:
        pack_codes(table, codes, stride, bits=to.bits, block=block)
    return table.finite()


def decode_block_cast(jobs: Sequence[DecodeJob], *, format: FloatFormat, block: int, threads: int = 1) -> None:
    """Set value = value of the code, times the scale of its block."""
    _check(format, block, threads)
    if not jobs:
        return
    to, device = FORMATS[format], jobs[0].out.device
    packed = packing.pack_decode(jobs, packing.block_quant_nbytes(to.bits, block), device=device)
    table = Table.of_decode(packed, device)
    table.launch(
        _decode,
        max(1, triton.cdiv(table.most(DECODE_N), TILE)),
        BITS=to.bits,
        MANTISSA=to.mantissa,
        BIAS=to.bias,
        BLOCK=block,
        SPAN=packed_nbytes(block, to.bits),
        REGULAR=table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0,
        TILE=TILE,
    )
