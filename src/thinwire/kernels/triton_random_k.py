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
    output_of,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, ENCODE_N, ENCODE_STREAM, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_sparse import zero_outputs
from thinwire.kernels.triton_values import NAMES, load_values, store_values

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DRAWS = 2048  # a tile of them
TILE = 2048
UNDRAWN = 2**31 - 1


@triton.jit
def _mask_of(masks, job):
    """Return a job's stream (key, offset, step and stream), of how many units it draws, and how many are sent."""
    row = masks + job * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


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
    key, offset, steps, num_units, k = _mask_of(masks, job)
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
    key, offset, steps, num_units, k = _mask_of(masks, job)
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


@triton.jit
def _elements(masks, units, most, job, tile, BLOCK: tl.constexpr, PERIOD: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's values' numbers in the payload, their mask, and which elements they are of."""
    _, _, steps, _, k = _mask_of(masks, job)
    slot = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = slot < k * BLOCK
    if PERIOD:
        unit = (steps & 0xFFFFFFFF) % PERIOD + slot // BLOCK * PERIOD
    else:
        unit = tl.load(units + job.to(tl.int64) * most + slot // BLOCK, mask=mask, other=0).to(tl.int64)
    return slot, mask, unit * BLOCK + slot % BLOCK


@jobs_kernel
def _leave_all(flags, table, num_tiles, REGULAR: tl.constexpr, TILE: tl.constexpr):
    """Leave q where the residual was."""
    job, tile = job_and_tile(num_tiles)
    x, residual, has_residual, scale, left = input_of(table, job, tile.to(tl.int64) * TILE, REGULAR)
    place = tl.arange(0, TILE)
    q = form_q(x, residual, has_residual, scale, place, place < left)
    leave(residual, has_residual, place, place < left, q)
    flag_non_finite(flags, job, tl.max(magnitude(q), axis=0))


@jobs_kernel
def _gather(
    flags,
    table,
    num_tiles,
    masks,
    units,
    most,
    BLOCK: tl.constexpr,
    PERIOD: tl.constexpr,
    SCALED: tl.constexpr,
    NUMBER: tl.constexpr,
    NBYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the values; take what was sent out of the residual."""
    job, tile = job_and_tile(num_tiles)
    _, residual, has_residual, _, n = input_of(table, job, 0, False)
    source = floats_at(tl.where(has_residual != 0, has_residual, tl.load(encode_row(table, job))), False)
    slot, mask, place = _elements(masks, units, most, job, tile, BLOCK, PERIOD, TILE)
    inside = mask & (place < n)  # the last unit may be shorter
    q = tl.load(source + place, mask=inside, other=0.0)
    value = q
    _, _, _, num_units, k = _mask_of(masks, job)
    if SCALED:
        value = q * tl.div_rn(num_units.to(tl.float32), tl.maximum(k, 1).to(tl.float32))
    sent = store_values(tl.load(encode_row(table, job) + 2), slot, mask, value, NUMBER, 4)
    leave(residual, has_residual, place, inside, q - sent)
    flag_non_finite(flags, job, tl.max(tl.where(inside, magnitude(sent), 0), axis=0))
    zero_padding(table, job, tile, num_tiles, k * BLOCK * NBYTES, 1024)


@jobs_kernel
def _scatter(
    flags,
    table,
    num_tiles,
    masks,
    units,
    most,
    BLOCK: tl.constexpr,
    PERIOD: tl.constexpr,
    NUMBER: tl.constexpr,
    TILE: tl.constexpr,
):
    job, tile = job_and_tile(num_tiles)
    out, alpha, accumulate, n = output_of(table, job, 0, False)
    slot, mask, place = _elements(masks, units, most, job, tile, BLOCK, PERIOD, TILE)
    value = load_values(tl.load(decode_row(table, job)), slot, mask, NUMBER, 4)
    deliver(out, alpha, accumulate, place, mask & (place < n), value)


def _draw_masks(
    table: Table,
    streams: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    n: int,
    k: Sequence[int],
    block: int,
    period: int,
) -> tuple[Tensor, Tensor, int]:
    """Return what `_elements` takes: the masks, the units that are sent, and room for how many there is."""
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
    table = Table.of_encode(packing.pack_encode(jobs, packing.random_k_nbytes(dtype, block), k, device), device)
    drawn = _draw_masks(table, table.words[:, ENCODE_STREAM], ENCODE_N, k, block, period)
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0
    table.launch(_leave_all, max(1, triton.cdiv(table.most(ENCODE_N), TILE)), REGULAR=regular, TILE=TILE)
    settings = {"SCALED": scaled, "NUMBER": NAMES[dtype], "NBYTES": dtype.itemsize, "TILE": TILE}
    num_tiles = max(1, triton.cdiv(max(k) * block, TILE))
    table.launch(_gather, num_tiles, *drawn, BLOCK=block, PERIOD=period, **settings)
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
    table = Table.of_decode(packing.pack_decode(jobs, packing.random_k_nbytes(dtype, block), k, device), device)
    streams = np.frombuffer(packing.pack_streams(jobs), dtype=np.int64).reshape(-1, 3)
    drawn = _draw_masks(table, streams, DECODE_N, k, block, period)
    zero_outputs(table)
    num_tiles = max(1, triton.cdiv(max(k) * block, TILE))
    table.launch(_scatter, num_tiles, *drawn, BLOCK=block, PERIOD=period, NUMBER=NAMES[dtype], TILE=TILE)
