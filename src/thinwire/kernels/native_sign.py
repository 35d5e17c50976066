"""The compiled kernels of signs, and of the vote on them."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob, VoteJob
from thinwire.kernels.packing_vote import pack_votes


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
    if jobs:
        packed, rows, num_rows = pack_votes(jobs)
        _native.majority_vote(packed, rows, num_rows, threads)
