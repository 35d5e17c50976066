"""The compiled kernels of Global-QSGD, with the functions and the bytes of reference_global.py."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob, ReduceJob
from thinwire.kernels.packing_shared import (
    check_global_exponential,
    check_global_linear,
    check_norms,
    global_exponential_nbytes,
    global_linear_nbytes,
    pack_reduce,
    pack_shared,
    pack_statistics,
)


def shared_norms(jobs: Sequence[EncodeJob], *, block: int, l2: bool, squared: bool, threads: int = 1) -> None:
    """Write one norm per `block` elements (0: of all) into `job.shared`."""
    packing.check_threads(threads)
    check_norms(block)
    _native.shared_norms(pack_statistics(jobs, block), block, l2, squared, threads)


def encode_global_linear(
    jobs: Sequence[EncodeJob], *, bits: int, levels: int, squared: bool, threads: int = 1
) -> list[bool]:
    """Write codes floor(q / s + u), 8 or 4 bits each."""
    packing.check_threads(threads)
    check_global_linear(bits, levels)
    packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, global_linear_nbytes(bits))
    return packing.flags(_native.encode_global_linear(packed, pack_shared(jobs), bits, levels, squared, threads))


def decode_global_linear(jobs: Sequence[DecodeJob], *, bits: int, levels: int, squared: bool, threads: int = 1) -> None:
    """Set value = code * s."""
    packing.check_threads(threads)
    check_global_linear(bits, levels)
    packed = packing.pack_decode(jobs, global_linear_nbytes(bits))
    _native.decode_global_linear(packed, pack_shared(jobs), bits, levels, squared, threads)


def reduce_global_linear(jobs: Sequence[ReduceJob], *, bits: int, threads: int = 1) -> None:
    """Set acc to the weighted mean of the codes, rounded by chance."""
    packing.check_threads(threads)
    check_global_linear(bits, 1)
    _native.reduce_global_linear(pack_reduce(jobs, global_linear_nbytes(bits)), bits, threads)


def encode_global_exponential(jobs: Sequence[EncodeJob], *, levels: int, squared: bool, threads: int = 1) -> list[bool]:
    """Write a sign and an exponent a value."""
    packing.check_threads(threads)
    check_global_exponential(levels)
    packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, global_exponential_nbytes)
    return packing.flags(_native.encode_global_exponential(packed, pack_shared(jobs), levels, squared, threads))


def decode_global_exponential(jobs: Sequence[DecodeJob], *, levels: int, squared: bool, threads: int = 1) -> None:
    """Set value = 2**(c - levels) * M."""
    packing.check_threads(threads)
    check_global_exponential(levels)
    packed = packing.pack_decode(jobs, global_exponential_nbytes)
    _native.decode_global_exponential(packed, pack_shared(jobs), levels, squared, threads)


def reduce_global_exponential(jobs: Sequence[ReduceJob], *, threads: int = 1) -> None:
    """Set acc to the sum, rounded by chance to a power of two."""
    packing.check_threads(threads)
    _native.reduce_global_exponential(pack_reduce(jobs, global_exponential_nbytes), threads)
