"""The compiled kernels of ternary codes."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.packing_shared import NOT_SHARED, pack_shared
from thinwire.kernels.ternary import refuse


def _places(jobs: Sequence[EncodeJob | DecodeJob], block: int, shared: bool) -> bytes:
    return pack_shared(jobs, block) if shared else NOT_SHARED * len(jobs)


def encode_ternary(
    jobs: Sequence[EncodeJob], *, block: int, clip: float, shared: bool = False, threads: int = 1
) -> list[bool]:
    """Write a float32 scale a block (`block` = 0: the whole partition) unless `shared`, then codes, five to a byte."""
    packing.check_threads(threads)
    packing.check_ternary(block)
    packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, packing.ternary_code_nbytes(block, shared))
    return packing.flags(_native.encode_ternary(packed, _places(jobs, block, shared), block, clip, threads))


def decode_ternary(jobs: Sequence[DecodeJob], *, block: int, shared: bool = False, threads: int = 1) -> None:
    """Set value = code * scale of its block, with `shared` in `job.shared`. All jobs are checked before any is written.

    Raises:
        WireError: a byte that no five codes give.
    """
    packing.check_threads(threads)
    packing.check_ternary(block)
    packed = packing.pack_decode(jobs, packing.ternary_code_nbytes(block, shared))
    bad = _native.decode_ternary(packed, _places(jobs, block, shared), block, threads)
    if bad is not None:
        refuse(*bad)
