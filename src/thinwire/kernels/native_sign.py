"""The compiled kernels of signs, and of the vote on them."""

import struct
from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob, VoteJob

_VOTE_JOB = struct.Struct("<5Q4I")
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


def encode_sign(jobs: Sequence[EncodeJob], *, threads: int = 1) -> list[bool]:
    """Write ceil(n/8) bytes of signs, least bit first."""
    packing.check_threads(threads)
    return packing.flags(_native.encode_sign(packing.pack_encode(jobs, packing.bitmap_nbytes), threads))


def decode_sign(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +1 where the bit is 0, -1 where it is 1."""
    packing.check_threads(threads)
    _native.decode_sign(packing.pack_decode(jobs, packing.bitmap_nbytes), threads)


def majority_vote(jobs: Sequence[VoteJob], *, threads: int = 1) -> None:
    """Write 1 where more than half of the rows have a 1; where exactly half have, 0, or by chance with a key."""
    packing.check_threads(threads)
    num_rows = {len(job.rows) for job in jobs}
    if len(num_rows) > 1 or 0 in num_rows:
        raise ValueError(f"vote: expected equally many rows, at least 1, in every job, got {sorted(num_rows)}")
    packed, rows = bytearray(), bytearray()
    for job in jobs:
        nbytes = packing.bitmap_nbytes(job.numel, 0)
        packing.check_bytes(job.out, nbytes, "out")
        for row in job.rows:
            packing.check_bytes(row, nbytes, "row")
            rows += struct.pack("<Q", row.data_ptr())
        bits, step, stream, offset = (0, 0, 0, 0) if job.key is None else (
            job.key.key, job.key.step, job.key.stream, job.key.offset
        )  # fmt: skip
        packed += _VOTE_JOB.pack(
            job.out.data_ptr(), job.numel, job.out.numel(), bits & _MASK64, offset, step & _MASK32, stream & _MASK32,
            job.key is not None, 0,
        )  # fmt: skip
    if jobs:
        _native.majority_vote(bytes(packed), bytes(rows), num_rows.pop(), threads)
