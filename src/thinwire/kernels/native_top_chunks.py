"""Compiled chunks, with the functions and the bytes of reference_top_chunks.py."""

from collections.abc import Sequence
from functools import cache

import torch

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.packing_shared import pack_shared

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@cache
def _nbytes(dtype: torch.dtype, chunk: int) -> packing.PayloadNbytes:
    return lambda _, num_kept: num_kept * chunk * dtype.itemsize


def _check(jobs: Sequence[EncodeJob] | Sequence[DecodeJob], k: Sequence[int], dtype: torch.dtype, chunk: int) -> None:
    packing.check_dtype(dtype, *_NUMBERS)
    if not 1 <= chunk <= packing.MAX_BLOCK:
        raise ValueError(f"top chunks: expected a chunk from 1 to {packing.MAX_BLOCK}, got {chunk}")
    for job, num_kept in zip(jobs, k, strict=True):
        num_chunks = -(-(job.x if isinstance(job, EncodeJob) else job.out).numel() // chunk)
        if not 0 <= num_kept <= num_chunks:
            raise ValueError(f"top chunks: expected k between 0 and {num_chunks}, got {num_kept}")


def encode_top_chunks(
    jobs: Sequence[EncodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> list[bool]:
    """Write k * chunk values: the elements of the chunks, ascending; zeros for what lies beyond the end."""
    packing.check_threads(threads)
    _check(jobs, k, dtype, chunk)
    packed = packing.pack_encode(jobs, _nbytes(dtype, chunk), k)
    shared = pack_shared(jobs, chunk)
    return packing.flags(_native.encode_top_chunks(packed, shared, _NUMBERS[dtype], chunk, threads))


def decode_top_chunks(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> None:
    """Put the values back in their places; every other element is zero."""
    packing.check_threads(threads)
    _check(jobs, k, dtype, chunk)
    packed = packing.pack_decode(jobs, _nbytes(dtype, chunk), k)
    _native.decode_top_chunks(packed, pack_shared(jobs, chunk), _NUMBERS[dtype], chunk, threads)
