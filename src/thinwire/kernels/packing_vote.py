"""Jobs of votes: what `packing` does not pack."""

import struct
from collections.abc import Sequence

import torch

from thinwire.kernels import packing
from thinwire.kernels.jobs import VoteJob

VOTE_JOB = struct.Struct("<5Q4I")
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


def pack_votes(jobs: Sequence[VoteJob], device: torch.device | None = None) -> tuple[bytes, bytes, int]:
    """Check and pack the jobs, at least one, the addresses of their rows, and how many rows each has."""
    num_rows = {len(job.rows) for job in jobs}
    if len(num_rows) > 1 or 0 in num_rows:
        raise ValueError(f"vote: expected equally many rows, at least 1, in every job, got {sorted(num_rows)}")
    packed, rows = bytearray(), bytearray()
    for job in jobs:
        nbytes = packing.bitmap_nbytes(job.numel, 0)
        packing.check_bytes(job.out, nbytes, "out", device)
        for row in job.rows:
            packing.check_bytes(row, nbytes, "row", device)
            rows += struct.pack("<Q", row.data_ptr())
        bits, step, stream, offset = (0, 0, 0, 0) if job.key is None else (
            job.key.key, job.key.step, job.key.stream, job.key.offset
        )  # fmt: skip
        packed += VOTE_JOB.pack(
            job.out.data_ptr(), job.numel, job.out.numel(), bits & _MASK64, offset, step & _MASK32, stream & _MASK32,
            job.key is not None, 0,
        )  # fmt: skip
    return bytes(packed), bytes(rows), num_rows.pop()
