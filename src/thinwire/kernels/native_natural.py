"""The compiled kernels of natural compression."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob


def encode_natural(jobs: Sequence[EncodeJob], *, bits: int, threads: int = 1) -> list[bool]:
    """Write the codes: a sign and an exponent, 8 or 9 bits."""
    packing.check_threads(threads)
    packing.check_natural(bits)
    packing.check_keys(jobs)
    return packing.flags(_native.encode_natural(packing.pack_encode(jobs, packing.natural_nbytes(bits)), bits, threads))


def decode_natural(jobs: Sequence[DecodeJob], *, bits: int, threads: int = 1) -> None:
    """Set value = the power of two with its sign, or 0."""
    packing.check_threads(threads)
    packing.check_natural(bits)
    _native.decode_natural(packing.pack_decode(jobs, packing.natural_nbytes(bits)), bits, threads)
