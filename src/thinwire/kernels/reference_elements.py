"""Steps that several reference kernels share: forming q, leaving the residual, delivering what was decoded."""

import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob


def with_residual(job: EncodeJob) -> Tensor:
    """Return q."""
    if job.residual is None:
        return job.x
    scaled = job.residual * job.residual_scale  # its own rounding: torch may fuse `add(alpha=)`
    return job.x + scaled


def finish(job: EncodeJob, q: Tensor, decoded: Tensor) -> bool:
    """Leave q - decoded in the residual; return whether all was finite."""
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
    """Set `out`, or add alpha times what was decoded to it."""
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
