"""Random-k: values at places that both sides draw. Part of the specification, see reference.py.

A partition is cut into units of `block` elements, the last one shorter; k units are sent. No index travels: encoder
and decoder know which, from the key (`period` 0) or from the step alone (units u with u % period == step % period).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver_sparse, finish_sparse, with_residual
from thinwire.kernels.reference_values import from_wire, to_wire
from thinwire.random import Key, words

_DRAWS = 64  # at a time; does not show in the result


def random_units(key: Key, num_units: int, k: int) -> Tensor:
    """Return k of the units, ascending: every subset is equally likely.

    Draw d is floor(word d * num_units / 2**32). The first k different draws are the units; where k is more than half
    of them, the first num_units - k different ones are those left out.
    """
    few = min(k, num_units - k)
    drawn: set[int] = set()
    start = 0
    while len(drawn) < few:
        for word in words(key, start, _DRAWS):
            if len(drawn) < few:
                drawn.add(word * num_units >> 32)
        start += _DRAWS
    mask = torch.zeros(num_units, dtype=torch.bool)
    mask[list(drawn)] = True
    return (mask if few == k else ~mask).nonzero().view(-1)


def _places(key: Key | None, n: int, k: int, block: int, period: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the elements that are sent, ascending, and where in the payload each lies."""
    assert key is not None, "random-k needs a key"
    num_units = -(-n // block)
    if period:
        turns = range((key.step & 0xFFFFFFFF) % period, num_units, period)
        units = torch.tensor(turns, dtype=torch.int64)
    else:
        units = random_units(key, num_units, k)
    elements = (units[:, None] * block + torch.arange(block)).view(-1)
    slots = torch.arange(elements.numel())
    inside = elements < n  # the last unit may be shorter
    return elements[inside].to(device), slots[inside].to(device)


def encode_random_k(
    jobs: Sequence[EncodeJob],
    *,
    k: Sequence[int],
    dtype: torch.dtype,
    block: int = 1,
    period: int = 0,
    scaled: bool = False,
    threads: int = 1,
) -> list[bool]:
    """Write k * block values: the elements of the units, ascending; zeros for what lies beyond the end.

    `scaled` multiplies by num_units / k, a float32. k[j] belongs to jobs[j]; with a period, k is at least
    ceil(num_units / period).
    """
    finite: list[bool] = []
    for job, num_kept in zip(jobs, k, strict=True):
        q = with_residual(job)
        places, slots = _places(job.key, q.numel(), num_kept, block, period, q.device)
        values = q[places]
        if scaled:
            values = values * (torch.tensor(float(-(-q.numel() // block))) / num_kept)
        rounded, sent = to_wire(values, dtype)
        job.out.zero_()
        job.out[: num_kept * block * dtype.itemsize].view(dtype)[slots] = rounded
        finite.append(finish_sparse(job, q, places, sent))
    return finite


def decode_random_k(
    jobs: Sequence[DecodeJob],
    *,
    k: Sequence[int],
    dtype: torch.dtype,
    block: int = 1,
    period: int = 0,
    threads: int = 1,
) -> None:
    """Put the values back in their places; every other element is zero."""
    for job, num_kept in zip(jobs, k, strict=True):
        places, slots = _places(job.key, job.out.numel(), num_kept, block, period, job.out.device)
        values = job.data[: num_kept * block * dtype.itemsize].view(dtype)[slots]
        deliver_sparse(job, places, from_wire(values))
