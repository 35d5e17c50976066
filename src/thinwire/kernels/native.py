"""The compiled kernels, with the functions and the bytes of reference.py.

`packing` checks what could corrupt memory; the rest happens in one native call for all jobs of a call, the GIL
released, on `threads` threads that end with the call. The result does not depend on their number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.native_block_cast import decode_block_cast as decode_block_cast
from thinwire.kernels.native_block_cast import encode_block_cast as encode_block_cast
from thinwire.kernels.native_dither import decode_dither as decode_dither
from thinwire.kernels.native_dither import encode_dither as encode_dither
from thinwire.kernels.native_random_k import decode_random_k as decode_random_k
from thinwire.kernels.native_random_k import encode_random_k as encode_random_k
from thinwire.kernels.native_sign import decode_sign as decode_sign
from thinwire.kernels.native_sign import encode_sign as encode_sign
from thinwire.kernels.native_sign import majority_vote as majority_vote
from thinwire.kernels.native_top_k import decode_top_k as decode_top_k
from thinwire.kernels.native_top_k import encode_top_k as encode_top_k

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def all_finite(tensors: Sequence[Tensor], *, threads: int = 1) -> list[bool]:
    """Return, per tensor, whether every value is finite."""
    packing.check_threads(threads)
    return packing.flags(_native.all_finite(packing.pack_finite(tensors), threads))


# --- casts ----------------------------------------------------------------------------------------------------------


def encode_cast(jobs: Sequence[EncodeJob], *, dtype: torch.dtype, threads: int = 1) -> list[bool]:
    """Write n values of `dtype`, rounded to nearest even."""
    packing.check_threads(threads)
    packing.check_dtype(dtype, *_NUMBERS)
    packed = packing.pack_encode(jobs, packing.cast_nbytes(dtype))
    return packing.flags(_native.encode_cast(packed, _NUMBERS[dtype], threads))


def decode_cast(jobs: Sequence[DecodeJob], *, dtype: torch.dtype, threads: int = 1) -> None:
    """Read n values of `dtype`."""
    packing.check_threads(threads)
    packing.check_dtype(dtype, *_NUMBERS)
    _native.decode_cast(packing.pack_decode(jobs, packing.cast_nbytes(dtype)), _NUMBERS[dtype], threads)


# --- block quantisation ---------------------------------------------------------------------------------------------


def encode_block_quant(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, stochastic: bool, threads: int = 1
) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes."""
    packing.check_threads(threads)
    packing.check_block_quant(bits, block)
    if stochastic:
        packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, packing.block_quant_nbytes(bits, block))
    return packing.flags(_native.encode_block_quant(packed, bits, block, stochastic, threads))


def decode_block_quant(jobs: Sequence[DecodeJob], *, bits: int, block: int, threads: int = 1) -> None:
    """Set value = code * scale of its block."""
    packing.check_threads(threads)
    packing.check_block_quant(bits, block)
    packed = packing.pack_decode(jobs, packing.block_quant_nbytes(bits, block))
    _native.decode_block_quant(packed, bits, block, threads)


# --- one bit --------------------------------------------------------------------------------------------------------


def encode_one_bit(jobs: Sequence[EncodeJob], *, rms: bool, threads: int = 1) -> list[bool]:
    """Write the scale, then ceil(n/8) bytes of signs, least bit first."""
    packing.check_threads(threads)
    return packing.flags(_native.encode_one_bit(packing.pack_encode(jobs, packing.one_bit_nbytes), rms, threads))


def decode_one_bit(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +scale where the bit is 0, -scale where it is 1."""
    packing.check_threads(threads)
    _native.decode_one_bit(packing.pack_decode(jobs, packing.one_bit_nbytes), threads)
