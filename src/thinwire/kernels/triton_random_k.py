"""Random-k: values at places that both sides draw, on the device; reference_random_k.py defines which.

Draws are taken in sequence until enough different units were drawn. One program a partition draws them, a tile at a
time, and notes for every unit the first draw that met it (`_draw`): which lanes are faster does not show in that. The
units met by the first draws, as many as are wanted, are then listed in order (`_choose`).
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.triton_elements import job_and_tile
from thinwire.kernels.triton_launch import DECODE_N, ENCODE_N, ENCODE_STREAM, Table, jobs_kernel
from thinwire.kernels.triton_units import DTYPES, decode_units, encode_units, mask_of

DRAWS = 2048  # a tile of them
TILE = 2048
UNDRAWN = 2**31 - 1


@triton.jit
def _words(key, offset, steps, counter):
    counter += offset
    step, stream = steps.to(tl.uint32), (steps >> 32).to(tl.uint32)
    return tl.philox(key, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), step, stream)


@triton.jit
def _unit(word, num_units):
    return ((word.to(tl.uint64) * num_units.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def _meet(firsts, unit, draw):
    """Note that these draws met their units; return how many of those were met for the first time."""
    before = tl.atomic_min(firsts + unit, draw)
    return tl.sum((before == 0x7FFFFFFF).to(tl.int32), axis=0)


@jobs_kernel
def _draw(flags, table, num_tiles, masks, firsts, room, last, DRAWS: tl.constexpr):
    """Leave for every unit its first draw; in `last` the first draw of the last tile, and how many were met before."""
    job, _ = job_and_tile(num_tiles)
    key, offset, steps, num_units, k = mask_of(masks, job)
    few = tl.minimum(k, num_units - k).to(tl.int32)
    firsts += job.to(tl.int64) * room
    start, met, met_before = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while met < few:
        met_before = met
        four = tl.arange(0, DRAWS // 4)
        w0, w1, w2, w3 = _words(key, offset, steps, (start // 4 + four).to(tl.int64))
        draw = start + 4 * four
        met += _meet(firsts, _unit(w0, num_units), draw)
        met += _meet(firsts, _unit(w1, num_units), draw + 1)
        met += _meet(firsts, _unit(w2, num_units), draw + 2)
        met += _meet(firsts, _unit(w3, num_units), draw + 3)
        start += DRAWS
    tl.store(last + 2 * job, start - DRAWS)
    tl.store(last + 2 * job + 1, met_before)


@jobs_kernel
def _choose(flags, table, num_tiles, masks, firsts, room, last, units, most, DRAWS: tl.constexpr, TILE: tl.constexpr):
    """List the units that are sent."""
    job, _ = job_and_tile(num_tiles)
    key, offset, steps, num_units, k = mask_of(masks, job)
    few = tl.minimum(k, num_units - k).to(tl.int32)
    firsts += job.to(tl.int64) * room
    units += job.to(tl.int64) * most

    wanted = few - tl.load(last + 2 * job + 1)  # of those met first by the last tile of draws
    draw = tl.load(last + 2 * job) + tl.arange(0, DRAWS)
    w0, w1, w2, w3 = _words(key, offset, steps, (draw // 4).to(tl.int64))
    word = tl.where(draw % 4 < 2, tl.where(draw % 4 == 0, w0, w1), tl.where(draw % 4 == 2, w2, w3))
    met_by = tl.load(firsts + _unit(word, num_units), mask=draw >= 0, other=0x7FFFFFFF)
    first = (met_by == draw).to(tl.int32)
    cut = tl.max(tl.where((first != 0) & (tl.cumsum(first, axis=0) <= wanted), draw, -1), axis=0)

    all_but_those = (few != k).to(tl.int32)
    count = tl.zeros((), tl.int32)
    for begin in range(0, num_units.to(tl.int32), TILE):
        unit = begin + tl.arange(0, TILE)
        drawn = (tl.load(firsts + unit, mask=unit < num_units, other=0) <= cut).to(tl.int32)
        one = tl.where(unit < num_units, drawn ^ all_but_those, 0)
        to = count + tl.cumsum(one, axis=0) - one
        tl.store(units + to, unit, mask=(one != 0) & (to < k))
        count += tl.sum(one, axis=0)


def _draw_masks(
    table: Table,
    streams: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    n: int,
    k: Sequence[int],
    block: int,
    period: int,
) -> tuple[Tensor, Tensor, int]:
    """Return what `encode_units` takes: the masks, the units that are sent, and room for how many there is."""
    num_units = -(-table.words[:, n] // block)
    masks = table.send(np.column_stack([streams, num_units, np.array(k)]))
    room, most = int(num_units.max()), max(k)
    if period:
        return masks, masks, 0
    firsts = table.scratch(room, torch.int32).fill_(UNDRAWN)
    last, units = table.scratch(2, torch.int32), table.scratch(most, torch.int32)
    table.launch(_draw, 1, masks, firsts, room, last, DRAWS=DRAWS)
    table.launch(_choose, 1, masks, firsts, room, last, units, most, DRAWS=DRAWS, TILE=TILE)
    return masks, units, most


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
    """Write k * block values: the elements of the units drawn, ascending; zeros for what lies beyond the end."""
    packing.check_threads(threads)
    packing.check_dtype(dtype, *DTYPES)
    packing.check_keys(jobs)
    packing.check_random_k(jobs, k, dtype, block, period)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.random_k_nbytes(dtype, block, period), k, device), device)
    drawn = _draw_masks(table, table.words[:, ENCODE_STREAM], ENCODE_N, k, block, period)
    encode_units(table, *drawn, max(k), dtype, block, period=period, scaled=scaled)
    return table.finite()


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
    packing.check_threads(threads)
    packing.check_dtype(dtype, *DTYPES)
    packing.check_random_k(jobs, k, dtype, block, period)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.random_k_nbytes(dtype, block, period), k, device), device)
    streams = np.frombuffer(packing.pack_streams(jobs), dtype=np.int64).reshape(-1, 3)
    drawn = _draw_masks(table, streams, DECODE_N, k, block, period)
    decode_units(table, *drawn, max(k), dtype, block, period=period)
