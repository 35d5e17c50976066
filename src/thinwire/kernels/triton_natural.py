"""Natural compression: a power of two a value, chosen by chance; reference_natural.py defines which.

Nine bits are a byte and, behind all bytes, a bit of sign: packed byte j holds the signs of elements j, j + h, j + 2h,
..., h = ceil(n / 8). So a program works on the elements of some packed bytes; eight bits are one plane of them.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_natural import OFFSET, TOP
from thinwire.kernels.triton_codes import code_at
from thinwire.kernels.triton_elements import (
    decode_row,
    deliver,
    encode_row,
    form_q,
    input_of,
    job_and_tile,
    leave,
    magnitude,
    output_of,
    pointer_to,
    zero_padding,
)
from thinwire.kernels.triton_launch import DECODE_N, DECODE_OUT, ENCODE_N, RESIDUAL, Table, X, jobs_kernel
from thinwire.kernels.triton_philox import chunked_planes, uniform

TILE = 2048


@triton.jit
def _value(code, negative, OFFSET: tl.constexpr):
    bits = tl.where(code > 0, (code + OFFSET) << 23, 0) | (negative << 31)
    return bits.to(tl.float32, bitcast=True)


@jobs_kernel
def _encode(
    flags,
    table,
    num_tiles,
    OFFSET: tl.constexpr,
    TOP: tl.constexpr,
    PLANES: tl.constexpr,
    CHUNKED: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    job, tile = job_and_tile(num_tiles)
    x, residual, has_residual, scale, n = input_of(table, job, 0, REGULAR)
    out = pointer_to(tl.load(encode_row(table, job) + 2), tl.uint8, 4)
    random = encode_row(table, job) + 5
    key, offset, steps = tl.load(random), tl.load(random + 1), tl.load(random + 2)
    h = tl.cdiv(n, PLANES)
    if REGULAR:
        h = tl.multiple_of(h, 16)
    first = tile.to(tl.int64) * TILE
    byte = first + tl.arange(0, TILE)
    signs = tl.zeros((TILE,), tl.int32)
    peak = tl.zeros((TILE,), tl.int32)
    for plane in range(0, PLANES):
        place = plane * h + byte
        mask = (byte < h) & (place < n)
        q = form_q(x, residual, has_residual, scale, place, mask)
        u = tl.reshape(uniform(key, steps, offset + plane * h + first, 1, TILE, CHUNKED), (TILE,))
        bits = magnitude(q)
        size = bits.to(tl.float32, bitcast=True)
        # A random fraction added to the bits of a float carries into its exponent as often as its mantissa says.
        carried = ((bits + (u * 8388608.0).to(tl.int32)) >> 23) - OFFSET
        low = (size * (2.0 ** (126 - OFFSET)) + u >= 1.0).to(tl.int32)  # the smallest level, or 0
        code = tl.where(bits < ((OFFSET + 1) << 23), low, carried)
        code = tl.minimum(tl.maximum(code, 0), TOP)
        negative = ((q < 0.0) & (code > 0)).to(tl.int32)
        leave(residual, has_residual, place, mask, q - _value(code, negative, OFFSET))
        if PLANES == 1:
            code |= negative << 7
        tl.store(out + place, code.to(tl.uint8), mask=mask)
        signs |= negative << plane
        peak = tl.maximum(peak, bits)
    used = n
    if PLANES > 1:
        tl.store(out + n + byte, signs.to(tl.uint8), mask=byte < h)
        used += h
    tl.store(flags + job, 1, mask=tl.max(peak, axis=0) > (TOP + OFFSET) << 23)  # above the largest level
    zero_padding(table, job, tile, num_tiles, used, 1024)


@jobs_kernel
def _decode(
    flags, table, num_tiles, OFFSET: tl.constexpr, PLANES: tl.constexpr, REGULAR: tl.constexpr, TILE: tl.constexpr
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    place = tl.arange(0, TILE)
    mask = place < left
    data = pointer_to(tl.load(decode_row(table, job)), tl.uint8, 4)
    code = tl.load(data + first + place, mask=mask, other=0).to(tl.int32)
    if PLANES == 1:
        negative, code = code >> 7, code & 127
    else:
        n = left + first
        negative = code_at(data + n, first.to(tl.int32) + place, n.to(tl.int32), mask, 1)
    deliver(out, alpha, accumulate, place, mask, _value(code, negative, OFFSET))


def encode_natural(jobs: Sequence[EncodeJob], *, bits: int, threads: int = 1) -> list[bool]:
    """Write the codes: a sign and an exponent, 8 or 9 bits."""
    packing.check_threads(threads)
    packing.check_natural(bits)
    packing.check_keys(jobs)
    if not jobs:
        return []
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, packing.natural_nbytes(bits), device=device), device)
    planes = 1 if bits == 8 else 8
    tile = TILE // planes
    table.launch(
        _encode,
        max(1, triton.cdiv(triton.cdiv(table.most(ENCODE_N), planes), tile)),
        OFFSET=OFFSET[bits],
        TOP=TOP[bits],
        PLANES=planes,
        CHUNKED=chunked_planes(table, planes),
        REGULAR=table.any_bits(X, RESIDUAL) % 16 == 0 and table.any_bits(ENCODE_N) % (16 * planes) == 0,
        TILE=tile,
    )
    return table.finite()


def decode_natural(jobs: Sequence[DecodeJob], *, bits: int, threads: int = 1) -> None:
    """Set value = the power of two with its sign, or 0."""
    packing.check_threads(threads)
    packing.check_natural(bits)
    if not jobs:
        return
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, packing.natural_nbytes(bits), device=device), device)
    table.launch(
        _decode,
        max(1, triton.cdiv(table.most(DECODE_N), TILE)),
        OFFSET=OFFSET[bits],
        PLANES=1 if bits == 8 else 8,
        REGULAR=table.any_bits(DECODE_OUT, DECODE_N) % 16 == 0,
        TILE=TILE,
    )
