"""Block quantisation: one float32 scale a block, then int8 codes or planar nibbles.

Other widths than 8 and 4 bits, and rotations, are those of triton_quantise.py. Here, a program works on ROWS blocks,
WIDTH columns at a time. A column is one element of each block (8 bits) or the two that share a byte (4 bits: elements i
and i + half, half = ceil(m / 2) of the block's m elements). Blocks of up to WIDTH columns are read once; longer ones
twice, to find the scale and to code.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import max_scale
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
from thinwire.kernels.triton_philox import uniform
from thinwire.kernels.triton_quantise import SHIFT, chunked, decode_blocks, encode_blocks, scale_of, shifted_code

TILE = 2048  # columns of a program


@triton.jit
def _columns(left, BLOCK: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, REGULAR: tl.constexpr):
    """Return, per block: its first element, its elements in the first half, and the end of the second half.

    Places count from the program's first element. `SPAN` is the number of columns of a full block. `REGULAR`: every
    block is full or beyond the end.
    """
    begin = tl.arange(0, ROWS)[:, None] * BLOCK
    end = tl.minimum(tl.maximum(left, 0), ROWS * BLOCK).to(tl.int32)
    if REGULAR:
        half = SPAN
    else:
        m = tl.minimum(tl.maximum(end - begin, 0), BLOCK)
        half = tl.minimum((m + 1) // 2, m) if SPAN < BLOCK else m
        end = begin + m
    return begin, half, end


@jobs_kernel
def _encode(
    flags,
    table,
    num_tiles,
    max_scale,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    SPAN: tl.constexpr = BLOCK if BITS == 8 else (BLOCK + 1) // 2
    job, tile = job_and_tile(num_tiles)
    first_block = tile.to(tl.int64) * ROWS
    first = first_block * BLOCK
    x, residual, has_residual, residual_scale, left = input_of(table, job, first, REGULAR)
    begin, half, end = _columns(left, BLOCK, SPAN, ROWS, REGULAR)

    peak = tl.zeros((ROWS, 1), tl.int32)
    for start in range(0, SPAN, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        q = form_q(x, residual, has_residual, residual_scale, begin + i, (i < half) & (begin + i < end))
        largest = magnitude(q)
        if BITS == 4:
            high_place = begin + half + i
            high_q = form_q(x, residual, has_residual, residual_scale, high_place, (i < half) & (high_place < end))
            largest = tl.maximum(largest, magnitude(high_q))
        peak = tl.maximum(peak, tl.max(largest, axis=1, keep_dims=True))
    scale = tl.where(peak < INF_BITS, scale_of(peak.to(tl.float32, bitcast=True), max_scale, LEVELS), 0.0)
    divisor = tl.where(scale > 0.0, scale, 1.0)  # where it is 0, so are all codes

    row = tl.arange(0, ROWS)[:, None]
    out = tl.load(encode_row(table, job) + 2)
    random = encode_row(table, job) + 5
    key, offset, steps = tl.load(random), tl.load(random + 1) + first, tl.load(random + 2)
    n = left + first
    num_blocks = tl.cdiv(n, BLOCK)
    codes = pointer_to(out + 4 * num_blocks + first_block * SPAN, tl.uint8, 1 if SPAN % 4 else 4)
    # Nothing is stored before all is loaded: so where one step does it, the compiler sees that it has loaded q before.
    for start in range(0, SPAN, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        place = begin + i
        mask = (i < half) & (place < end)
        q = form_q(x, residual, has_residual, residual_scale, place, mask)
        y = tl.div_rn(q, divisor)
        if STOCHASTIC:  # no denormal reaches the floor, which might flush it: u has 17 bits below the point
            y = tl.floor(y + uniform(key, steps, offset + begin + start, ROWS, WIDTH, CHUNKED))
        code = shifted_code(y, LEVELS)
        byte = code.to(tl.int32, bitcast=True)
        if BITS == 4:
            high_place = begin + half + i
            high_mask = (i < half) & (high_place < end)
            high_q = form_q(x, residual, has_residual, residual_scale, high_place, high_mask)
            high_y = tl.div_rn(high_q, divisor)
            if STOCHASTIC:
                high_y = tl.floor(high_y + uniform(key, steps, offset + begin + half + start, ROWS, WIDTH, CHUNKED))
            high_code = shifted_code(high_y, LEVELS)
            high = tl.where(high_mask, high_code.to(tl.int32, bitcast=True), 0)  # an odd block's last is no code
            byte = (byte & 15) | ((high & 15) << 4)
            leave(residual, has_residual, high_place, high_mask, high_q - (high_code - SHIFT) * scale)
        leave(residual, has_residual, place, mask, q - (code - SHIFT) * scale)
        tl.store(codes + row * SPAN + i, (byte & 0xFF).to(tl.uint8), mask=mask)
    scales = (out + 4 * first_block).to(tl.pointer_type(tl.float32))
    tl.store(scales + row, scale, mask=row < num_blocks - first_block)
    flag_non_finite(flags, job, tl.max(peak))

    rest = n - n // BLOCK * BLOCK
    used = 4 * num_blocks + n // BLOCK * SPAN + (rest if BITS == 8 else (rest + 1) // 2)
    zero_padding(table, job, tile, num_tiles, used, 1024)


@jobs_kernel
def _decode(
    flags,
    table,
    num_tiles,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REGULAR: tl.constexpr,
):
    SPAN: tl.constexpr = BLOCK if BITS == 8 else (BLOCK + 1) // 2
    job, tile = job_and_tile(num_tiles)
    first_block = tile.to(tl.int64) * ROWS
    first = first_block * BLOCK
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    begin, half, end = _columns(left, BLOCK, SPAN, ROWS, REGULAR)
    row = tl.arange(0, ROWS)[:, None]
    data = tl.load(decode_row(table, job))
    num_blocks = tl.cdiv(left + first, BLOCK)
    scales = (data + 4 * first_block).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + row, mask=row < num_blocks - first_block, other=0.0)
    codes = pointer_to(data + 4 * num_blocks + first_block * SPAN, tl.uint8, 1 if SPAN % 4 else 4)
    for start in range(0, SPAN, WIDTH):
        i = start + tl.arange(0, WIDTH)[None, :]
        mask = (i < half) & (begin + i < end)
        byte = tl.load(codes + row * SPAN + i, mask=mask, other=0).to(tl.int32)
        if BITS == 8:
            deliver(out, alpha, accumulate, begin + i, mask, ((byte ^ 128) - 128).to(tl.float32) * scale)
        else:
            deliver(out, alpha, accumulate, begin + i, mask, (((byte & 15) ^ 8) - 8).to(tl.float32) * scale)
            place = begin + half + i
            mask = (i < half) & (place < end)
            deliver(out, alpha, accumulate, place, mask, (((byte >> 4) ^ 8) - 8).to(tl.float32) * scale)


def _geometry(table: Table, bits: int, block: int, n_column: int, *address_columns: int) -> tuple[int, dict[str, int]]:
    """Return how many programs a job gets, and the constants that say what each does."""
    span = block if bits == 8 else -(-block // 2)
    width = min(triton.next_power_of_2(span), TILE)
    rows = TILE // width
    full = table.any_bits(n_column, *address_columns) % 16 == 0 and not (table.words[:, n_column] % block).any()
    num_tiles = max(1, triton.cdiv(triton.cdiv(table.most(n_column), block), rows))
    regular = full and (bits == 8 or block % 2 == 0)
    return num_tiles, {"BITS": bits, "BLOCK": block, "ROWS": rows, "WIDTH": width, "REGULAR": regular}


def encode_block_quant(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, stochastic: bool, rotation: int = 0, threads: int = 1
) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes."""
    packing.check_threads(threads)
    packing.check_block_quant(bits, block, rotation)
    if stochastic:
        packing.check_keys(jobs)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.block_quant_nbytes(bits, block), device=device), device)
    if bits not in (4, 8) or rotation:
        rule = "stochastic" if stochastic else "nearest"
        encode_blocks(table, bits=bits, block=block, rule=rule, rotation=rotation)
        return table.finite()
    num_tiles, constants = _geometry(table, bits, block, ENCODE_N, X, RESIDUAL)
    by_chunks = chunked(table, block)
    if bits == 4:  # also the second half of a block
        by_chunks = by_chunks and block % 256 == 0 and constants["REGULAR"]
    constants |= {"STOCHASTIC": stochastic, "CHUNKED": stochastic and by_chunks}
    table.launch(_encode, num_tiles, max_scale(2 ** (bits - 1) - 1), **constants)
    return table.finite()


def decode_block_quant(
    jobs: Sequence[DecodeJob], *, bits: int, block: int, rotation: int = 0, threads: int = 1
) -> None:
    """Set value = code * scale of its block, rotated back."""
    packing.check_threads(threads)
    packing.check_block_quant(bits, block, rotation)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.block_quant_nbytes(bits, block), device=device), device)
    if bits not in (4, 8) or rotation:
        decode_blocks(table, bits=bits, block=block, rotation=rotation)
        return
    num_tiles, constants = _geometry(table, bits, block, DECODE_N, DECODE_OUT)
    table.launch(_decode, num_tiles, **constants)
