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
    pointer_to,
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


@triton.jit
def _store(address, place, mask, value, BF16: tl.constexpr, NBYTES: tl.constexpr, REGULAR: tl.constexpr):
    """Write the values in their dtype; return what was written as float32."""
    ALIGN: tl.constexpr = 16 if REGULAR else 4
    if BF16:  # in integers, so that every chip rounds to nearest even; a NaN may become anything: it is flagged
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointer_to(address, tl.uint16, ALIGN) + place, bits.to(tl.uint16), mask=mask)
        sent = (bits << 16).to(tl.float32, bitcast=True)
    elif NBYTES == 2:
        half = value.to(tl.float16)
        tl.store(pointer_to(address, tl.float16, ALIGN) + place, half, mask=mask)
        sent = half.to(tl.float32)
    else:
        tl.store(floats_at(address, REGULAR) + place, value, mask=mask)
        sent = value
    return sent


@triton.jit
def _load(address, place, mask, BF16: tl.constexpr, NBYTES: tl.constexpr, REGULAR: tl.constexpr):
    """Return the values as float32."""
    ALIGN: tl.constexpr = 16 if REGULAR else 4
    if BF16:
        bits = tl.load(pointer_to(address, tl.uint16, ALIGN) + place, mask=mask, other=0)
        value = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif NBYTES == 2:
        half = tl.load(pointer_to(address, tl.float16, ALIGN) + place, mask=mask, other=0.0)
        value = half.to(tl.float32)
    else:
        value = tl.load(floats_at(address, REGULAR) + place, mask=mask, other=0.0)
    return value


@jobs_kernel
def _encode(
    flags, table, num_tiles, BF16: tl.constexpr, NBYTES: tl.constexpr, REGULAR: tl.constexpr, TILE: tl.constexpr
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    x, residual, has_residual, scale, left = input_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    q = form_q(x, residual, has_residual, scale, place, mask)
    sent = _store(tl.load(encode_row(table, job) + 2) + NBYTES * first, place, mask, q, BF16, NBYTES, REGULAR)
    leave(residual, has_residual, place, mask, q - sent)
    flag_non_finite(flags, job, tl.max(tl.maximum(magnitude(q), magnitude(sent)), axis=0))
    zero_padding(table, job, tile, num_tiles, (left + first) * NBYTES, TILE)


@jobs_kernel
def _decode(
    flags, table, num_tiles, BF16: tl.constexpr, NBYTES: tl.constexpr, REGULAR: tl.constexpr, TILE: tl.constexpr
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    value = _load(tl.load(decode_row(table, job)) + NBYTES * first, place, mask, BF16, NBYTES, REGULAR)
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
        BF16=dtype == torch.bfloat16,
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
        BF16=dtype == torch.bfloat16,
        NBYTES=dtype.itemsize,
        REGULAR=table.any_bits(DATA, DECODE_OUT, DECODE_N) % 16 == 0,
        TILE=TILE,
    )
