"""Ternary codes: those of two bits that triton_quantise.py rounds by chance, packed five to a byte as in ternary.py."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.ternary import NUM_BYTES, PER_BYTE, refuse, ternary_nbytes
from thinwire.kernels.triton_elements import (
    decode_row,
    deliver,
    encode_row,
    job_and_tile,
    only_if,
    output_of,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, DECODE_OUT, ENCODE_N, Table, jobs_kernel
from thinwire.kernels.triton_quantise import block_of, encode_blocks

TILE = 2048
CODES = tl.constexpr(PER_BYTE)
BYTES = tl.constexpr(NUM_BYTES)


@triton.jit
def _num_codes(n, block, first_block, BLOCK: tl.constexpr):
    """Return how many codes a block has; blocks are counted from `first_block` on."""
    return tl.where(block < n // BLOCK - first_block, BLOCK, (n % BLOCK).to(tl.int32))


@triton.jit
def _code_nbytes(n, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    return n // BLOCK * SPAN + tl.cdiv(n % BLOCK, CODES)


@jobs_kernel
def _pack(flags, table, num_tiles, codes, stride, BLOCK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr):
    """Write the packed bytes behind the scales, and zero the padding."""
    job, tile = job_and_tile(num_tiles)
    n = tl.load(encode_row(table, job) + 3)
    out = tl.load(encode_row(table, job) + 2).to(tl.pointer_type(tl.uint8)) + 4 * tl.cdiv(n, BLOCK)
    used = _code_nbytes(n, BLOCK, SPAN)
    first = tile.to(tl.int64) * TILE
    first_block = first // SPAN
    byte = (first - first_block * SPAN).to(tl.int32) + tl.arange(0, TILE)  # from the first block's first on
    block = byte // SPAN
    byte -= block * SPAN
    mask = first + tl.arange(0, TILE) < used
    m = _num_codes(n, block, first_block, BLOCK)
    h = tl.cdiv(m, CODES)
    source = codes + job.to(tl.int64) * stride + (first_block + block) * BLOCK
    packed = byte * 0
    worth = 1
    for plane in tl.static_range(CODES):
        place = byte + plane * h
        code = tl.load(source + place, mask=mask & (place < m), other=0).to(tl.int32)
        packed += tl.where(code > 1, 2, code) * worth  # -1 has the digit 2
        worth *= 3
    tl.store(out + first + tl.arange(0, TILE), packed.to(tl.uint8), mask=mask)
    zero_padding(table, job, tile, num_tiles, 4 * tl.cdiv(n, BLOCK) + used, TILE)


@jobs_kernel
def _check(flags, table, num_tiles, BLOCK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr):
    """Set the first flag where a byte stands for nothing."""
    job, tile = job_and_tile(num_tiles)
    n = tl.load(decode_row(table, job) + 2)
    data = tl.load(decode_row(table, job)).to(tl.pointer_type(tl.uint8)) + 4 * tl.cdiv(n, BLOCK)
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    byte = tl.load(data + place, mask=place < _code_nbytes(n, BLOCK, SPAN), other=0).to(tl.int32)
    tl.store(flags, 1, mask=tl.max(byte, axis=0) >= BYTES)


@jobs_kernel
def _decode(
    flags, table, num_tiles, BLOCK: tl.constexpr, SPAN: tl.constexpr, REGULAR: tl.constexpr, TILE: tl.constexpr
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = only_if(place < left, tl.load(flags) == 0)
    data = tl.load(decode_row(table, job))
    n = left + first
    first_block = first // BLOCK
    inside = (first - first_block * BLOCK).to(tl.int32) + place  # from the first block's first on
    block = inside // BLOCK
    inside -= block * BLOCK
    h = tl.maximum(tl.cdiv(_num_codes(n, block, first_block, BLOCK), CODES), 1)
    block += first_block
    scale = tl.load(data.to(tl.pointer_type(tl.float32)) + block, mask=mask, other=0.0)
    packed = (data + 4 * tl.cdiv(n, BLOCK)).to(tl.pointer_type(tl.uint8)) + block * SPAN
    plane = inside // h
    byte = tl.load(packed + (inside - plane * h), mask=mask, other=0).to(tl.int32)
    worth = tl.where(plane < 2, tl.where(plane == 0, 1, 3), tl.where(plane == 2, 9, tl.where(plane == 3, 27, 81)))
    digit = byte // worth % 3
    deliver(out, alpha, accumulate, place, mask, tl.where(digit == 2, -1, digit).to(tl.float32) * scale)


def _pack_codes(table: Table, codes: Tensor, stride: int, *, bits: int, block: int) -> None:
    num_tiles = max(1, triton.cdiv(ternary_nbytes(table.most(ENCODE_N), block), TILE))
    table.launch(_pack, num_tiles, codes, stride, BLOCK=block, SPAN=ternary_nbytes(block, block), TILE=TILE)


def _check_settings(block: int, shared: bool) -> None:
    packing.check_ternary(block)
    if shared:
        raise ThinwireError("ternary codes of a shared scale have no CUDA kernels yet; set THINWIRE_KERNELS=reference")


def encode_ternary(
    jobs: Sequence[EncodeJob], *, block: int, clip: float, shared: bool = False, threads: int = 1
) -> list[bool]:
    """Write one float32 scale a block (`block` = 0: the whole partition), then the codes, five to a byte."""
    packing.check_threads(threads)
    _check_settings(block, shared)
    packing.check_keys(jobs)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(
        packing.pack_encode(jobs, packing.ternary_code_nbytes(block, shared), device=device), device
    )
    block, norm = block_of(block, table.most(ENCODE_N)), "clipped" if clip else "max"
    encode_blocks(table, bits=2, block=block, rule="stochastic", norm=norm, clip=clip, pack=_pack_codes)
    return table.finite()


def decode_ternary(jobs: Sequence[DecodeJob], *, block: int, shared: bool = False, threads: int = 1) -> None:
    """Set value = code * scale of its block. All jobs are checked before any is written.

    Raises:
        WireError: a byte that no five codes give.
    """
    packing.check_threads(threads)
    _check_settings(block, shared)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(
        packing.pack_decode(jobs, packing.ternary_code_nbytes(block, shared), device=device), device
    )
    n, width = table.most(DECODE_N), block_of(block, table.most(DECODE_N))
    span = ternary_nbytes(width, width)
    table.launch(_check, max(1, triton.cdiv(ternary_nbytes(n, width), TILE)), BLOCK=width, SPAN=span, TILE=TILE)
    regular = table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0
    table.launch(_decode, max(1, triton.cdiv(n, TILE)), BLOCK=width, SPAN=span, REGULAR=regular, TILE=TILE)
    if table.flags()[0]:
        _refuse(jobs, block)


def _refuse(jobs: Sequence[DecodeJob], block: int) -> None:
    """Raise for the first byte that stands for nothing."""
    for index, job in enumerate(jobs):
        n = job.out.numel()
        width = block or max(n, 1)
        codes = job.data[4 * -(-n // width) :][: ternary_nbytes(n, width)].cpu()
        for place in (codes >= NUM_BYTES).nonzero().view(-1).tolist():
            refuse(index, place, int(codes[place]))
