"""Jobs of kinds that share a scale over ranks: what `packing` does not pack."""

import struct
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from thinwire.errors import WireError
from thinwire.kernels.jobs import Batch, DecodeJob, EncodeBatch, EncodeJob, ReduceJob
from thinwire.kernels.packing import MAX_BLOCK, PayloadNbytes, check_dtype, check_tensor, purpose

SHARED = struct.Struct("<Q")
NOT_SHARED = SHARED.pack(0)  # of a job whose scales travel with its codes
STATISTIC_JOB = struct.Struct("<4QfI")
REDUCE_JOB = struct.Struct("<5Q2I2f")

_STATISTIC_ROW = np.dtype([("fixed", "<u8", 4), ("residual_scale", "<f4"), ("unused", "<u4")])
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_VALUES = (torch.float32, torch.float16, torch.bfloat16)


# --- settings and payloads ------------------------------------------------------------------------------------------


def check_norms(block: int) -> None:
    """Raise unless there are such blocks."""
    if block < 0:
        raise ValueError(f"norms: expected a block of at least 0, got {block}")


def check_global_linear(bits: int, levels: int) -> None:
    """Raise unless there are such codes."""
    if bits not in (4, 8) or not 1 <= levels < 2 ** (bits - 1):
        raise ValueError(f"global linear: expected 8 bits and 1 to 127 levels, or 4 and 1 to 7, got {bits}, {levels}")


def check_global_exponential(levels: int) -> None:
    """Raise unless there are such codes."""
    if not 1 <= levels <= 127:
        raise ValueError(f"global exponential: expected 1 to 127 levels, got {levels}")


def check_top_chunks(
    jobs: Sequence[EncodeJob] | Sequence[DecodeJob], k: Sequence[int], dtype: torch.dtype, chunk: int
) -> None:
    """Raise where there are no such chunks, or not so many."""
    check_dtype(dtype, *_VALUES)
    if not 1 <= chunk <= MAX_BLOCK:
        raise ValueError(f"top chunks: expected a chunk from 1 to {MAX_BLOCK}, got {chunk}")
    if isinstance(jobs, Batch) and jobs.packed_for == purpose(top_chunks_nbytes(dtype, chunk), k):
        return  # checked when it was packed
    for job, num_kept in zip(jobs, k, strict=True):
        num_chunks = -(-(job.x if isinstance(job, EncodeJob) else job.out).numel() // chunk)
        if not 0 <= num_kept <= num_chunks:
            raise ValueError(f"top chunks: expected k between 0 and {num_chunks}, got {num_kept}")


@cache
def global_linear_nbytes(bits: int) -> PayloadNbytes:
    """Return the payload of `encode_global_linear`."""
    return lambda n, _: n if bits == 8 else -(-n // 2)


def global_exponential_nbytes(n: int, _: int) -> int:
    """Return the payload of `encode_global_exponential`."""
    return n


@cache
def top_chunks_nbytes(dtype: torch.dtype, chunk: int) -> PayloadNbytes:
    """Return the payload of `encode_top_chunks`."""
    return lambda _, num_kept: num_kept * chunk * dtype.itemsize


# --- jobs -----------------------------------------------------------------------------------------------------------


def pack_shared(jobs: Sequence[EncodeJob | DecodeJob], block: int = 0, device: torch.device | None = None) -> bytes:
    """Check and pack where `shared` of every job lies, which holds a number per `block` elements (0: one for all).

    Tensors must lie on `device` (None: the CPU), here and below.
    """
    if isinstance(jobs, Batch):
        if ("shared", block) not in jobs.packed_shared:
            jobs.packed_shared["shared", block] = pack_shared(list(jobs), block, device)
        return jobs.packed_shared["shared", block]
    packed: list[bytes] = []
    for job in jobs:
        n = (job.x if isinstance(job, EncodeJob) else job.out).numel()
        packed.append(SHARED.pack(_address(job, n, block, device)))
    return b"".join(packed)


def _address(job: EncodeJob | DecodeJob, n: int, block: int, device: torch.device | None) -> int:
    count = -(-n // block) if block else 1
    assert job.shared is not None, "the scale is shared: it needs a place"
    check_tensor(job.shared, torch.float32, "shared", device)
    if job.shared.numel() != count:
        raise ValueError(f"shared: expected {count} numbers, got {job.shared.numel()}")
    return job.shared.data_ptr()


def pack_statistics(jobs: Sequence[EncodeJob], block: int = 0, device: torch.device | None = None) -> bytes:
    """Check and pack what a statistic is taken of, and where it goes."""
    if isinstance(jobs, EncodeBatch):
        if ("statistic", block) not in jobs.packed_shared:
            packed = bytearray(pack_statistics(list(jobs), block, device))
            jobs.packed_shared["statistic", block] = np.frombuffer(packed, dtype=_STATISTIC_ROW)
        rows = jobs.packed_shared["statistic", block]
        rows["residual_scale"] = jobs.residual_scales
        return rows.tobytes()
    packed_jobs: list[bytes] = []
    for job in jobs:
        n = job.x.numel()
        check_tensor(job.x, torch.float32, "x", device)
        residual = 0
        if job.residual is not None:
            check_tensor(job.residual, torch.float32, "residual", device)
            if job.residual.numel() != n:
                raise ValueError(f"residual: expected {n} elements, as x has, got {job.residual.numel()}")
            residual = job.residual.data_ptr()
        shared = _address(job, n, block, device)
        packed_jobs.append(STATISTIC_JOB.pack(job.x.data_ptr(), residual, shared, n, job.residual_scale, 0))
    return b"".join(packed_jobs)


def pack_reduce(jobs: Sequence[ReduceJob], payload_nbytes: PayloadNbytes, device: torch.device | None = None) -> bytes:
    """Check and pack pairs of encoded blocks."""
    packed: list[bytes] = []
    for acc, data, n, key, (ca, cb) in jobs:
        for name, tensor in (("acc", acc), ("data", data)):
            check_tensor(tensor, torch.uint8, name, device)
            if tensor.numel() < (nbytes := payload_nbytes(n, 0)):
                raise WireError(f"{name}: expected at least {nbytes} bytes for {n} elements, got {tensor.numel()}")
        if ca < 1 or cb < 1 or ca + cb > 2**16:
            raise ValueError(f"counts: expected at least 1 each and 65,536 in all, got {ca} and {cb}")
        packed.append(
            REDUCE_JOB.pack(
                acc.data_ptr(), data.data_ptr(), n, key.key & _MASK64, key.offset,
                key.step & _MASK32, key.stream & _MASK32, ca, cb,
            )
        )  # fmt: skip
    return b"".join(packed)
