"""Compiled top-k, with the functions and the bytes of reference_top_k.py."""

from collections.abc import Sequence

import torch

from thinwire import _native
from thinwire.errors import WireError
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.top_k_layout import NATURAL, VALUE_DTYPES

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, NATURAL: 3}
_SELECTIONS = {"exact": 0, "sampled": 1, "bisect": 2}


def encode_top_k(
    jobs: Sequence[EncodeJob],
    *,
    k: Sequence[int],
    dtype: torch.dtype,
    selection: str = "exact",
    chunked: bool = False,
    threads: int = 1,
) -> list[bool]:
    """Write k selected values and their indices, by index."""
    packing.check_threads(threads)
    packing.check_top_k(dtype, jobs, k, VALUE_DTYPES, chunked=chunked, encode=True)
    if selection not in _SELECTIONS:
        raise ValueError(f"selection: expected one of {', '.join(_SELECTIONS)}, got {selection!r}")
    packed = packing.pack_encode(jobs, packing.top_k_nbytes(dtype, chunked), k)
    finite = _native.encode_top_k(packed, _NUMBERS[dtype], _SELECTIONS[selection], chunked, threads)
    return [flag != 0 for flag in finite]


def decode_top_k(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunked: bool = False, threads: int = 1
) -> None:
    """Scatter the values; every other element is zero.

    Raises:
        WireError: an index is out of range or out of order, in any job. Nothing was written.
    """
    packing.check_threads(threads)
    packing.check_top_k(dtype, jobs, k, VALUE_DTYPES, chunked=chunked, encode=False)
    packed = packing.pack_decode(jobs, packing.top_k_nbytes(dtype, chunked), k)
    bad = _native.decode_top_k(packed, _NUMBERS[dtype], chunked, threads)
    if bad is not None:
        which, what, place, got, before = bad
        expected = f"top-k: expected {k[which]} ascending indices below {jobs[which].out.numel()}"
        if what == "count":
            raise WireError(f"{expected}; job {which} has {got}")
        after = f" after {before}" if place else ""
        raise WireError(f"{expected}; index number {place} of job {which} is {got}{after}")
