"""Top-k: k values and where they belong, by index. triton_top_k_select.py finds which.

Kernels select and scatter by 16-bit indices. Where blocks hold other forms, triton_top_k_indices.py makes those from
16-bit ones that lie beside the block, and the other way round.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thinwire.errors import WireError
from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_top_k import read_indices
from thinwire.kernels.top_k_layout import VALUE_DTYPES, top_k_layout
from thinwire.kernels.triton_elements import decode_row, deliver, job_and_tile, only_if, output_of
from thinwire.kernels.triton_launch import DATA, DECODE_N, ENCODE_N, OUT, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_sparse import zero_outputs
from thinwire.kernels.triton_top_k_indices import (
    mark,
    read_bitmap,
    read_packed,
    write_bitmap,
    write_counts,
    write_packed,
)
from thinwire.kernels.triton_top_k_places import INDICES, VALUES, Places, place_word
from thinwire.kernels.triton_top_k_select import bounds, narrow, select
from thinwire.kernels.triton_values import NAMES, load_values

TILE = 4096
NARROW = {"TILE": 4096, "num_warps": 8}
SELECT = {"TILE": 2048, "num_warps": 16}
FORMS = {"TILE": 1024}
SELECTIONS = ("exact", "sampled", "bisect")


@triton.jit
def _kept(table, places, job, tile, TILE: tl.constexpr):
    """Return a tile's places among the k, their mask, and where the indices lie."""
    k = tl.load(decode_row(table, job) + 4) & 0xFFFFFFFF
    place = tile * TILE + tl.arange(0, TILE)
    return place, place < k, place_word(places, job, INDICES).to(tl.pointer_type(tl.uint16))


@jobs_kernel
def _check(flags, table, num_tiles, places, TILE: tl.constexpr):
    """Set the first flag, which stands for the whole call, where an index is out of range or out of order."""
    job, tile = job_and_tile(num_tiles)
    place, mask, indices = _kept(table, places, job, tile, TILE)
    index = tl.load(indices + place, mask=mask, other=0).to(tl.int32)
    before = tl.load(indices + place - 1, mask=mask & (place > 0), other=0).to(tl.int32)
    bad = mask & ((index >= tl.load(decode_row(table, job) + 2)) | ((place > 0) & (index <= before)))
    tl.store(flags, 1, mask=tl.max(bad.to(tl.int32), axis=0) > 0)


@jobs_kernel
def _scatter(flags, table, num_tiles, places, NUMBER: tl.constexpr, NBYTES: tl.constexpr, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    out, alpha, accumulate, _ = output_of(table, job, 0, False)
    place, mask, indices = _kept(table, places, job, tile, TILE)
    mask = only_if(mask, tl.load(flags) == 0)
    value = load_values(place_word(places, job, VALUES), place, mask, NUMBER, NBYTES)
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
    """Write k selected values and their indices, by index."""
    packing.check_threads(threads)
    packing.check_top_k(dtype, jobs, k, VALUE_DTYPES, chunked=chunked, encode=True)
    if selection not in SELECTIONS:
        raise ValueError(f"selection: expected one of {', '.join(SELECTIONS)}, got {selection!r}")
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.top_k_nbytes(dtype, chunked), k, device), device)
    places = Places(table, OUT, ENCODE_N, k, dtype, chunked)
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0
    room = 0 if selection == "sampled" else min(table.most(ENCODE_N), 4 * max(k) + 2048)  # ample for a good bound
    candidates = table.scratch(room, torch.uint16)
    found = table.scratch(2, torch.int32)  # by job: how many candidates, or the two bounds of sampled selection
    if selection == "sampled":
        table.launch(bounds, 1, found, REGULAR=regular, **NARROW)
    else:
        table.launch(narrow, 1, candidates, found, room, REGULAR=regular, **NARROW)
    settings = {"SELECTION": selection, "NUMBER": NAMES[dtype], "NBYTES": dtype.itemsize, "REGULAR": regular}
    table.launch(select, 1, places.on_device, found, candidates, room, **settings, **SELECT)
    _write_forms(table, places, max(k))
    return table.finite()


def decode_top_k(
    jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, chunked: bool = False, threads: int = 1
) -> None:
    """Scatter the values; every other element is zero.

    Raises:
        WireError: an index is out of range or out of order, in any job. Nothing was written.
    """
    packing.check_threads(threads)
    packing.check_top_k(dtype, jobs, k, VALUE_DTYPES, chunked=chunked, encode=False)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.top_k_nbytes(dtype, chunked), k, device), device)
    places = Places(table, DATA, DECODE_N, k, dtype, chunked)
    if places.packed:
        table.launch(read_packed, max(1, triton.cdiv(max(k), TILE)), places.on_device, TILE=TILE)
    if places.bitmap:
        table.launch(read_bitmap, 1, places.on_device, TILE=TILE)
    num_tiles = max(1, triton.cdiv(max(k), TILE))
    table.launch(_check, num_tiles, places.on_device, TILE=TILE)
    zero_outputs(table)
    table.launch(_scatter, num_tiles, places.on_device, NUMBER=NAMES[dtype], NBYTES=dtype.itemsize, TILE=TILE)
    if table.flags()[0]:
        raise next(filter(None, (_error_of(i, job, k[i], dtype, chunked) for i, job in enumerate(jobs))))


def _write_forms(table: Table, places: Places, most_kept: int) -> None:
    if places.packed:
        table.launch(write_packed, max(1, triton.cdiv(most_kept, 2 * FORMS["TILE"])), places.on_device, **FORMS)
    if places.counts:
        table.launch(write_counts, 1, places.on_device, **FORMS)
    if places.bitmap:
        room = table.most(ENCODE_N)
        marks = table.scratch(room, torch.uint8).zero_()
        table.launch(mark, max(1, triton.cdiv(most_kept, FORMS["TILE"])), places.on_device, marks, room, **FORMS)
        num_tiles = max(1, triton.cdiv(room, 8 * FORMS["TILE"]))
        table.launch(write_bitmap, num_tiles, places.on_device, marks, room, **FORMS)


def _error_of(which: int, job: DecodeJob, num_kept: int, dtype: torch.dtype, chunked: bool) -> WireError | None:
    """Return the error of the job's indices, if they are bad; where they have 16 bits, it names the first bad one."""
    n, data = job.out.numel(), job.data.cpu()
    layout = top_k_layout(n, num_kept, dtype, chunked)
    try:
        read_indices(layout, data, n, num_kept)
    except WireError as error:
        if "indices" not in {part.name for part in layout.parts}:
            return WireError(f"{error} in job {which}")
    else:
        return None
    indices = layout.view(data, "indices").to(torch.int32) & 0xFFFF
    bad = indices >= n
    bad[1:] |= indices[1:] <= indices[:-1]
    place = int(bad.nonzero()[0])
    after = f" after {int(indices[place - 1])}" if place else ""
    return WireError(
        f"top-k: expected {num_kept} ascending indices below {n}; index number {place} of job {which} is "
        f"{int(indices[place])}{after}"
    )
