"""What decoders of sparse kinds share."""

import triton
import triton.language as tl

from thinwire.kernels.triton_elements import decode_row, job_and_tile, only_if, output_of
from thinwire.kernels.triton_launch import DECODE_ACCUMULATE, DECODE_N, Table, jobs_kernel

TILE = 4096


@jobs_kernel
def _zero(flags, table, num_tiles, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    out, _, _, left = output_of(table, job, tile.to(tl.int64) * TILE, False)
    place = tl.arange(0, TILE)
    spared = (tl.load(decode_row(table, job) + 3) >> 32) | tl.load(flags)  # accumulates, or some index is bad
    tl.store(out + place, tl.zeros((TILE,), tl.float32), mask=only_if(place < left, spared == 0))


def zero_outputs(table: Table) -> None:
    """Zero what jobs replace, unless the first flag is set, which stands for the whole call."""
    if not (table.words[:, DECODE_ACCUMULATE] >> 32).all():
        table.launch(_zero, max(1, triton.cdiv(table.most(DECODE_N), TILE)), TILE=TILE)
