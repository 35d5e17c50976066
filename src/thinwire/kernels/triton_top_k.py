"""Top-k: the k largest magnitudes, ties to the lowest index; values first, then 16-bit indices, both by index.

Where other forms of indices are smaller, blocks go through this one and torch rewrites their indices.

One program encodes one partition. A sample gives a bound that a little more than k elements reach; a pass over the
partition collects those, in order (`_narrow`). Among them, eight steps of four bits find the k-th largest magnitude
exactly, and a last pass keeps what lies above it and the first of those that equal it (`_select`). Where the bound
turns out wrong, or k is large, all elements are candidates. No byte depends on the sample.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.errors import ThinwireError, WireError
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_top_k import read_indices, write_indices
from thinwire.kernels.top_k_layout import payload_nbytes, top_k_layout
from thinwire.kernels.triton_elements import (
    decode_row,
    deliver,
    encode_row,
    flag_non_finite,
    floats_at,
    form_q,
    input_of,
    job_and_tile,
    leave,
    magnitude,
    only_if,
    output_of,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.wire import Layout, align

DTYPES = (torch.float32, torch.float16)
TILE = 4096
NARROW = {"TILE": 4096, "num_warps": 8}
SELECT = {"TILE": 2048, "num_warps": 16}
SAMPLES = tl.constexpr(1024)


@triton.jit
def _digit_counts(bits, mask, found, step):
    """Count the digits of step `step`, four bits from the top, of the magnitudes that share all digits before."""
    same = 0x7FFFFFFF >> tl.maximum(4 * step - 1, 0)  # a magnitude that differs from `found` by at most this
    return tl.histogram(tl.where(mask & ((bits ^ found) <= same), (bits >> (28 - 4 * step)) & 15, 16), 32)


@triton.jit
def _next_digit(counts, found, rank, step):
    """Add a digit to `found`, so that it grows to the rank-th largest magnitude; take from `rank` what lies above."""
    digits = tl.arange(0, 32)
    counts = tl.where(digits < 16, counts, 0)  # 16: others
    reach = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts  # how many have this digit or a higher one
    digit = tl.sum(((reach >= rank) & (digits < 16)).to(tl.int32), axis=0) - 1
    rank -= tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    # At rank 0 the digit is 15 everywhere: nothing lies above that.
    return found | ((digit << (28 - 4 * step)) & 0x7FFFFFFF), rank


@jobs_kernel
def _narrow(flags, table, num_tiles, candidates, num_candidates, room, REGULAR: tl.constexpr, TILE: tl.constexpr):
    """Leave q where the residual was. Collect indices, ascending, of at least k elements that hold the k largest.

    `num_candidates` is left 0 where all elements are candidates.
    """
    job, _ = job_and_tile(num_tiles)
    x, residual, has_residual, scale, left = input_of(table, job, 0, REGULAR)
    n = left.to(tl.int32)
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)

    expected = k * 1.0 * SAMPLES / tl.maximum(n, 1)
    rank = (expected + 3.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
    sampled = (n >= 4 * SAMPLES) & (rank <= SAMPLES // 4)
    bound = tl.zeros((), tl.int32)
    if sampled:
        # 2**32 / golden ratio: spread evenly, in step with no row length.
        spread = (tl.arange(0, SAMPLES).to(tl.uint32) * 2654435769).to(tl.uint64)
        place = ((spread * n.to(tl.uint64)) >> 32).to(tl.int32)
        bits = magnitude(form_q(x, residual, has_residual, scale, place, place < n))
        for step in range(0, 4):  # fifteen bits: a little lower than the exact bound
            bound, rank = _next_digit(_digit_counts(bits, place < n, bound, step), bound, rank, step)

    candidates += job.to(tl.int64) * room
    count = tl.zeros((), tl.int32)
    peak = tl.zeros((), tl.int32)
    for start in range(0, n, TILE):
        place = start + tl.arange(0, TILE)
        mask = place < n
        q = form_q(x, residual, has_residual, scale, place, mask)
        leave(residual, has_residual, place, mask, q)
        bits = magnitude(q)
        peak = tl.maximum(peak, tl.max(bits, axis=0))
        if sampled:
            reach = mask & (bits >= bound)
            one = reach.to(tl.int32)
            to = count + tl.cumsum(one, axis=0) - one
            tl.store(candidates + to, place.to(tl.uint16), mask=reach & (to < room))
            count += tl.sum(one, axis=0)
    good = (count >= k) & (count <= room)
    tl.store(num_candidates + job, tl.where(good, count, 0))
    flag_non_finite(flags, job, peak)


@triton.jit
def _candidates(candidates, narrowed, count, start, TILE: tl.constexpr):
    """Return where a tile of the candidates lies in the partition, and their mask."""
    i = start + tl.arange(0, TILE)
    mask = i < count
    listed = only_if(mask, narrowed)
    return tl.where(listed, tl.load(candidates + i, mask=listed, other=0).to(tl.int32), i), mask


@jobs_kernel
def _select(
    flags,
    table,
    num_tiles,
    candidates,
    num_candidates,
    room,
    HALF: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the values and the indices; take what was sent out of the residual."""
    job, tile = job_and_tile(num_tiles)
    _, residual, has_residual, _, left = input_of(table, job, 0, REGULAR)
    x = tl.load(encode_row(table, job))
    source = floats_at(tl.where(has_residual != 0, has_residual, x), REGULAR)  # where q lies
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)
    narrowed = tl.load(num_candidates + job)
    count = tl.where(narrowed > 0, narrowed, left.to(tl.int32))
    candidates += job.to(tl.int64) * room

    found = tl.zeros((), tl.int32)
    ties = k  # how many to keep of those that share the digits of `found` so far
    for step in range(0, 8):
        counts = tl.zeros((32,), tl.int32)
        for start in range(0, count, TILE):
            place, mask = _candidates(candidates, narrowed, count, start, TILE)
            bits = magnitude(tl.load(source + place, mask=mask, other=0.0))
            counts += _digit_counts(bits, mask, found, step)
        found, ties = _next_digit(counts, found, ties, step)

    out = tl.load(encode_row(table, job) + 2)
    values = out.to(tl.pointer_type(tl.float16 if HALF else tl.float32))
    VALUE_NBYTES: tl.constexpr = 2 if HALF else 4
    indices = (out + VALUE_NBYTES * k).to(tl.pointer_type(tl.int16))
    num_above, num_equal = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    peak = tl.zeros((), tl.int32)
    for start in range(0, count, TILE):
        place, mask = _candidates(candidates, narrowed, count, start, TILE)
        q = tl.load(source + place, mask=mask, other=0.0)
        bits = magnitude(q)
        above, equal = mask & (bits > found), mask & (bits == found)
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)  # two counts in one sum; neither reaches 2**16
        before = tl.cumsum(both, axis=0) - both
        equal_before = num_equal + (before >> 16)
        keep = above | (equal & (equal_before < ties))
        to = num_above + (before & 0xFFFF) + tl.minimum(equal_before, ties)
        sent = q
        if HALF:
            half = q.to(tl.float16)
            tl.store(values + to, half, mask=keep)
            sent = half.to(tl.float32)
            peak = tl.maximum(peak, tl.max(tl.where(keep, magnitude(sent), 0), axis=0))
        else:
            tl.store(values + to, q, mask=keep)
        tl.store(indices + to, place.to(tl.int16), mask=keep)
        leave(residual, has_residual, place, keep, q - sent)
        total = tl.sum(both, axis=0)
        num_above += total & 0xFFFF
        num_equal += total >> 16
    flag_non_finite(flags, job, peak)
    zero_padding(table, job, tile, num_tiles, (VALUE_NBYTES + 2) * k.to(tl.int64), 1024)


