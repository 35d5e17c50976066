"""Codes of 1 to 8 bits in bytes, as codes.py lays them out: limbs of 8, 4, 2 and 1 bits, each planar.

Kernels that make codes leave them one a byte; a second launch packs them, a program for each run of packed bytes.
Kernels that read codes take them out of their limbs where they need them.
"""

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.codes import blocks_nbytes, packed_nbytes
from thinwire.kernels.triton_elements import encode_row, job_and_tile, pointer_to, zero_padding
from thinwire.kernels.triton_launch import ENCODE_N, Table, jobs_kernel

TILE = 1024


@triton.jit
def _limb_nbytes(m, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return the bytes of a limb of m codes, 0 where codes of BITS bits have none of this width."""
    return (m * WIDTH + 7) // 8 if BITS & WIDTH else m * 0


@triton.jit
def _limb_at(packed, place, m, mask, WIDTH: tl.constexpr, BITS: tl.constexpr):
    h = _limb_nbytes(m, WIDTH, BITS)
    plane = place // tl.maximum(h, 1)
    byte = tl.load(packed + (place - plane * h), mask=mask, other=0).to(tl.int32)
    return (byte >> (plane * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def in_blocks(first, place, n, BLOCK: tl.constexpr):
    """Return, of the elements `place` from the `first` on: their blocks, their places in these, and these' lengths.

    The first element is one number, an int64; beyond the first block of the program places fit in 32 bits.
    """
    first_block = first // BLOCK
    inside = (first - first_block * BLOCK).to(tl.int32) + place
    block = inside // BLOCK
    m = tl.where(block < n // BLOCK - first_block, BLOCK, (n % BLOCK).to(tl.int32))
    return block + first_block, inside - block * BLOCK, m


@triton.jit
def code_at(packed, place, m, mask, BITS: tl.constexpr):
    """Return the codes at `place` in blocks of m codes, whose bytes begin at `packed`."""
    code = m * 0
    if BITS & 8:
        code |= _limb_at(packed, place, m, mask, 8, BITS)
    if BITS & 4:
        code |= _limb_at(packed, place, m, mask, 4, BITS)
        packed += _limb_nbytes(m, 4, BITS)
    if BITS & 2:
        code |= _limb_at(packed, place, m, mask, 2, BITS) << (BITS & 4)
        packed += _limb_nbytes(m, 2, BITS)
    if BITS & 1:
        code |= _limb_at(packed, place, m, mask, 1, BITS) << (BITS & 6)
    return code


@jobs_kernel
def _pack(
    flags,
    table,
    num_tiles,
    codes,
    stride,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    HEADER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the packed bytes of BLOCK codes each behind HEADER bytes a block, and zero the padding."""
    job, tile = job_and_tile(num_tiles)
    n = tl.load(encode_row(table, job) + 3)
    num_blocks, full = tl.cdiv(n, BLOCK), n // BLOCK
    rest = (n - full * BLOCK).to(tl.int32)
    rest_nbytes = _limb_nbytes(rest, 4, BITS) + _limb_nbytes(rest, 2, BITS) + _limb_nbytes(rest, 1, BITS)
    used = full * SPAN + rest_nbytes
    out = pointer_to(tl.load(encode_row(table, job) + 2) + HEADER * num_blocks, tl.uint8, 4)

    first = tile.to(tl.int64) * TILE
    first_block = first // SPAN
    byte = (first - first_block * SPAN).to(tl.int32) + tl.arange(0, TILE)  # from the first block's first on
    block = byte // SPAN
    byte -= block * SPAN
    mask = first + tl.arange(0, TILE) < used
    m = tl.where(block < full - first_block, BLOCK, rest)

    end4 = _limb_nbytes(m, 4, BITS)
    end2 = end4 + _limb_nbytes(m, 2, BITS)
    in4, in2 = byte < end4, byte < end2
    width = tl.where(in4, 4, tl.where(in2, 2, 1))
    low = tl.where(in4, 0, tl.where(in2, BITS & 4, BITS & 6))
    h = (m * width + 7) // 8
    place = byte - tl.where(in4, 0, tl.where(in2, end4, end2))
    source = codes + job.to(tl.int64) * stride + (first_block + block) * BLOCK
    packed = byte * 0
    for plane in tl.static_range(8 if BITS & 1 else (4 if BITS & 2 else 2)):
        at = place + plane * h
        code = tl.load(source + at, mask=mask & (plane * width < 8) & (at < m), other=0).to(tl.int32)
        packed |= ((code >> low) & ((1 << width) - 1)) << (plane * width)
    tl.store(out + first + tl.arange(0, TILE), packed.to(tl.uint8), mask=mask)
    zero_padding(table, job, tile, num_tiles, HEADER * num_blocks + used, TILE)


def pack_codes(table: Table, codes: Tensor, stride: int, *, bits: int, block: int, header: int = 4) -> None:
    """Pack the codes, one a byte and `stride` a job, behind `header` bytes a block. Fewer than 8 bits."""
    num_tiles = max(1, triton.cdiv(blocks_nbytes(table.most(ENCODE_N), bits, block), TILE))
    span = packed_nbytes(block, bits)
    table.launch(_pack, num_tiles, codes, stride, BITS=bits, BLOCK=block, SPAN=span, HEADER=header, TILE=TILE)
