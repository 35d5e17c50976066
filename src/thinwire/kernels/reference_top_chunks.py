"""Whole chunks of a partition, the same ones on all ranks. Part of the specification, see reference.py.

`job.shared` holds a number per chunk of `chunk` elements, the last one shorter: the squared norms, summed over ranks.
No index travels: encoder and decoder take the k chunks with the largest numbers, ties to the lowest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver_sparse, finish_sparse, with_residual
from thinwire.kernels.reference_values import from_wire, to_wire


def _places(shared: Tensor | None, n: int, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the elements that are sent, ascending, and where in the payload each lies."""
    assert shared is not None, "the chunks are those of what is shared: it needs a place"
    order = torch.sort(shared.view(torch.int32), descending=True, stable=True)  # orders as norms do
    chunks = order.indices[:k].sort().values
    elements = (chunks[:, None] * chunk + torch.arange(chunk, device=shared.device)).view(-1)
    slots = torch.arange(elements.numel(), device=shared.device)
    inside = elements < n
    return elements[inside], slots[inside]


def encode_top_chunks(
    jobs: Sequence[EncodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> list[bool]:
    """Write k * chunk values: the elements of the chunks, ascending; zeros for what lies beyond the end."""
    finite: list[bool] = []
    for job, num_kept in zip(jobs, k, strict=True):
        q = with_residual(job)
        places, slots = _places(job.shared, q.numel(), num_kept, chunk)
        rounded, sent = to_wire(q[places], dtype)
        job.out.zero_()
        job.out[: num_kept * chunk * dtype.itemsize].view(dtype)[slots] = rounded
        assert job.shared is not None
        finite.append(finish_sparse(job, q, places, sent) and bool(job.shared.isfinite().all()))
    return finite


def decode_top_chunks(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunk: int, threads: int = 1
) -> None:
    """Put the values back in their places; every other element is zero."""
    for job, num_kept in zip(jobs, k, strict=True):
        places, slots = _places(job.shared, job.out.numel(), num_kept, chunk)
        values = job.data[: num_kept * chunk * dtype.itemsize].view(dtype)[slots]
        deliver_sparse(job, places, from_wire(values))
