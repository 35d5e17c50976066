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
from thinwire.kernels.native_fixed_point import decode_fixed_point as decode_fixed_point
from thinwire.kernels.native_fixed_point import encode_fixed_point as encode_fixed_point
from thinwire.kernels.native_global import decode_global_exponential as decode_global_exponential
from thinwire.kernels.native_global import decode_global_linear as decode_global_linear
from thinwire.kernels.native_global import encode_global_exponential as encode_global_exponential
from thinwire.kernels.native_global import encode_global_linear as encode_global_linear
from thinwire.kernels.native_global import reduce_global_exponential as reduce_global_exponential
from thinwire.kernels.native_global import reduce_global_linear as reduce_global_linear
from thinwire.kernels.native_global import shared_norms as shared_norms
from thinwire.kernels.native_low_rank import decode_low_rank as decode_low_rank
from thinwire.kernels.native_low_rank import draw_q as draw_q
from thinwire.kernels.native_low_rank import encode_low_rank as encode_low_rank
from thinwire.kernels.native_low_rank import orthogonalise_ as orthogonalise_
from thinwire.kernels.native_low_rank import reconstruct as reconstruct
from thinwire.kernels.native_min_max import decode_min_max as decode_min_max
from thinwire.kernels.native_min_max import encode_min_max as encode_min_max
from thinwire.kernels.native_natural import decode_natural as decode_natural
from thinwire.kernels.native_natural import encode_natural as encode_natural
from thinwire.kernels.native_random_k import decode_random_k as decode_random_k
from thinwire.kernels.native_random_k import encode_random_k as encode_random_k
from thinwire.kernels.native_sign import decode_sign as decode_sign
from thinwire.kernels.native_sign import encode_sign as encode_sign
from thinwire.kernels.native_sign import majority_vote as majority_vote
from thinwire.kernels.native_ternary import decode_ternary as decode_ternary
from thinwire.kernels.native_ternary import encode_ternary as encode_ternary
from thinwire.kernels.native_top_chunks import decode_top_chunks as decode_top_chunks
from thinwire.kernels.native_top_chunks import encode_top_chunks as encode_top_chunks
from thinwire.kernels.native_top_k import decode_top_k as decode_top_k
from thinwire.kernels.native_top_k import encode_top_k as encode_top_k

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def all_finite(tensors: Sequence[Tensor], *, threads: int = 1) -> list[bool]:
    """Return, per tensor, whether every value is finite."""
    packing.check_threads(threads)
    return packing.flags(_native.all_finite(packing.pack_finite(tensors), threads))


def add_residual(jobs: Sequence[EncodeJob], *, threads: int = 1) -> list[bool]:
    """Leave q where the residual was, and write no bytes; return, per job, whether all of q is finite."""
    packing.check_threads(threads)
    return packing.flags(_native.add_residual(packing.pack_encode(jobs, packing.no_bytes), threads))


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
    jobs: Sequence[EncodeJob], *, bits: int, block: int, stochastic: bool, rotation: int = 0, threads: int = 1
) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes."""
    packing.check_threads(threads)
    packing.check_block_quant(bits, block, rotation)
    if stochastic:
        packing.check_keys(jobs)
    packed = packing.pack_encode(jobs, packing.block_quant_nbytes(bits, block))
    return packing.flags(_native.encode_block_quant(packed, bits, block, stochastic, rotation, threads))


def decode_block_quant(
    jobs: Sequence[DecodeJob], *, bits: int, block: int, rotation: int = 0, threads: int = 1
) -> None:
    """Set value = code * scale of its block, rotated back."""
    packing.check_threads(threads)
    packing.check_block_quant(bits, block, rotation)
    packed = packing.pack_decode(jobs, packing.block_quant_nbytes(bits, block))
    _native.decode_block_quant(packed, bits, block, rotation, threads)


# --- one bit --------------------------------------------------------------------------------------------------------


def encode_one_bit(jobs: Sequence[EncodeJob], *, rms: bool, threads: int = 1) -> list[bool]:
    """Write the scale, then ceil(n/8) bytes of signs, least bit first."""
    packing.check_threads(threads)
    return packing.flags(_native.encode_one_bit(packing.pack_encode(jobs, packing.one_bit_nbytes), rms, threads))


def decode_one_bit(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +scale where the bit is 0, -scale where it is 1."""
    packing.check_threads(threads)
    _native.decode_one_bit(packing.pack_decode(jobs, packing.one_bit_nbytes), threads)
