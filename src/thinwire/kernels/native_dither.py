"""The compiled kernels of dithering."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob


def encode_dither(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, natural: bool, l2: bool, threads: int = 1
) -> list[bool]:
    """Write one float32 scale a block (`block` = 0: the whole partition), then the codes."""
    packing.check_threads(threads)
    packing.check_dither(bits, block)
    packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, packing.dither_nbytes(bits, block))
    return packing.flags(_native.encode_dither(packed, bits, block, natural, l2, threads))


def decode_dither(jobs: Sequence[DecodeJob], *, bits: int, block: int, natural: bool, threads: int = 1) -> None:
    """Set value = level of the code, times the scale of its block."""
    packing.check_threads(threads)
    packing.check_dither(bits, block)
    packed = packing.pack_decode(jobs, packing.dither_nbytes(bits, block))
    _native.decode_dither(packed, bits, block, natural, threads)
