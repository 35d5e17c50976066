"""Whole chunks of a partition, those whose shared numbers are the largest; reference_top_chunks.py defines which."""

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.packing_shared import check_top_chunks, pack_shared, top_chunks_nbytes
from thinwire.kernels.triton_elements import flag_non_finite, job_and_tile, pointer_to
from thinwire.kernels.triton_launch import DECODE_N, ENCODE_N, Table, jobs_kernel
from thinwire.kernels.triton_units import decode_units, encode_units, mask_of

TILE = 1024
LEAST = tl.constexpr(-(2**31))


@jobs_kernel
def _select(flags, table, num_tiles, masks, numbers, units, most, FLAGGED: tl.constexpr, TILE: tl.constexpr):
    """List the k chunks with the largest numbers, ascending; ties go to the lowest. One program a partition."""
    job, _ = job_and_tile(num_tiles)
    _, _, _, num_chunks, k = mask_of(masks, job)
    count, k = num_chunks.to(tl.int32), k.to(tl.int32)
    numbers = pointer_to(tl.load(numbers + job), tl.int32, 4)  # the bits order as the numbers do
    units += job.to(tl.int64) * most

    kth = tl.zeros((), tl.int32) + LEAST  # grows, bit by bit, to the largest that k numbers reach
    for step in range(0, 32):
        higher = kth ^ (tl.full((), 1, tl.int32) << (31 - step))
        num_reach = tl.zeros((), tl.int32)
        for start in range(0, count, TILE):
            chunk = start + tl.arange(0, TILE)
            number = tl.load(numbers + chunk, mask=chunk < count, other=LEAST)
            num_reach += tl.sum(((chunk < count) & (number >= higher)).to(tl.int32), axis=0)
        kth = tl.where(num_reach >= k, higher, kth)

    num_above, peak = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, count, TILE):
        chunk = start + tl.arange(0, TILE)
        number = tl.load(numbers + chunk, mask=chunk < count, other=LEAST)
        num_above += tl.sum((number > kth).to(tl.int32), axis=0)
        peak = tl.maximum(peak, tl.max(number & 0x7FFFFFFF, axis=0))
    if FLAGGED:
        flag_non_finite(flags, job, peak)

    ties, num_equal, num_listed = k - num_above, tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, count, TILE):
        chunk = start + tl.arange(0, TILE)
        number = tl.load(numbers + chunk, mask=chunk < count, other=LEAST)
        equal = ((chunk < count) & (number == kth)).to(tl.int32)
        first = num_equal + tl.cumsum(equal, axis=0) <= ties
        keep = (chunk < count) & ((number > kth) | ((equal != 0) & first))
        one = keep.to(tl.int32)
        tl.store(units + num_listed + tl.cumsum(one, axis=0) - one, chunk, mask=keep)
        num_equal += tl.sum(equal, axis=0)
        num_listed += tl.sum(one, axis=0)


def _chunks(
    table: Table, jobs: Sequence[EncodeJob] | Sequence[DecodeJob], n_column: int, k: Sequence[int], chunk: int
) -> tuple[Tensor, Tensor, int]:
    """Return what `encode_units` takes: the masks, the chunks that are sent, and room for how many there is."""
    num_chunks, undrawn = -(-table.words[:, n_column] // chunk), np.zeros((len(jobs), 3), dtype=np.int64)
    masks = table.send(np.column_stack([undrawn, num_chunks, np.array(k)]))
    shared = pack_shared(jobs, chunk, masks.device)
    numbers = table.send(np.frombuffer(bytearray(shared), dtype=np.int64))
    most = max(k)
    units = table.scratch(most, torch.int32)
    table.launch(_select, 1, masks, numbers, units, most, FLAGGED=n_column == ENCODE_N, TILE=TILE)
    return masks, units, most


def encode_top_chunks(
    jobs: Sequence[EncodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> list[bool]:
    """Write k * chunk values: the elements of the chunks, ascending; zeros for what lies beyond the end."""
    packing.check_threads(threads)
    check_top_chunks(jobs, k, dtype, chunk)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, top_chunks_nbytes(dtype, chunk), k, device), device)
    encode_units(table, *_chunks(table, jobs, ENCODE_N, k, chunk), max(k), dtype, chunk)
    return table.finite()


def decode_top_chunks(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> None:
    """Put the values back in their places; every other element is zero."""
    packing.check_threads(threads)
    check_top_chunks(jobs, k, dtype, chunk)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, top_chunks_nbytes(dtype, chunk), k, device), device)
    decode_units(table, *_chunks(table, jobs, DECODE_N, k, chunk), max(k), dtype, chunk)
