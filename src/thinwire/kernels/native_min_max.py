"""The compiled kernels of min-max quantisation."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob


def encode_min_max(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, bagua: bool, stochastic: bool, threads: int = 1
) -> list[bool]:
    """Write float32 lo, hi for every block (`block` = 0: the whole partition), then the codes."""
    packing.check_threads(threads)
    packing.check_min_max(bits, block, bagua, stochastic)
    if stochastic:
        packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, packing.min_max_nbytes(bits, block))
    return packing.flags(_native.encode_min_max(packed, bits, block, bagua, stochastic, threads))


def decode_min_max(jobs: Sequence[DecodeJob], *, bits: int, block: int, bagua: bool, threads: int = 1) -> None:
    """Set each value from its code and the range of its block."""
    packing.check_threads(threads)
    packing.check_min_max(bits, block, bagua, stochastic=False)
    packed = packing.pack_decode(jobs, packing.min_max_nbytes(bits, block))
    _native.decode_min_max(packed, bits, block, bagua, threads)
