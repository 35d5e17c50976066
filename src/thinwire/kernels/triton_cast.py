"""Casts, and the check that all values are finite: one flat pass each."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.triton_elements import (
    decode_row,
    deliver,
    encode_row,
    flag_non_finite,
    floats_at,
    form_q,
    input_of,
    job_and_tile,
    leave,
    left_from,
    magnitude,
    output_of,
    zero_padding,
)
from thinwire.kernels.triton_launch import (
    DATA,
    DECODE_N,
    DECODE_OUT,
    ENCODE_N,
    FINITE_N,
    OUT,
    RESIDUAL,
    Table,
    X,
    jobs_kernel,
)
from thinwire.kernels.triton_values import NAMES, load_values, store_values

TILE = 2048
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@jobs_kernel
def _finite(flags, table, num_tiles, REGULAR: tl.constexpr, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    x = floats_at(tl.load(table + job * 2) + 4 * first, REGULAR)
    left = left_from(table + job * 2 + 1, first, REGULAR)
    place = tl.arange(0, TILE)
    value = tl.load(x + place, mask=place < left, other=0.0)
    flag_non_finite(flags, job, tl.max(magnitude(value), axis=0))


def all_finite(tensors: Sequence[Tensor], *, threads: int = 1) -> list[bool]:
    """Return, per tensor, whether every value is finite."""
    packing.check_threads(threads)
    if not tensors:
        return []
    table = Table.of_finite(packing.pack_finite(tensors, tensors[0].device), tensors[0].device)
    num_tiles = max(1, triton.cdiv(table.most(FINITE_N), TILE))
    table.launch(_finite, num_tiles, REGULAR=table.any_bits(X, FINITE_N) % 16 == 0, TILE=TILE)
    return table.finite()


@jobs_kernel
def _encode(
    flags, table, num_tiles, NUMBER: tl.constexpr, NBYTES: tl.constexpr, REGULAR: tl.constexpr, TILE: tl.constexpr
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    x, residual, has_residual, scale, left = input_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    q = form_q(x, residual, has_residual, scale, place, mask)
    out = tl.load(encode_row(table, job) + 2)
    sent = store_values(out + NBYTES * first, place, mask, q, NUMBER, 16 if REGULAR else 4)
    leave(residual, has_residual, place, mask, q - sent)
    flag_non_finite(flags, job, tl.max(tl.maximum(magnitude(q), magnitude(sent)), axis=0))
    zero_padding(table, job, tile, num_tiles, (left + first) * NBYTES, TILE)


@jobs_kernel
def _decode(
    flags, table, num_tiles, NUMBER: tl.constexpr, NBYTES: tl.constexpr, REGULAR: tl.constexpr, TILE: tl.constexpr
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    data = tl.load(decode_row(table, job))
    value = load_values(data + NBYTES * first, place, mask, NUMBER, 16 if REGULAR else 4)
    deliver(out, alpha, accumulate, place, mask, value)


def encode_cast(jobs: Sequence[EncodeJob], *, dtype: torch.dtype, threads: int = 1) -> list[bool]:
    """Write n values of `dtype`, rounded to nearest even."""
    packing.check_threads(threads)
    packing.check_dtype(dtype, *_DTYPES)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.cast_nbytes(dtype), device=device), device)
    table.launch(
        _encode,
        max(1, triton.cdiv(table.most(ENCODE_N), TILE)),
        NUMBER=NAMES[dtype],
        NBYTES=dtype.itemsize,
        REGULAR=table.any_bits(X, RESIDUAL, OUT, ENCODE_N) % 16 == 0,
        TILE=TILE,
    )
    return table.finite()


def decode_cast(jobs: Sequence[DecodeJob], *, dtype: torch.dtype, threads: int = 1) -> None:
    """Read n values of `dtype`."""
    packing.check_threads(threads)
    packing.check_dtype(dtype, *_DTYPES)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.cast_nbytes(dtype), device=device), device)
    table.launch(
        _decode,
        max(1, triton.cdiv(table.most(DECODE_N), TILE)),
        NUMBER=NAMES[dtype],
        NBYTES=dtype.itemsize,
        REGULAR=table.any_bits(DATA, DECODE_OUT, DECODE_N) % 16 == 0,
        TILE=TILE,
    )