@triton.jit
def _kept(table, job, tile, HALF: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's places among the k, their mask, and where the indices lie."""
    k = tl.load(decode_row(table, job) + 4) & 0xFFFFFFFF
    place = tile * TILE + tl.arange(0, TILE)
    indices = (tl.load(decode_row(table, job)) + (2 if HALF else 4) * k).to(tl.pointer_type(tl.uint16))
    return place, place < k, indices


@jobs_kernel
def _check(flags, table, num_tiles, HALF: tl.constexpr, TILE: tl.constexpr):
    """Set the first flag, which stands for the whole call, where an index is out of range or out of order."""
    job, tile = job_and_tile(num_tiles)
    place, mask, indices = _kept(table, job, tile, HALF, TILE)
    index = tl.load(indices + place, mask=mask, other=0).to(tl.int32)
    before = tl.load(indices + place - 1, mask=mask & (place > 0), other=0).to(tl.int32)
    bad = mask & ((index >= tl.load(decode_row(table, job) + 2)) | ((place > 0) & (index <= before)))
    tl.store(flags, 1, mask=tl.max(bad.to(tl.int32), axis=0) > 0)


@jobs_kernel
def _zero(flags, table, num_tiles, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    out, _, _, left = output_of(table, job, tile.to(tl.int64) * TILE, False)
    place = tl.arange(0, TILE)
    spared = (tl.load(decode_row(table, job) + 3) >> 32) | tl.load(flags)  # accumulates, or some index is bad
    tl.store(out + place, tl.zeros((TILE,), tl.float32), mask=only_if(place < left, spared == 0))


@jobs_kernel
def _scatter(flags, table, num_tiles, HALF: tl.constexpr, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    out, alpha, accumulate, _ = output_of(table, job, 0, False)
    place, mask, indices = _kept(table, job, tile, HALF, TILE)
    mask = only_if(mask, tl.load(flags) == 0)
    values = tl.load(decode_row(table, job)).to(tl.pointer_type(tl.float16 if HALF else tl.float32))
    value = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
    deliver(out, alpha, accumulate, tl.load(indices + place, mask=mask, other=0).to(tl.int32), mask, value)


def encode_top_k(
    jobs: Sequence[EncodeJob],
    *,
    k: Sequence[int],
    dtype: torch.dtype,
    selection: str = "exact",
    chunked: bool = False,
    threads: int = 1,
) -> list[bool]:
    """Write the k largest |q| (ties to the lowest index), values of `dtype` first, then indices, both by index."""
    packing.check_threads(threads)
    _check_served(dtype, selection, chunked)
    packing.check_top_k(dtype, jobs, k, DTYPES, chunked=False, encode=True)
    if not jobs:
        return []
    layouts = [top_k_layout(job.x.numel(), num_kept, dtype) for job, num_kept in zip(jobs, k, strict=True)]
    if all(map(_in_16_bits, layouts)):
        return _encode_16_bit(jobs, k, dtype)
    narrow = [
        job if _in_16_bits(layout) else job._replace(out=_block_16_bit(job.x, num_kept, dtype))
        for job, layout, num_kept in zip(jobs, layouts, k, strict=True)
    ]
    finite = _encode_16_bit(narrow, k, dtype)
    for job, other, layout, num_kept in zip(jobs, narrow, layouts, k, strict=True):
        if other is not job:
            values, indices = _parts_16_bit(other.out, num_kept, dtype)
            job.out.zero_()
            layout.view(job.out, "values").copy_(values)
            write_indices(layout, job.out, indices.to(torch.int64) & 0xFFFF)
    return finite


def decode_top_k(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunked: bool = False, threads: int = 1
) -> None:
    """Scatter the values; every other element is zero.

    Raises:
        WireError: an index is out of range or out of order, in any job. Nothing was written.
    """
    packing.check_threads(threads)
    _check_served(dtype, "exact", chunked)
    packing.check_top_k(dtype, jobs, k, DTYPES, chunked=False, encode=False)
    if not jobs:
        return
    layouts = [top_k_layout(job.out.numel(), num_kept, dtype) for job, num_kept in zip(jobs, k, strict=True)]
    if not all(map(_in_16_bits, layouts)):
        jobs = [
            job if _in_16_bits(layout) else job._replace(data=_in_16_bit_form(job, layout, num_kept, dtype))
            for job, layout, num_kept in zip(jobs, layouts, k, strict=True)
        ]
    _decode_16_bit(jobs, k, dtype)


# --- other forms of indices: through a block whose indices have 16 bits ---------------------------------------------


def _check_served(dtype: torch.dtype, selection: str, chunked: bool) -> None:
    if dtype not in DTYPES or selection != "exact" or chunked:
        raise ThinwireError(
            f"top-k with {dtype} values, selection {selection!r}, chunked={chunked} has no CUDA kernels yet; set "
            "THINWIRE_KERNELS=reference"
        )


def _in_16_bits(layout: Layout) -> bool:
    return any(part.name == "indices" for part in layout.parts)


def _block_16_bit(like: Tensor, num_kept: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(align(num_kept * (dtype.itemsize + 2)), dtype=torch.uint8, device=like.device)


def _parts_16_bit(block: Tensor, num_kept: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, indices, _ = block.split(
        [num_kept * dtype.itemsize, num_kept * 2, block.numel() - num_kept * (dtype.itemsize + 2)]
    )
    return values.view(dtype), indices.view(torch.int16)


def _in_16_bit_form(job: DecodeJob, layout: Layout, num_kept: int, dtype: torch.dtype) -> Tensor:
    if job.data.numel() < payload_nbytes(layout):
        raise WireError(
            f"data: expected at least {payload_nbytes(layout)} bytes for {job.out.numel()} elements, got "
            f"{job.data.numel()}; was it encoded with other settings or cut short?"
        )
    block = _block_16_bit(job.out, num_kept, dtype)
    values, indices = _parts_16_bit(block, num_kept, dtype)
    values.copy_(layout.view(job.data, "values"))
    indices.copy_(read_indices(layout, job.data, job.out.numel(), num_kept).to(torch.int16))
    return block


# --- indices of 16 bits ---------------------------------------------------------------------------------------------


_PAYLOADS: dict[torch.dtype, packing.PayloadNbytes] = {
    torch.float32: lambda _, num_kept: 6 * num_kept,
    torch.float16: lambda _, num_kept: 4 * num_kept,
}


def _encode_16_bit(jobs: Sequence[EncodeJob], k: Sequence[int], dtype: torch.dtype) -> list[bool]:
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, _PAYLOADS[dtype], k, device), device)
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0
    room = min(table.most(ENCODE_N), 4 * max(k) + 2048)  # ample for what a bound lets through
    candidates, num_candidates = table.scratch(room, torch.uint16), table.scratch(1, torch.int32)
    lists = (candidates, num_candidates, room)
    table.launch(_narrow, 1, *lists, REGULAR=regular, **NARROW)
    table.launch(_select, 1, *lists, HALF=dtype == torch.float16, REGULAR=regular, **SELECT)
    return table.finite()


def _decode_16_bit(jobs: Sequence[DecodeJob], k: Sequence[int], dtype: torch.dtype) -> None:
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, _PAYLOADS[dtype], k, device), device)
    half = dtype == torch.float16
    num_tiles = max(1, triton.cdiv(max(k), TILE))
    table.launch(_check, num_tiles, HALF=half, TILE=TILE)
    if any(job.alpha is None for job in jobs):
        table.launch(_zero, max(1, triton.cdiv(table.most(DECODE_N), TILE)), TILE=TILE)
    table.launch(_scatter, num_tiles, HALF=half, TILE=TILE)
    if table.flags()[0]:
        raise next(filter(None, (_first_bad(i, job, k[i], dtype) for i, job in enumerate(jobs))))


def _first_bad(which: int, job: DecodeJob, num_kept: int, dtype: torch.dtype) -> WireError | None:
    """Return the error that names the job's first bad index, if it has one."""
    _, indices = _parts_16_bit(job.data.cpu(), num_kept, dtype)
    indices = indices.to(torch.int32) & 0xFFFF
    bad = indices >= job.out.numel()
    bad[1:] |= indices[1:] <= indices[:-1]
    places = bad.nonzero()
    if not len(places):
        return None
    place = int(places[0])
    after = f" after {int(indices[place - 1])}" if place else ""
    return WireError(
        f"top-k: expected {num_kept} ascending indices below {job.out.numel()}; index number {place} of job {which} "
        f"is {int(indices[place])}{after}"
    )
