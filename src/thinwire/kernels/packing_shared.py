"""Jobs of kinds that share a scale over ranks: what `packing` does not pack."""

import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

from thinwire.errors import WireError
from thinwire.kernels.jobs import Batch, DecodeJob, EncodeBatch, EncodeJob, ReduceJob
from thinwire.kernels.packing import check_tensor

SHARED = struct.Struct("<Q")
NOT_SHARED = SHARED.pack(0)  # of a job whose scales travel with its codes
STATISTIC_JOB = struct.Struct("<4QfI")
REDUCE_JOB = struct.Struct("<5Q2I2f")

_STATISTIC_ROW = np.dtype([("fixed", "<u8", 4), ("residual_scale", "<f4"), ("unused", "<u4")])
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


def pack_shared(jobs: Sequence[EncodeJob | DecodeJob], block: int = 0) -> bytes:
    """Check and pack where `shared` of every job lies, which holds a number per `block` elements (0: one for all)."""
    if isinstance(jobs, Batch):
        if ("shared", block) not in jobs.packed_shared:
            jobs.packed_shared["shared", block] = pack_shared(list(jobs), block)
        return jobs.packed_shared["shared", block]
    packed: list[bytes] = []
    for job in jobs:
        n = (job.x if isinstance(job, EncodeJob) else job.out).numel()
        packed.append(SHARED.pack(_address(job, n, block)))
    return b"".join(packed)


def _address(job: EncodeJob | DecodeJob, n: int, block: int) -> int:
    count = -(-n // block) if block else 1
    assert job.shared is not None, "the scale is shared: it needs a place"
    check_tensor(job.shared, torch.float32, "shared")
    if job.shared.numel() != count:
        raise ValueError(f"shared: expected {count} numbers, got {job.shared.numel()}")
    return job.shared.data_ptr()


def pack_statistics(jobs: Sequence[EncodeJob], block: int = 0) -> bytes:
    """Check and pack what a statistic is taken of, and where it goes."""
    if isinstance(jobs, EncodeBatch):
        if ("statistic", block) not in jobs.packed_shared:
            packed = bytearray(pack_statistics(list(jobs), block))
            jobs.packed_shared["statistic", block] = np.frombuffer(packed, dtype=_STATISTIC_ROW)
        rows = jobs.packed_shared["statistic", block]
        rows["residual_scale"] = jobs.residual_scales
        return rows.tobytes()
    packed_jobs: list[bytes] = []
    for job in jobs:
        n = job.x.numel()
        check_tensor(job.x, torch.float32, "x")
        residual = 0
        if job.residual is not None:
            check_tensor(job.residual, torch.float32, "residual")
            if job.residual.numel() != n:
                raise ValueError(f"residual: expected {n} elements, as x has, got {job.residual.numel()}")
            residual = job.residual.data_ptr()
        shared = _address(job, n, block)
        packed_jobs.append(STATISTIC_JOB.pack(job.x.data_ptr(), residual, shared, n, job.residual_scale, 0))
    return b"".join(packed_jobs)


def pack_reduce(jobs: Sequence[ReduceJob], nbytes: Callable[[int], int]) -> bytes:
    """Check and pack pairs of encoded blocks."""
    packed: list[bytes] = []
    for acc, data, n, key, (ca, cb) in jobs:
        for name, tensor in (("acc", acc), ("data", data)):
            check_tensor(tensor, torch.uint8, name)
            if tensor.numel() < nbytes(n):
                raise WireError(f"{name}: expected at least {nbytes(n)} bytes for {n} elements, got {tensor.numel()}")
        if ca < 1 or cb < 1 or ca + cb > 2**16:
            raise ValueError(f"counts: expected at least 1 each and 65,536 in all, got {ca} and {cb}")
        packed.append(
            REDUCE_JOB.pack(
                acc.data_ptr(), data.data_ptr(), n, key.key & _MASK64, key.offset,
                key.step & _MASK32, key.stream & _MASK32, ca, cb,
            )
        )  # fmt: skip
    return b"".join(packed)
