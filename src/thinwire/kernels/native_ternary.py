"""The compiled kernels of ternary codes."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.ternary import refuse


def encode_ternary(jobs: Sequence[EncodeJob], *, block: int, clip: float, threads: int = 1) -> list[bool]:
    """Write one float32 scale a block (`block` = 0: the whole partition), then the codes, five to a byte."""
    packing.check_threads(threads)
    packing.check_ternary(block)
    packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, packing.ternary_code_nbytes(block))
    return packing.flags(_native.encode_ternary(packed, block, clip, threads))


def decode_ternary(jobs: Sequence[DecodeJob], *, block: int, threads: int = 1) -> None:
    """Set value = code * scale of its block. All jobs are checked before any is written.

    Raises:
        WireError: a byte that no five codes give.
    """
    packing.check_threads(threads)
    packing.check_ternary(block)
    bad = _native.decode_ternary(packing.pack_decode(jobs, packing.ternary_code_nbytes(block)), block, threads)
    if bad is not None:
        refuse(*bad)
