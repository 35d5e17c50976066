"""The compiled kernels of fixed-point codes."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob


def encode_fixed_point(jobs: Sequence[EncodeJob], *, bits: int, block: int, threads: int = 1) -> list[bool]:
    """Write a float16 scale for every block (`block` = 0: the whole partition), then the codes."""
    packing.check_threads(threads)
    packing.check_fixed_point(bits, block)
    packed = packing.pack_encode(jobs, packing.fixed_point_nbytes(bits, block))
    return packing.flags(_native.encode_fixed_point(packed, bits, block, threads))


def decode_fixed_point(jobs: Sequence[DecodeJob], *, bits: int, block: int, threads: int = 1) -> None:
    """Set value = (code - H) / H times the scale of its block."""
    packing.check_threads(threads)
    packing.check_fixed_point(bits, block)
    packed = packing.pack_decode(jobs, packing.fixed_point_nbytes(bits, block))
    _native.decode_fixed_point(packed, bits, block, threads)
