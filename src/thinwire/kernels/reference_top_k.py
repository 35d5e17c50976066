"""Top-k: k values and where they belong. Part of the specification, see reference.py.

An encoder first selects exactly k elements, then writes them in the order of their indices by `top_k_layout`. Exact
selection takes the k largest magnitudes. The others only compare magnitudes with two bounds, upper and lower: they
take the elements that reach the upper one, then those that reach the lower one, then the rest; of the class in which k
is reached, elements spread evenly over it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver_sparse, finish_sparse, with_residual
from thinwire.kernels.reference_values import from_wire, to_wire
from thinwire.kernels.top_k_layout import CHUNK, top_k_layout
from thinwire.wire import Layout

BISECTED_BITS = 15  # of a magnitude that bisection does not look at: what is left of the fraction is 8 bits
MIN_SAMPLES = 1024
SAMPLES_KEPT = 64  # how many of the k a sample should hold


# --- selection ------------------------------------------------------------------------------------------------------


def select(q: Tensor, k: int, selection: str) -> Tensor:
    """Return the indices, ascending, of the k elements to send."""
    magnitude = q.view(torch.int32).to(torch.int64) & 0x7FFFFFFF  # orders as |q| does
    n, num_samples = q.numel(), max(MIN_SAMPLES, -(-SAMPLES_KEPT * q.numel() // max(k, 1)))
    if k == 0 or selection == "exact" or (selection == "sampled" and num_samples >= n):
        return torch.sort(magnitude, descending=True, stable=True).indices[:k].sort().values
    if selection == "bisect":
        lower = int(magnitude.sort(descending=True).values[k - 1]) >> BISECTED_BITS << BISECTED_BITS
        return _between(magnitude, k, lower, lower + (1 << BISECTED_BITS))
    sample = magnitude[sample_places(n, num_samples).to(q.device)].sort(descending=True).values
    expected = k * num_samples // n
    spread = math.isqrt(4 * expected)  # two standard deviations
    return _between(
        magnitude, k, int(sample[min(num_samples, expected + spread) - 1]), int(sample[expected - spread - 1])
    )


def sample_places(n: int, num_samples: int) -> Tensor:
    """Return places spread evenly by the golden ratio, in step with no row length."""
    places = (torch.arange(1, num_samples + 1, dtype=torch.int64) * 2654435769) & 0xFFFFFFFF
    return (places * n) >> 32


def _between(magnitude: Tensor, k: int, lower: int, upper: int) -> Tensor:
    classes = [magnitude >= upper, (magnitude >= lower) & (magnitude < upper), magnitude < lower]
    chosen: list[Tensor] = []
    for one in classes:
        places = one.nonzero().view(-1)
        wanted = min(k, places.numel())
        chosen.append(places[_evenly(wanted, places.numel(), places.device)])
        k -= wanted
    return torch.cat(chosen).sort().values


def _evenly(wanted: int, count: int, device: torch.device) -> Tensor:
    """Mark `wanted` of `count`: those at which floor((i + 1) * wanted / count) grows."""
    i = torch.arange(count, device=device)
    return (i + 1) * wanted // max(count, 1) > i * wanted // max(count, 1)


# --- indices --------------------------------------------------------------------------------------------------------


def write_indices(layout: Layout, out: Tensor, indices: Tensor) -> None:
    """Write ascending int64 indices in the form of the layout."""
    names = {part.name for part in layout.parts}
    if "indices" in names:
        layout.view(out, "indices").copy_(indices.to(torch.int16))
    elif "bitmap" in names:
        bits = out.new_zeros(layout["bitmap"].nbytes * 8)
        bits[indices] = 1
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=out.device)
        layout.view(out, "bitmap").copy_((bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8))
    else:
        if "counts" in names:
            (num_chunks,) = layout["counts"].shape
            counts = torch.bincount(indices // CHUNK, minlength=num_chunks)
            layout.view(out, "counts").copy_(counts.to(torch.int16))
        layout.view(out, "packed").copy_(_pack_12(indices % CHUNK))


def read_indices(layout: Layout, data: Tensor, n: int, k: int) -> Tensor:
    """Return the k ascending int64 indices. Raises `WireError` where they are out of range or out of order."""
    names = {part.name for part in layout.parts}
    if "bitmap" in names:
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
        indices = ((layout.view(data, "bitmap")[:, None] >> shifts) & 1).view(-1).nonzero().view(-1)
        if indices.numel() != k:
            raise WireError(f"top-k: expected {k} ascending indices below {n}, got {indices.numel()} bits that are set")
    elif "indices" in names:
        indices = layout.view(data, "indices").to(torch.int64) & 0xFFFF
    else:
        indices = _unpack_12(layout.view(data, "packed"), k)
        if "counts" in names:
            counts = layout.view(data, "counts").to(torch.int64) & 0xFFFF
            if int(counts.sum()) != k:
                raise WireError(f"top-k: expected {k} ascending indices below {n}, got counts of {int(counts.sum())}")
            chunks = torch.arange(counts.numel(), device=data.device)
            indices = indices + CHUNK * torch.repeat_interleave(chunks, counts)
    if k and (int(indices[-1]) >= n or bool((indices[1:] <= indices[:-1]).any())):
        raise WireError(f"top-k: expected {k} ascending indices below {n}, got some out of range or order")
    return indices


def _pack_12(places: Tensor) -> Tensor:
    """Two in three bytes, least bits first; one left over takes two bytes."""
    padded = torch.cat([places, places.new_zeros(places.numel() % 2)]).view(-1, 2)
    low, high = padded[:, 0], padded[:, 1]
    triples = torch.stack([low & 0xFF, (low >> 8) | ((high & 0xF) << 4), high >> 4], dim=1)
    return triples.view(-1)[: -(-12 * places.numel() // 8)].to(torch.uint8)


def _unpack_12(packed: Tensor, k: int) -> Tensor:
    wide = packed.to(torch.int64)
    triples = torch.cat([wide, wide.new_zeros(-wide.numel() % 3)]).view(-1, 3)
    first, second, third = triples.unbind(dim=1)
    return torch.stack([first | ((second & 0xF) << 8), (second >> 4) | (third << 4)], dim=1).view(-1)[:k]


# --- kernels --------------------------------------------------------------------------------------------------------


def encode_top_k(
    jobs: Sequence[EncodeJob],
    *,
    k: Sequence[int],
    dtype: torch.dtype,
    selection: str = "exact",
    chunked: bool = False,
    threads: int = 1,
) -> list[bool]:
    """Write k selected values and their indices; k[j] belongs to jobs[j].

    `selection` is
        exact: the k largest |q|, ties to the lowest index;
        bisect: lower = the k-th largest magnitude without its last 15 bits, upper = the next such number;
        sampled: of the magnitudes at `sample_places`, where e are expected among the k: upper = the (e - s)-th largest,
            lower = the (e + s)-th, s = floor(2 sqrt(e)); exact where the sample would be as long as q.
    """
    finite: list[bool] = []
    for job, num_kept in zip(jobs, k, strict=True):
        q = with_residual(job)
        layout = top_k_layout(q.numel(), num_kept, dtype, chunked)
        chosen = select(q, num_kept, selection)
        values, sent = to_wire(q[chosen], dtype)
        job.out.zero_()
        layout.view(job.out, "values").copy_(values)
        write_indices(layout, job.out, chosen)
        finite.append(finish_sparse(job, q, chosen, sent))
    return finite


def decode_top_k(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunked: bool = False, threads: int = 1
) -> None:
    """Scatter the values; every other element is zero.

    Raises:
        WireError: an index is out of range or out of order, in any job. Nothing was written.
    """
    layouts = [top_k_layout(job.out.numel(), kept, dtype, chunked) for job, kept in zip(jobs, k, strict=True)]
    indices = [read_indices(layout, job.data, job.out.numel(), kept)
               for layout, job, kept in zip(layouts, jobs, k, strict=True)]  # fmt: skip
    for job, layout, places in zip(jobs, layouts, indices, strict=True):
        deliver_sparse(job, places, from_wire(layout.view(job.data, "values")))
