"""Signs alone, one bit an element, and the vote on them: one flat pass each."""

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob, VoteJob
from thinwire.kernels.packing_vote import VOTE_JOB, pack_votes
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
from thinwire.kernels.triton_philox import uniform

TILE = 2048
OUT_NBYTES, HAS_KEY = 2, 6  # words of a vote's row: out, n, out_nbytes, key, offset, step and stream, has_key


@jobs_kernel
def _encode(flags, table, num_tiles, REGULAR: tl.constexpr, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    x, residual, has_residual, scale, left = input_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    q = form_q(x, residual, has_residual, scale, place, mask)
    flag_non_finite(flags, job, tl.max(magnitude(q), axis=0))
    leave(residual, has_residual, place, mask, q - tl.where(q < 0.0, -1.0, 1.0))
    negative = tl.reshape((q < 0.0).to(tl.int32), (TILE // 8, 8))
    packed = tl.sum(negative << tl.arange(0, 8)[None, :], axis=1)
    signs = pointer_to(tl.load(encode_row(table, job) + 2) + first // 8, tl.uint8, 4)
    byte = tl.arange(0, TILE // 8)
    tl.store(signs + byte, packed.to(tl.uint8), mask=8 * byte < left)
    zero_padding(table, job, tile, num_tiles, (left + first + 7) // 8, 1024)


@jobs_kernel
def _decode(flags, table, num_tiles, REGULAR: tl.constexpr, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    data = tl.load(decode_row(table, job))
    packed = tl.load(pointer_to(data + first // 8, tl.uint8, 4) + place // 8, mask=mask, other=0).to(tl.int32)
    deliver(out, alpha, accumulate, place, mask, tl.where(((packed >> (place % 8)) & 1) != 0, -1.0, 1.0))


@jobs_kernel
def _vote(flags, table, num_tiles, rows, num_rows, DRAWN: tl.constexpr, NBYTES: tl.constexpr):
    """Write NBYTES bytes of `out`; bits beyond n, and bytes, are 0. Rows may lie anywhere."""
    job, tile = job_and_tile(num_tiles)
    row = table + job * 7
    n = tl.load(row + 1)
    first = tile.to(tl.int64) * NBYTES
    byte = tl.arange(0, NBYTES)
    bit = tl.arange(0, 8)[None, :]
    ones = tl.zeros((NBYTES, 8), tl.int32)
    for r in range(num_rows):
        votes = pointer_to(tl.load(rows + job * num_rows + r) + first, tl.uint8, 1)
        packed = tl.load(votes + byte, mask=first + byte < (n + 7) // 8, other=0).to(tl.int32)
        ones += (packed[:, None] >> bit) & 1
    negative = 2 * ones > num_rows
    if DRAWN:
        begin = tl.load(row + 4) + 8 * (first + byte[:, None])
        u = uniform(tl.load(row + 3), tl.load(row + 5), begin, NBYTES, 8, False)
        negative = negative | only_if((2 * ones == num_rows) & (u < 0.5), tl.load(row + 6))
    negative = negative & (8 * (first + byte[:, None]) + bit < n)
    result = tl.sum(negative.to(tl.int32) << bit, axis=1)
    out = pointer_to(tl.load(row) + first, tl.uint8, 1)
    tl.store(out + byte, result.to(tl.uint8), mask=first + byte < tl.load(row + 2))


def encode_sign(jobs: Sequence[EncodeJob], *, threads: int = 1) -> list[bool]:
    """Write ceil(n/8) bytes of signs, least bit first."""
    packing.check_threads(threads)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.bitmap_nbytes, device=device), device)
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0
    table.launch(_encode, max(1, triton.cdiv(table.most(ENCODE_N), TILE)), REGULAR=regular, TILE=TILE)
    return table.finite()


def decode_sign(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +1 where the bit is 0, -1 where it is 1."""
    packing.check_threads(threads)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.bitmap_nbytes, device=device), device)
    regular = table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0
    table.launch(_decode, max(1, triton.cdiv(table.most(DECODE_N), TILE)), REGULAR=regular, TILE=TILE)


def majority_vote(jobs: Sequence[VoteJob], *, threads: int = 1) -> None:
    """Write 1 where more than half of the rows have a 1; where exactly half have, 0, or by chance with a key."""
    packing.check_threads(threads)
    if not jobs:
        return
    device = jobs[0].out.device
    packed, rows, num_rows = pack_votes(jobs, device)
    table = Table(packed, VOTE_JOB.size, device)
    nbytes = TILE // 8
    table.launch(
        _vote,
        max(1, triton.cdiv(table.most(OUT_NBYTES), nbytes)),
        table.send(np.frombuffer(rows, dtype=np.int64).copy()),
        num_rows,
        DRAWN=num_rows % 2 == 0 and table.any_bits(HAS_KEY) != 0,
        NBYTES=nbytes,
    )
