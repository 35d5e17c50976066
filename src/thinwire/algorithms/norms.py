"""Norms of whole tensors, the same on all ranks: replicas whose steps are scaled by them must not drift apart."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels import EncodeJob, active


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ||x||_2 of each tensor, (), in its dtype.

    Of float32 on the CPU squares are summed in float64 and in the fixed tree of the kernels, whose bits hang on neither
    the machine nor its threads, so that ranks of different kinds agree. Such a norm is inf where not all is finite.
    """
    if any(x.dtype != torch.float32 or x.device.type != "cpu" for x in tensors):
        return list(torch._foreach_norm(list(tensors)))
    found, nothing = torch.empty(len(tensors)), torch.empty(0, dtype=torch.uint8)
    flat = [x.detach().reshape(-1) for x in tensors]
    jobs = [EncodeJob(x, nothing, None, 1.0, None, found[i : i + 1]) for i, x in enumerate(flat)]
    _write(jobs)  # pyright: ignore[reportArgumentType]  (torch annotates `disable` for another use)
    return list(found)


@torch.compiler.disable  # works on addresses, of which a tracer knows none
def _write(jobs: Sequence[EncodeJob]) -> None:
    active().shared_norms(jobs, block=0, l2=True, squared=False)


def ratios(above: Sequence[Tensor], below: Sequence[Tensor]) -> list[Tensor]:
    """Return above / below for each pair of norms, 1 where either is 0."""
    return [torch.where((a != 0) & (b != 0), a / b, 1.0) for a, b in zip(above, below, strict=True)]
