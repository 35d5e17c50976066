"""One bit an element: one float32 scale, the mean of |q| or the root of the mean of q^2, then sign bits.

The scale needs all of a partition, so encoding takes two launches, three with a residual: chunks of 1024 leave their
signs and their sum; the sums' tree gives the scale; the residual is rewritten.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import TREE_CHUNK
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
    only_if,
    output_of,
    pointer_to,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, DECODE_OUT, ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_tree_sum import CHUNK, to_one_chunk, tree_sum

TILE = 2048


@jobs_kernel
def _chunks(flags, table, num_tiles, sums, RMS: tl.constexpr, REGULAR: tl.constexpr):
    """Write the signs of one chunk, and its sum. A chunk beyond the end sums to 0, which changes nothing above."""
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * CHUNK
    x, residual, has_residual, scale, left = input_of(table, job, first, REGULAR)
    place = tl.arange(0, CHUNK)
    q = form_q(x, residual, has_residual, scale, place, place < left)
    flag_non_finite(flags, job, tl.max(magnitude(q), axis=0))
    wide = q.to(tl.float64)
    terms = tl.reshape(wide * wide if RMS else tl.abs(wide), (1, CHUNK))
    tl.store(sums + tl.program_id(0), tl.sum(tree_sum(terms, 1, CHUNK)))
    negative = tl.reshape((q < 0.0).to(tl.int32), (CHUNK // 8, 8))
    packed = tl.sum(negative << tl.arange(0, 8)[None, :], axis=1)
    signs = pointer_to(tl.load(encode_row(table, job) + 2) + 4 + first // 8, tl.uint8, 4)
    byte = tl.arange(0, CHUNK // 8)
    tl.store(signs + byte, packed.to(tl.uint8), mask=8 * byte < left)


@jobs_kernel
def _scale(flags, table, num_tiles, sums, num_sums, RMS: tl.constexpr):
    """Sum what is left, at most 1024 sums, and write the scale."""
    job, tile = job_and_tile(num_tiles)
    place = tl.arange(0, CHUNK)[None, :]
    total = tl.sum(tree_sum(tl.load(sums + job * num_sums + place, mask=place < num_sums, other=0.0), 1, CHUNK))
    n = tl.load(encode_row(table, job) + 3)
    mean = total / tl.maximum(n, 1).to(tl.float64)
    scale = (tl.sqrt(mean) if RMS else mean).to(tl.float32)
    tl.store(tl.load(encode_row(table, job) + 2).to(tl.pointer_type(tl.float32)), scale)
    flag_non_finite(flags, job, magnitude(scale))
    zero_padding(table, job, tile, num_tiles, 4 + (n + 7) // 8, 1024)


@jobs_kernel
def _residual(flags, table, num_tiles, REGULAR: tl.constexpr, TILE: tl.constexpr):
    """Leave q - decode(bytes)."""
    job, tile = job_and_tile(num_tiles)
    x, residual, has_residual, residual_scale, left = input_of(table, job, tile.to(tl.int64) * TILE, REGULAR)
    place = tl.arange(0, TILE)
    mask = only_if(place < left, has_residual)
    q = form_q(x, residual, has_residual, residual_scale, place, mask)
    scale = tl.load(tl.load(encode_row(table, job) + 2).to(tl.pointer_type(tl.float32)))
    leave(residual, has_residual, place, mask, q - tl.where(q < 0.0, -scale, scale))


@jobs_kernel
def _decode(flags, table, num_tiles, REGULAR: tl.constexpr, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    data = tl.load(decode_row(table, job))
    scale = tl.load(data.to(tl.pointer_type(tl.float32)))
    place = tl.arange(0, TILE)
    mask = place < left
    packed = tl.load(pointer_to(data + 4 + first // 8, tl.uint8, 4) + place // 8, mask=mask, other=0).to(tl.int32)
    negative = ((packed >> (place % 8)) & 1) != 0
    deliver(out, alpha, accumulate, place, mask, tl.where(negative, -scale, scale))


def encode_one_bit(jobs: Sequence[EncodeJob], *, rms: bool, threads: int = 1) -> list[bool]:
    """Write the scale, then ceil(n/8) bytes of signs, least bit first."""
    packing.check_threads(threads)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.one_bit_nbytes, device=device), device)
    n = table.most(ENCODE_N)
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0
    num_sums = max(1, triton.cdiv(n, TREE_CHUNK))
    sums = table.scratch(num_sums, torch.float64)
    table.launch(_chunks, num_sums, sums, RMS=rms, REGULAR=regular, num_warps=1)
    sums, num_sums = to_one_chunk(table, sums, 1, num_sums)
    table.launch(_scale, 1, sums, num_sums, RMS=rms, num_warps=1)
    if table.any_bits(RESIDUAL):
        table.launch(_residual, max(1, triton.cdiv(n, TILE)), REGULAR=regular, TILE=TILE)
    return table.finite()


def decode_one_bit(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +scale where the bit is 0, -scale where it is 1."""
    packing.check_threads(threads)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.one_bit_nbytes, device=device), device)
    num_tiles = max(1, triton.cdiv(table.most(DECODE_N), TILE))
    table.launch(_decode, num_tiles, REGULAR=table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0, TILE=TILE)
