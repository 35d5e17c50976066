"""Signs alone, and the vote on them, in plain torch: the specification."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob, VoteJob
from thinwire.kernels.reference_steps import deliver, finish, with_residual
from thinwire.random import uniform


def _pack(negative: Tensor) -> Tensor:
    padded = torch.zeros(-(-negative.numel() // 8) * 8, dtype=torch.uint8, device=negative.device)
    padded[: negative.numel()] = negative
    shifts = torch.arange(8, dtype=torch.uint8, device=negative.device)
    return (padded.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def _unpack(packed: Tensor, n: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[: -(-n // 8), None] >> shifts) & 1).view(-1)[:n].bool()


def _values(negative: Tensor) -> Tensor:
    return 1.0 - 2.0 * negative.to(torch.float32)


def encode_sign(jobs: Sequence[EncodeJob], *, threads: int = 1) -> list[bool]:
    """Write ceil(n/8) bytes; bit i % 8 (from the least) of byte i // 8 is 1 iff q[i] < 0."""
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        packed = _pack(q < 0)
        job.out[: packed.numel()] = packed
        job.out[packed.numel() :].zero_()
        finite.append(finish(job, q, _values(q < 0)))
    return finite


def decode_sign(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +1 where the bit is 0, -1 where it is 1."""
    for job in jobs:
        deliver(job, _values(_unpack(job.data, job.out.numel())))


def majority_vote(jobs: Sequence[VoteJob], *, threads: int = 1) -> None:
    """Write 1 where more than half of the rows have a 1.

    Where exactly half have, write 0, or with a key 1 iff the element's uniform is below 1/2. Bits beyond `numel` do not
    count, and become 0.
    """
    for job in jobs:
        twice = 2 * torch.stack([_unpack(row, job.numel) for row in job.rows]).sum(dim=0)
        negative = twice > len(job.rows)
        if job.key is not None:
            negative |= (twice == len(job.rows)) & (uniform(job.key, job.numel, job.out.device) < 0.5)
        packed = _pack(negative)
        job.out[: packed.numel()] = packed
        job.out[packed.numel() :].zero_()
