"""Compiled chunks, with the functions and the bytes of reference_top_chunks.py."""

from collections.abc import Sequence

import torch

from thinwire import _native
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.packing_shared import check_top_chunks, pack_shared, top_chunks_nbytes

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def encode_top_chunks(
    jobs: Sequence[EncodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> list[bool]:
    """Write k * chunk values: the elements of the chunks, ascending; zeros for what lies beyond the end."""
    packing.check_threads(threads)
    check_top_chunks(jobs, k, dtype, chunk)
    packed = packing.pack_encode(jobs, top_chunks_nbytes(dtype, chunk), k)
    shared = pack_shared(jobs, chunk)
    return packing.flags(_native.encode_top_chunks(packed, shared, _NUMBERS[dtype], chunk, threads))


def decode_top_chunks(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> None:
    """Put the values back in their places; every other element is zero."""
    packing.check_threads(threads)
    check_top_chunks(jobs, k, dtype, chunk)
    packed = packing.pack_decode(jobs, top_chunks_nbytes(dtype, chunk), k)
    _native.decode_top_chunks(packed, pack_shared(jobs, chunk), _NUMBERS[dtype], chunk, threads)
