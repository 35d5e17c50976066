"""Compiled random-k, with the functions and the bytes of reference_random_k.py."""

from collections.abc import Sequence

import torch

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def encode_random_k(
    jobs: Sequence[EncodeJob],
    *,
    k: Sequence[int],
    dtype: torch.dtype,
    block: int = 1,
    period: int = 0,
    scaled: bool = False,
    threads: int = 1,
) -> list[bool]:
    """Write k * block values: the elements of the units drawn, ascending; zeros for what lies beyond the end."""
    packing.check_threads(threads)
    packing.check_dtype(dtype, *_NUMBERS)
    packing.check_keys(jobs)
    packing.check_random_k(jobs, k, dtype, block, period)
    packed = packing.pack_encode(jobs, packing.random_k_nbytes(dtype, block, period), k)
    finite = _native.encode_random_k(packed, _NUMBERS[dtype], block, period, scaled, threads)
    return [flag != 0 for flag in finite]


def decode_random_k(
    jobs: Sequence[DecodeJob],
    *,
    k: Sequence[int],
    dtype: torch.dtype,
    block: int = 1,
    period: int = 0,
    threads: int = 1,
) -> None:
    """Put the values back in their places; every other element is zero."""
    packing.check_threads(threads)
    packing.check_dtype(dtype, *_NUMBERS)
    packing.check_random_k(jobs, k, dtype, block, period)
    packed = packing.pack_decode(jobs, packing.random_k_nbytes(dtype, block, period), k)
    _native.decode_random_k(packed, packing.pack_streams(jobs), _NUMBERS[dtype], block, period, threads)
