"""Steps that several reference kernels share."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob

FLOAT32_MAX = torch.finfo(torch.float32).max
TREE_CHUNK = 1024


def tree_sum(x: Tensor) -> Tensor:
    """Sum a float64 tensor over its last dimension, in the tree that every backend shares.

    Each chunk of 1024 elements (the last one zero-padded) is summed by halving: element i gains element i + 512, then
    i + 256, and so on down to i + 1. The chunks' sums are summed the same way until one is left.
    """
    while True:
        num_chunks = max(1, -(-x.shape[-1] // TREE_CHUNK))
        padded = x.new_zeros(*x.shape[:-1], num_chunks * TREE_CHUNK)
        padded[..., : x.shape[-1]] = x
        chunks = padded.unflatten(-1, (num_chunks, TREE_CHUNK))
        while chunks.shape[-1] > 1:
            half = chunks.shape[-1] // 2
            chunks = chunks[..., :half] + chunks[..., half:]
        x = chunks[..., 0]
        if num_chunks == 1:
            return x[..., 0]


def sqrt(x: Tensor) -> Tensor:
    """Return the root, correctly rounded as IEEE 754 asks; torch's own on the CPU may be the neighbouring number."""
    return torch.from_numpy(np.asarray(np.sqrt(x.numpy()))) if x.is_cpu else x.sqrt()


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Return `x` as rows of `block` elements, the last one padded with zeros; `block` = 0 is one row."""
    width = block or max(x.numel(), 1)
    rows = x.new_zeros(-(-x.numel() // width), width)
    rows.view(-1)[: x.numel()] = x
    return rows


def max_scale(levels: float) -> float:
    """Return the largest float32 s with `levels * s` still finite."""
    s = torch.tensor(FLOAT32_MAX, dtype=torch.float32) / levels
    while torch.isinf(s * levels):
        s = torch.nextafter(s, torch.zeros_like(s))
    return float(s)


def scale_of(largest: Tensor, levels: float) -> Tensor:
    """Return largest / levels, up one ulp where `levels` times it falls short, and at most `max_scale(levels)`."""
    scale = largest / torch.full_like(largest, levels)  # on CUDA, `/ levels` would be a product with its reciprocal
    scale = torch.where(scale * levels < largest, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    return scale.clamp(max=max_scale(levels))


def with_residual(job: EncodeJob) -> Tensor:
    """Return q = x + residual_scale * residual."""
    if job.residual is None:
        return job.x
    scaled = job.residual * job.residual_scale  # its own rounding: torch may fuse `add(alpha=)`
    return job.x + scaled


def finish(job: EncodeJob, q: Tensor, decoded: Tensor) -> bool:
    """Leave what was not sent in the residual; return whether all that was read and sent is finite."""
    if job.residual is not None:
        torch.sub(q, decoded, out=job.residual)
    return bool(torch.isfinite(q).all() and torch.isfinite(decoded).all())


def finish_sparse(job: EncodeJob, q: Tensor, places: Tensor, sent: Tensor) -> bool:
    """Leave q in the residual, less what was sent at `places`; return whether all was finite."""
    if job.residual is not None:
        left = q[places] - sent
        job.residual.copy_(q)
        job.residual[places] = left
    return bool(torch.isfinite(q).all() and torch.isfinite(sent).all())


def deliver(job: DecodeJob, decoded: Tensor) -> None:
    """Set out = decoded, or out += alpha * decoded."""
    if job.alpha is None:
        job.out.copy_(decoded)
    else:
        job.out.add_(decoded * job.alpha)


def deliver_sparse(job: DecodeJob, places: Tensor, values: Tensor) -> None:
    """Deliver values at `places`, each at most once, and zeros elsewhere."""
    if job.alpha is None:
        job.out.zero_()
        job.out[places] = values
    else:
        job.out[places] += values * job.alpha
