"""The compiled kernels of block casts."""

from collections.abc import Sequence

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.float_formats import FORMATS, FloatFormat
from thinwire.kernels.jobs import DecodeJob, EncodeJob

_NUMBERS = {name: number for number, name in enumerate(FORMATS)}


def _check(format: FloatFormat, block: int, threads: int) -> None:
    packing.check_threads(threads)
    if format not in FORMATS or block < 1:
        raise ValueError(
            f"block cast: expected a format of {', '.join(FORMATS)} and a block of at least 1, got {format!r} and "
            f"{block}"
        )


def encode_block_cast(jobs: Sequence[EncodeJob], *, format: FloatFormat, block: int, threads: int = 1) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes."""
    _check(format, block, threads)
    packed = packing.pack_encode(jobs, packing.block_quant_nbytes(FORMATS[format].bits, block))
    return packing.flags(_native.encode_block_cast(packed, _NUMBERS[format], block, threads))


def decode_block_cast(jobs: Sequence[DecodeJob], *, format: FloatFormat, block: int, threads: int = 1) -> None:
    """Set value = value of the code, times the scale of its block."""
    _check(format, block, threads)
    packed = packing.pack_decode(jobs, packing.block_quant_nbytes(FORMATS[format].bits, block))
    _native.decode_block_cast(packed, _NUMBERS[format], block, threads)
