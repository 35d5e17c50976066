"""Global-QSGD: codes of a scale that all ranks agreed on, with the functions and the bytes of reference_global.py.

A program works on the packed bytes of a tile. Of 4 bits, byte j of h = ceil(n / 2) holds elements j and j + h, so there
are two planes of elements; of 8 bits there is one.
"""

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import packing
from thinwire.kernels.jobs import DecodeJob, EncodeJob, ReduceJob
from thinwire.kernels.packing_shared import (
    check_global_exponential,
    check_global_linear,
    global_exponential_nbytes,
    global_linear_nbytes,
    pack_reduce,
    pack_shared,
)
from thinwire.kernels.reference_steps import max_scale
from thinwire.kernels.triton_elements import (
    INF_BITS,
    decode_row,
    deliver,
    encode_row,
    flag_non_finite,
    form_q,
    input_of,
    job_and_tile,
    leave,
    low_float,
    magnitude,
    output_of,
    pointer_to,
    zero_padding,
)
from thinwire.kernels.triton_launch import (
    DECODE_N,
    DECODE_OUT,
    ENCODE_N,
    REDUCE_N,
    REDUCE_OFFSET,
    RESIDUAL,
    Table,
    X,
    jobs_kernel,
)
from thinwire.kernels.triton_philox import chunked_planes, uniform
from thinwire.kernels.triton_quantise import SHIFT, natural_code, natural_value, scale_of, shifted_code

TILE = 2048


@triton.jit
def _norm(norms, job, SQUARED: tl.constexpr):
    """Return M, and whether there is one."""
    norm = tl.load(pointer_to(tl.load(norms + job), tl.float32, 4))
    if SQUARED:
        norm = tl.sqrt_rn(norm)
    good = (norm >= 0.0) & (magnitude(norm) < INF_BITS)
    return tl.where(good, norm, 0.0), good


@triton.jit
def _over(value, scale):
    """Return value / scale, 0 where the scale is 0."""
    return tl.where(scale > 0.0, tl.div_rn(value, tl.where(scale > 0.0, scale, 1.0)), 0.0)


@triton.jit
def _uniform(random, first, TILE: tl.constexpr, CHUNKED: tl.constexpr):
    key, offset, steps = tl.load(random), tl.load(random + 1), tl.load(random + 2)
    return tl.reshape(uniform(key, steps, offset + first, 1, TILE, CHUNKED), (TILE,))


@triton.jit
def _next_code(rest, BITS: tl.constexpr):
    """Return the code in the lowest bits, and what is left of a byte without it."""
    code = ((rest & (2**BITS - 1)) ^ (2 ** (BITS - 1))) - 2 ** (BITS - 1)
    return code, (rest - code) >> BITS


# --- linear codes, 8 or 4 bits --------------------------------------------------------------------------------------


