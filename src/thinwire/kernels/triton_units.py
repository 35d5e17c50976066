"""Values of whole units of a partition: runs of BLOCK elements, which of them on both sides know without being told.

A row of `masks` says of a job what its units are drawn with, and how many of them are sent; `units` lists those.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from thinwire.kernels.triton_launch import ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_sparse import zero_outputs
from thinwire.kernels.triton_values import NAMES, load_values, store_values

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 2048


@triton.jit
def mask_of(masks, job):
    """Return a job's stream (key, offset, step and stream), of how many units it draws, and how many are sent."""
    row = masks + job * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _elements(masks, units, most, job, tile, BLOCK: tl.constexpr, PERIOD: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's values' numbers in the payload, their mask, and which elements they are of."""
    _, _, steps, _, k = mask_of(masks, job)
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
    _, _, _, num_units, k = mask_of(masks, job)
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


def encode_units(
    table: Table,
    masks: Tensor,
    units: Tensor,
    most: int,
    most_kept: int,
    dtype: torch.dtype,
    block: int,
    *,
    period: int = 0,
    scaled: bool = False,
) -> None:
    """Write the values of the units that are sent, and leave the rest. `most`: room for units of a job.

    With `period`, units are not listed but every period-th is sent.
    """
    regular = table.any_bits(X, RESIDUAL, ENCODE_N) % 16 == 0
    table.launch(_leave_all, max(1, triton.cdiv(table.most(ENCODE_N), TILE)), REGULAR=regular, TILE=TILE)
    settings = {"SCALED": scaled, "NUMBER": NAMES[dtype], "NBYTES": dtype.itemsize, "TILE": TILE}
    num_tiles = max(1, triton.cdiv(most_kept * block, TILE))
    table.launch(_gather, num_tiles, masks, units, most, BLOCK=block, PERIOD=period, **settings)


def decode_units(
    table: Table,
    masks: Tensor,
    units: Tensor,
    most: int,
    most_kept: int,
    dtype: torch.dtype,
    block: int,
    *,
    period: int = 0,
) -> None:
    """Put the values back in their places; every other element is zero."""
    zero_outputs(table)
    num_tiles = max(1, triton.cdiv(most_kept * block, TILE))
    table.launch(_scatter, num_tiles, masks, units, most, BLOCK=block, PERIOD=period, NUMBER=NAMES[dtype], TILE=TILE)
