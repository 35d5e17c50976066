"""Block quantisers of any width: a scale a block, from its largest magnitude or its norm, then codes.

A program works on ROWS blocks, WIDTH columns at a time, and leaves a code a byte: in place for 8 bits, else beside, for
`pack_codes`. A block, however long, is one program's. Norms are summed before, by programs of their own. Decoding is
one flat pass. (8 and 4 bits by the largest magnitude, not rotated, have faster kernels in triton_block_quant.py.)
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from thinwire.kernels.codes import packed_nbytes
from thinwire.kernels.reference_steps import FLOAT32_MAX, TREE_CHUNK, max_scale
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
from thinwire.kernels.triton_launch import DECODE_N, DECODE_OUT, ENCODE_N, OFFSET, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_philox import uniform
from thinwire.kernels.triton_rotate import rotate, unrotate
from thinwire.kernels.triton_tree_sum import CHUNK, to_one_chunk, tree_sum
from thinwire.wire import align

TILE = 2048

# 1.5 * 2**23: adding it rounds to an integer, ties to even, and leaves that integer in the low bits.
SHIFT = tl.constexpr(12582912.0)
LARGEST = tl.constexpr(FLOAT32_MAX)


@triton.jit
def scale_of(largest, max_scale, LEVELS: tl.constexpr):
    """Return largest / LEVELS, up one ulp where LEVELS times it falls short, and at most max_scale."""
    scale = tl.div_rn(largest, LEVELS * 1.0)
    up = (scale.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.minimum(tl.where(scale * LEVELS < largest, up, scale), max_scale)


@triton.jit
def shifted_code(y, LEVELS: tl.constexpr):
    """Return SHIFT + code of y = q / scale, or of floor(y + u)."""
    return tl.minimum(tl.maximum(y, -LEVELS * 1.0), LEVELS * 1.0) + SHIFT


@triton.jit
def natural_code(y, u, LEVELS: tl.constexpr):
    """Return c: y = |q| / scale becomes 2**(c - LEVELS) by chance, or 0 where c is 0.

    A random fraction added to the bits of a float carries into its exponent with the probability of its mantissa.
    """
    carried = ((y.to(tl.int32, bitcast=True) + (u * 8388608.0).to(tl.int32)) >> 23) - 127 + LEVELS
    lowest = (y * (2.0 ** (LEVELS - 1)) + u >= 1.0).to(tl.int32)  # below the lowest level: it, or 0
    code = tl.where(y < 2.0 ** (1 - LEVELS), lowest, carried)
    return tl.minimum(tl.maximum(code, 0), LEVELS)


@triton.jit
def natural_value(code, negative, scale, LEVELS: tl.constexpr):
    """Return what a code stands for, -0 where a negative one is 0."""
    level = tl.where(code > 0, (code + (127 - LEVELS)) << 23, 0) | (negative.to(tl.int32) << 31)
    return level.to(tl.float32, bitcast=True) * scale


@jobs_kernel
def _squares(
    flags,
    table,
    num_tiles,
    sums,
    num_sums,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
    """Sum the squares of ROWS chunks of up to 1024; a block has one or more, of its own."""
    CHUNKS: tl.constexpr = (BLOCK + CHUNK - 1) // CHUNK
    job, tile = job_and_tile(num_tiles)
    x, residual, has_residual, residual_scale, n = input_of(table, job, 0, REGULAR)
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    block = row // CHUNKS
    i = (row - block * CHUNKS) * CHUNK + tl.arange(0, WIDTH)[None, :]
    place = block.to(tl.int64) * BLOCK + i
    q = form_q(x, residual, has_residual, residual_scale, place, (i < BLOCK) & (place < n))
    flag_non_finite(flags, job, tl.max(magnitude(q)))
    wide = q.to(tl.float64)
    sums += job.to(tl.int64) * num_sums + row
    tl.store(sums, tree_sum(wide * wide, ROWS, WIDTH), mask=row < num_sums)


@jobs_kernel
def _encode(
    flags,
    table,
    num_tiles,
    max_scale,
    sums,
    num_sums,
    most_blocks,
    codes,
    stride,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    ROTATION: tl.constexpr,
    SUMS: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    job, tile = job_and_tile(num_tiles)
    first_block = tile.to(tl.int64) * ROWS
    first = first_block * BLOCK
    x, residual, has_residual, residual_scale, left = input_of(table, job, first, REGULAR)
    row = tl.arange(0, ROWS)[:, None]
    begin = row * BLOCK
    end = tl.minimum(tl.maximum(left, 0), ROWS * BLOCK).to(tl.int32)
    n = left + first
    num_blocks = tl.cdiv(n, BLOCK)

    scale = tl.full((ROWS, 1), LARGEST, tl.float32)
    if NORM != "max":
        term, block = tl.arange(0, SUMS)[None, :], first_block + row
        sums += (job.to(tl.int64) * most_blocks + block) * num_sums
        squares = tl.load(sums + term, mask=(block < num_blocks) & (term < num_sums), other=0.0)
        square = tree_sum(squares, ROWS, SUMS)
        if NORM == "clipped":
            m = tl.minimum(tl.maximum(end - begin, 1), BLOCK)
            norm = (tl.sqrt(square / m.to(tl.float64)) * CLIP).to(tl.float32)
        else:
            norm = tl.sqrt(square).to(tl.float32)
        scale = tl.where(magnitude(norm) <= INF_BITS, tl.minimum(norm, LARGEST), 0.0)
    if NORM != "l2":
        peak = tl.zeros((ROWS, 1), tl.int32)
        for start in range(0, BLOCK, WIDTH):
            i = start + tl.arange(0, WIDTH)[None, :]
            q = form_q(x, residual, has_residual, residual_scale, begin + i, (i < BLOCK) & (begin + i < end))
            if ROTATION:
                q = rotate(q, begin + i, end, ROWS * WIDTH, ROTATION)
            peak = tl.maximum(peak, tl.max(magnitude(q), axis=1, keep_dims=True))
        flag_non_finite(flags, job, tl.max(peak))
        scale = tl.minimum(scale, tl.where(peak < INF_BITS, peak, 0).to(tl.float32, bitcast=True))
    if RULE != "natural":
        scale = scale_of(scale, max_scale, LEVELS)
    divisor = tl.where(scale > 0.0, scale, 1.0)  # where it is 0, so are all codes

    out = tl.load(encode_row(table, job) + 2)
    random = encode_row(table, job) + 5
    key, offset, steps = tl.load(random), tl.load(random + 1) + first, tl.load(random + 2)
    if BITS == 8:
        to = pointer_to(out + 4 * num_blocks + first, tl.uint8, 1 if BLOCK % 4 else 4)
    else:
        to = codes + job.to(tl.int64) * stride + first
    for start in range(0, BLOCK, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        place = begin + i
        mask = (i < BLOCK) & (place < end)
        q = form_q(x, residual, has_residual, residual_scale, place, mask)
        if RULE == "natural":
            u = uniform(key, steps, offset + begin + start, ROWS, WIDTH, CHUNKED)
            code = natural_code(tl.div_rn(tl.abs(q), divisor), u, LEVELS)
            negative = (q < 0.0) & (code > 0)
            value = natural_value(code, negative, scale, LEVELS)
            byte = tl.where(negative, code + LEVELS + 1, code)
        else:
            rotated = q
            if ROTATION:
                rotated = rotate(q, place, end, ROWS * WIDTH, ROTATION)
            y = tl.div_rn(rotated, divisor)
            if RULE == "stochastic":  # no denormal reaches the floor: u has 17 bits below the point
                y = tl.floor(y + uniform(key, steps, offset + begin + start, ROWS, WIDTH, CHUNKED))
            shifted = shifted_code(y, LEVELS)
            value = (shifted - SHIFT) * scale
            byte = shifted.to(tl.int32, bitcast=True) & 0xFF
        if ROTATION:
            value = unrotate(value, place, end, ROWS * WIDTH, ROTATION)
            flag_non_finite(flags, job, tl.max(tl.where(only_if(mask, has_residual), magnitude(q - value), 0)))
        leave(residual, has_residual, place, mask, q - value)
        tl.store(to + place, byte.to(tl.uint8), mask=mask)
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
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    NATURAL: tl.constexpr,
    ROTATION: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
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
    code = code_at(packed, inside, m, mask, BITS)
    if NATURAL:
        value = natural_value(code & LEVELS, code > LEVELS, scale, LEVELS)
    else:
        value = ((code ^ (LEVELS + 1)) - (LEVELS + 1)).to(tl.float32) * scale
    if ROTATION:
        value = unrotate(value, place, left, TILE, ROTATION)
    deliver(out, alpha, accumulate, place, mask, value)


def block_of(block: int, longest: int) -> int:
    """Return the length of a block; `block` = 0 is the whole partition, one block that is at least as long.

    That length is rounded up, so that few lengths are compiled.
    """
    return block or 1 << max(longest - 1, 0).bit_length()


def chunked(table: Table, block: int) -> bool:
    """Return whether every block begins with a chunk of random numbers."""
    return table.any_bits(OFFSET) % 128 == 0 and block % 128 == 0


def encode_blocks(
    table: Table,
    *,
    bits: int,
    block: int,
    rule: str,
    norm: str = "max",
    clip: float = 0.0,
    rotation: int = 0,
    pack: Callable[..., None] = pack_codes,
) -> None:
    """Write a scale a block and the codes, which `pack` puts behind the scales unless they are bytes.

    `rule` is nearest, stochastic or natural. `norm` is max, l2, or clipped: max, or `clip` times the root of the mean
    square, whichever is less. `rotation` is of codes that are not natural.
    """
    n, levels = max(table.most(ENCODE_N), 1), 2 ** (bits - 1) - 1
    num_blocks = triton.cdiv(n, block)
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0 and block % 16 == 0
    width = min(triton.next_power_of_2(block), TILE)
    stride = align(n, 16)  # so that codes move by the 16
    sums, num_sums = table.scratch(1, torch.float64), 1
    if norm != "max":
        sums, num_sums = sums_of_squares(table, num_blocks, block, regular)
    codes = table.scratch(0 if bits == 8 else stride, torch.uint8)
    table.launch(
        _encode,
        triton.cdiv(num_blocks, TILE // width),
        *(max_scale(levels), sums, num_sums, num_blocks, codes, stride),
        BITS=bits,
        BLOCK=block,
        RULE=rule,
        NORM=norm,
        CLIP=clip,
        ROTATION=rotation,
        SUMS=triton.next_power_of_2(num_sums),
        CHUNKED=chunked(table, block) and rule != "nearest",
        ROWS=TILE // width,
        WIDTH=width,
        REGULAR=regular,
    )
    if bits < 8:
        pack(table, codes, stride, bits=bits, block=block)


def sums_of_squares(table: Table, num_blocks: int, block: int, regular: bool) -> tuple[torch.Tensor, int]:
    """Return up to 1024 sums a block, whose tree is the sum of its squares, and how many."""
    num_chunks = triton.cdiv(block, TREE_CHUNK)
    width = min(triton.next_power_of_2(block), TREE_CHUNK)
    rows = TREE_CHUNK // width
    num_sums = num_blocks * num_chunks
    sums = table.scratch(num_sums, torch.float64)
    num_tiles = triton.cdiv(num_sums, rows)
    table.launch(_squares, num_tiles, sums, num_sums, BLOCK=block, ROWS=rows, WIDTH=width, REGULAR=regular, num_warps=1)
    return to_one_chunk(table, sums, num_blocks, num_chunks)


def decode_blocks(table: Table, *, bits: int, block: int, natural: bool = False, rotation: int = 0) -> None:
    """Set value = level of the code, times the scale of its block, rotated back."""
    table.launch(
        _decode,
        max(1, triton.cdiv(table.most(DECODE_N), TILE)),
        BITS=bits,
        BLOCK=block,
        SPAN=packed_nbytes(block, bits),
        NATURAL=natural,
        ROTATION=rotation,
        REGULAR=table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0,
        TILE=TILE,
    )