@jobs_kernel
def _encode_linear(
    flags,
    table,
    num_tiles,
    max_scale,
    norms,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    SQUARED: tl.constexpr,
    CHUNKED: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    PLANES: tl.constexpr = 8 // BITS
    job, tile = job_and_tile(num_tiles)
    x, residual, has_residual, residual_scale, n = input_of(table, job, 0, REGULAR)
    norm, good = _norm(norms, job, SQUARED)
    step = scale_of(norm, max_scale, LEVELS)
    h = tl.cdiv(n, PLANES)
    if REGULAR:
        h = tl.multiple_of(h, 16)
    first = tile.to(tl.int64) * TILE
    byte = first + tl.arange(0, TILE)
    packed, peak = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for plane in tl.static_range(PLANES):
        place = plane * h + byte
        mask = (byte < h) & (place < n)
        q = form_q(x, residual, has_residual, residual_scale, place, mask)
        u = _uniform(encode_row(table, job) + 5, plane * h + first, TILE, CHUNKED)
        code = shifted_code(tl.floor(_over(q, step) + u), LEVELS) - SHIFT
        leave(residual, has_residual, place, mask, q - code * step)
        packed += code.to(tl.int32) << (plane * BITS)
        peak = tl.maximum(peak, magnitude(q))
    out = pointer_to(tl.load(encode_row(table, job) + 2), tl.uint8, 4)
    tl.store(out + byte, (packed & 0xFF).to(tl.uint8), mask=byte < h)
    flag_non_finite(flags, job, tl.where(good, tl.max(peak, axis=0), INF_BITS))
    zero_padding(table, job, tile, num_tiles, h, 1024)


@jobs_kernel
def _decode_linear(
    flags,
    table,
    num_tiles,
    max_scale,
    norms,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    SQUARED: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    PLANES: tl.constexpr = 8 // BITS
    job, tile = job_and_tile(num_tiles)
    out, alpha, accumulate, n = output_of(table, job, 0, REGULAR)
    norm, _ = _norm(norms, job, SQUARED)
    step = scale_of(norm, max_scale, LEVELS)
    h = tl.cdiv(n, PLANES)
    if REGULAR:
        h = tl.multiple_of(h, 16)
    byte = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    rest = tl.load(pointer_to(tl.load(decode_row(table, job)), tl.uint8, 4) + byte, mask=byte < h, other=0).to(tl.int32)
    for plane in tl.static_range(PLANES):
        code, rest = _next_code(rest, BITS)
        place = plane * h + byte
        deliver(out, alpha, accumulate, place, (byte < h) & (place < n), code.to(tl.float32) * step)


@triton.jit
def _operands(table, job, byte, PLANES: tl.constexpr):
    """Return where a result goes, its operands' bytes, how many elements and bytes there are, and the stream."""
    row = table + job * 7
    acc, data = tl.load(row).to(tl.pointer_type(tl.uint8)), tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    n = tl.load(row + 2)
    h = tl.cdiv(n, PLANES)
    a = tl.load(acc + byte, mask=byte < h, other=0).to(tl.int32)
    b = tl.load(data + byte, mask=byte < h, other=0).to(tl.int32)
    return acc, a, b, n, h, row + 3


@jobs_kernel
def _reduce_linear(flags, table, num_tiles, BITS: tl.constexpr, CHUNKED: tl.constexpr, TILE: tl.constexpr):
    PLANES: tl.constexpr = 8 // BITS
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    byte = first + tl.arange(0, TILE)
    acc, rest_a, rest_b, n, h, random = _operands(table, job, byte, PLANES)
    counts = tl.load(random + 3)
    ca, cb = low_float(counts), low_float(counts >> 32)
    packed = tl.zeros((TILE,), tl.int32)
    for plane in tl.static_range(PLANES):
        a, rest_a = _next_code(rest_a, BITS)
        b, rest_b = _next_code(rest_b, BITS)
        y = tl.div_rn(a.to(tl.float32) * ca + b.to(tl.float32) * cb, ca + cb)
        u = _uniform(random, plane * h + first, TILE, CHUNKED)
        code = tl.where(plane * h + byte < n, tl.floor(y + u).to(tl.int32), 0)  # an odd block's last is no code
        packed += code << (plane * BITS)
    tl.store(acc + byte, (packed & 0xFF).to(tl.uint8), mask=byte < h)


# --- exponential codes: a sign and an exponent in a byte ------------------------------------------------------------


@jobs_kernel
def _encode_exponential(
    flags,
    table,
    num_tiles,
    norms,
    LEVELS: tl.constexpr,
    SQUARED: tl.constexpr,
    CHUNKED: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    x, residual, has_residual, residual_scale, left = input_of(table, job, first, REGULAR)
    norm, good = _norm(norms, job, SQUARED)
    place = tl.arange(0, TILE)
    mask = place < left
    q = form_q(x, residual, has_residual, residual_scale, place, mask)
    u = _uniform(encode_row(table, job) + 5, first, TILE, CHUNKED)
    code = natural_code(_over(tl.abs(q), norm), u, LEVELS)
    negative = ((q < 0.0) & (code > 0)).to(tl.int32)
    leave(residual, has_residual, place, mask, q - natural_value(code, negative, norm, LEVELS))
    out = pointer_to(tl.load(encode_row(table, job) + 2) + first, tl.uint8, 4)
    tl.store(out + place, (code | (negative << 7)).to(tl.uint8), mask=mask)
    flag_non_finite(flags, job, tl.where(good, tl.max(magnitude(q), axis=0), INF_BITS))
    zero_padding(table, job, tile, num_tiles, left + first, 1024)


@jobs_kernel
def _decode_exponential(
    flags,
    table,
    num_tiles,
    norms,
    LEVELS: tl.constexpr,
    SQUARED: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    out, alpha, accumulate, left = output_of(table, job, first, REGULAR)
    norm, _ = _norm(norms, job, SQUARED)
    place = tl.arange(0, TILE)
    mask = place < left
    data = pointer_to(tl.load(decode_row(table, job)) + first, tl.uint8, 4)
    byte = tl.load(data + place, mask=mask, other=0).to(tl.int32)
    deliver(out, alpha, accumulate, place, mask, natural_value(byte & 127, byte >> 7, norm, LEVELS))


@jobs_kernel
def _reduce_exponential(flags, table, num_tiles, CHUNKED: tl.constexpr, TILE: tl.constexpr):
    job, tile = job_and_tile(num_tiles)
    first = tile.to(tl.int64) * TILE
    byte = first + tl.arange(0, TILE)
    acc, a, b, n, _, random = _operands(table, job, byte, 1)
    u = _uniform(random, first, TILE, CHUNKED)
    larger = tl.where((a & 127) >= (b & 127), a, b)
    high, low = tl.maximum(a & 127, b & 127), tl.minimum(a & 127, b & 127)
    same, apart = ((a ^ b) & 128) == 0, high - low
    few = apart - tl.where(same, 0, 1)
    moved = (u < ((127 - few) << 23).to(tl.float32, bitcast=True)).to(tl.int32)  # 2**-few; u is far above 2**-127
    total = tl.where(same, tl.minimum(high + moved, 127), tl.where(apart == 0, 0, high - moved))
    total = tl.where(low == 0, high, total)
    total = tl.where(total > 0, total | (larger & 128), 0)
    tl.store(acc + byte, total.to(tl.uint8), mask=byte < n)


# --- calls ----------------------------------------------------------------------------------------------------------


def _encode_table(jobs: Sequence[EncodeJob], nbytes: packing.PayloadNbytes) -> tuple[Table, Tensor]:
    """Return the table, and where the norms lie."""
    device = jobs[0].x.device
    table = Table.of_encode(packing.pack_encode(jobs, nbytes, device=device), device)
    return table, table.send(np.frombuffer(bytearray(pack_shared(jobs, device=device)), dtype=np.int64))


def _decode_table(jobs: Sequence[DecodeJob], nbytes: packing.PayloadNbytes) -> tuple[Table, Tensor]:
    device = jobs[0].out.device
    table = Table.of_decode(packing.pack_decode(jobs, nbytes, device=device), device)
    return table, table.send(np.frombuffer(bytearray(pack_shared(jobs, device=device)), dtype=np.int64))


def _num_tiles(table: Table, n_column: int, planes: int = 1) -> int:
    return max(1, triton.cdiv(triton.cdiv(table.most(n_column), planes), TILE))


def _regular(table: Table, planes: int, n_column: int, *address_columns: int) -> bool:
    """Return whether every plane of elements begins at an address that 16 elements' divide."""
    return table.any_bits(*address_columns) % 16 == 0 and table.any_bits(n_column) % (16 * planes) == 0


def encode_global_linear(
    jobs: Sequence[EncodeJob], *, bits: int, levels: int, squared: bool, threads: int = 1
) -> list[bool]:
    """Write codes floor(q / s + u), 8 or 4 bits each."""
    packing.check_threads(threads)
    check_global_linear(bits, levels)
    packing.check_keys(jobs)
    if not jobs:
        return []
    table, norms = _encode_table(jobs, global_linear_nbytes(bits))
    planes = 8 // bits
    settings = {
        **{"BITS": bits, "LEVELS": levels, "SQUARED": squared, "CHUNKED": chunked_planes(table, planes)},
        **{"REGULAR": _regular(table, planes, ENCODE_N, X, RESIDUAL), "TILE": TILE},
    }
    table.launch(_encode_linear, _num_tiles(table, ENCODE_N, planes), max_scale(levels), norms, **settings)
    return table.finite()


def decode_global_linear(jobs: Sequence[DecodeJob], *, bits: int, levels: int, squared: bool, threads: int = 1) -> None:
    """Set value = code * s."""
    packing.check_threads(threads)
    check_global_linear(bits, levels)
    if not jobs:
        return
    table, norms = _decode_table(jobs, global_linear_nbytes(bits))
    planes = 8 // bits
    settings = {
        **{"BITS": bits, "LEVELS": levels, "SQUARED": squared},
        **{"REGULAR": _regular(table, planes, DECODE_N, DECODE_OUT), "TILE": TILE},
    }
    table.launch(_decode_linear, _num_tiles(table, DECODE_N, planes), max_scale(levels), norms, **settings)


def reduce_global_linear(jobs: Sequence[ReduceJob], *, bits: int, threads: int = 1) -> None:
    """Set acc to the weighted mean of the codes, rounded by chance."""
    packing.check_threads(threads)
    check_global_linear(bits, 1)
    if not jobs:
        return
    device = jobs[0].acc.device
    table = Table.of_reduce(pack_reduce(jobs, global_linear_nbytes(bits), device), device)
    by_chunks = chunked_planes(table, 8 // bits, REDUCE_N, REDUCE_OFFSET)
    num_tiles = _num_tiles(table, REDUCE_N, 8 // bits)
    table.launch(_reduce_linear, num_tiles, BITS=bits, CHUNKED=by_chunks, TILE=TILE)


def encode_global_exponential(jobs: Sequence[EncodeJob], *, levels: int, squared: bool, threads: int = 1) -> list[bool]:
    """Write a sign and an exponent a value."""
    packing.check_threads(threads)
    check_global_exponential(levels)
    packing.check_keys(jobs)
    if not jobs:
        return []
    table, norms = _encode_table(jobs, global_exponential_nbytes)
    settings = {
        **{"LEVELS": levels, "SQUARED": squared, "CHUNKED": chunked_planes(table, 1)},
        **{"REGULAR": _regular(table, 1, ENCODE_N, X, RESIDUAL), "TILE": TILE},
    }
    table.launch(_encode_exponential, _num_tiles(table, ENCODE_N), norms, **settings)
    return table.finite()


def decode_global_exponential(jobs: Sequence[DecodeJob], *, levels: int, squared: bool, threads: int = 1) -> None:
    """Set value = 2**(c - levels) * M."""
    packing.check_threads(threads)
    check_global_exponential(levels)
    if not jobs:
        return
    table, norms = _decode_table(jobs, global_exponential_nbytes)
    settings = {"LEVELS": levels, "SQUARED": squared, "REGULAR": _regular(table, 1, DECODE_N, DECODE_OUT), "TILE": TILE}
    table.launch(_decode_exponential, _num_tiles(table, DECODE_N), norms, **settings)


def reduce_global_exponential(jobs: Sequence[ReduceJob], *, threads: int = 1) -> None:
    """Set acc to the sum, rounded by chance to a power of two."""
    packing.check_threads(threads)
    if not jobs:
        return
    device = jobs[0].acc.device
    table = Table.of_reduce(pack_reduce(jobs, global_exponential_nbytes, device), device)
    by_chunks = chunked_planes(table, 1, REDUCE_N, REDUCE_OFFSET)
    table.launch(_reduce_exponential, _num_tiles(table, REDUCE_N), CHUNKED=by_chunks, TILE=TILE)
