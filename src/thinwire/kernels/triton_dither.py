"""Dithering: values rounded by chance to levels of one scale a block, evenly spaced ones or powers of two.

Evenly spaced levels of the largest magnitude are block quantisation with stochastic rounding, byte for byte.
"""

from collections.abc import Sequence

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.triton_launch import DECODE_N, ENCODE_N, Table
from thinwire.kernels.triton_quantise import block_of, decode_blocks, encode_blocks


def encode_dither(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, natural: bool, l2: bool, threads: int = 1
) -> list[bool]:
    """Write one float32 scale a block (`block` = 0: the whole partition), then the codes."""
    packing.check_threads(threads)
    packing.check_dither(bits, block)
    packing.check_keys(jobs)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.dither_nbytes(bits, block), device=device), device)
    rule = "natural" if natural else "stochastic"
    encode_blocks(table, bits=bits, block=block_of(block, table.most(ENCODE_N)), rule=rule, norm="l2" if l2 else "max")
    return table.finite()


def decode_dither(jobs: Sequence[DecodeJob], *, bits: int, block: int, natural: bool, threads: int = 1) -> None:
    """Set value = level of the code, times the scale of its block."""
    packing.check_threads(threads)
    packing.check_dither(bits, block)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.dither_nbytes(bits, block), device=device), device)
    decode_blocks(table, bits=bits, block=block_of(block, table.most(DECODE_N)), natural=natural)
