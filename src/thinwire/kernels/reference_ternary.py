"""Ternary codes in plain torch, the specification: values rounded by chance to -scale, 0 and +scale."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver, finish, in_blocks, sqrt, tree_sum, with_residual
from thinwire.kernels.ternary import NUM_BYTES, pack_ternary, refuse, ternary_nbytes, unpack_ternary
from thinwire.random import uniform


def _own_scales(q: Tensor, block: int, clip: float) -> Tensor:
    """Return max|q| of every block, at most `clip` times the root of the mean of q^2 where `clip` is not 0."""
    rows = in_blocks(q, block)
    scale = rows.abs().amax(dim=1, keepdim=True)
    if clip:
        counts = in_blocks(torch.ones_like(q, dtype=torch.float64), block).sum(dim=1)
        sigma = sqrt(tree_sum(rows.to(torch.float64).square()) / counts)
        scale = torch.minimum(scale, (sigma * clip).to(torch.float32)[:, None])
    return scale


def _shared_scales(shared: Tensor | None, num_blocks: int) -> tuple[Tensor, bool]:
    """Return the scales of so many blocks, and whether all are numbers: those that are not count as 0."""
    assert shared is not None, "the scale is shared: it needs a place"
    scale = shared[:num_blocks, None]
    good = (scale >= 0) & scale.isfinite()
    return torch.where(good, scale, 0.0), bool(good.all())


def encode_ternary(
    jobs: Sequence[EncodeJob], *, block: int, clip: float, shared: bool = False, threads: int = 1
) -> list[bool]:
    """Write one float32 scale a block (`block` = 0: the whole partition), then the codes, five to a byte.

    The scale is max|q|, or the least of that and float32(clip * sqrt(sum q^2 / m)), in float64 by `tree_sum`, where
    `clip` is not 0. Codes are floor(q / scale + u), clamped to [-1, 1]; 0 where the scale is 0.

    With `shared` the scales are those of `job.shared`, which ranks agreed on, and the codes are all that is written.
    """
    finite: list[bool] = []
    for job in jobs:
        assert job.key is not None, "ternary codes need a key"
        q = with_residual(job)
        n, rows = q.numel(), in_blocks(q, block)
        scale, good = _shared_scales(job.shared, len(rows)) if shared else (_own_scales(q, block, clip), True)
        y = torch.where(scale > 0, rows / scale, torch.zeros_like(rows))
        codes = torch.floor(y + in_blocks(uniform(job.key, n, q.device), block)).clamp(-1, 1).nan_to_num(0.0)
        start = 0 if shared else 4 * len(rows)
        job.out[:start].view(torch.float32).copy_(scale.view(-1)[: start // 4])
        packed = pack_ternary(codes.view(-1)[:n].to(torch.int8), rows.shape[1])
        job.out[start : start + packed.numel()] = packed
        job.out[start + packed.numel() :].zero_()
        finite.append(finish(job, q, (codes.to(torch.int8).to(torch.float32) * scale).view(-1)[:n]) and good)
    return finite


def decode_ternary(jobs: Sequence[DecodeJob], *, block: int, shared: bool = False, threads: int = 1) -> None:
    """Set value = code * scale of its block, with `shared` in `job.shared`. All jobs are checked before any is written.

    Raises:
        WireError: a byte that no five codes give.
    """
    found: list[Tensor] = []
    for index, job in enumerate(jobs):
        n = job.out.numel()
        width = block or max(n, 1)
        num_scales = -(-n // width)
        start = 0 if shared else 4 * num_scales
        scale = _shared_scales(job.shared, num_scales)[0] if shared else job.data[:start].view(torch.float32)
        packed = job.data[start:][: ternary_nbytes(n, width)]
        for place in (packed >= NUM_BYTES).nonzero().view(-1).tolist():
            refuse(index, place, int(packed[place]))
        found.append(unpack_ternary(packed, n, width).to(torch.float32) * scale.view(-1).repeat_interleave(width)[:n])
    for job, values in zip(jobs, found, strict=True):
        deliver(job, values)
