"""The forms that top-k's indices take on the wire, made from 16-bit ones and read into them.

Readers set the first flag, which stands for the whole call, where counts or set bits are not k.
"""

import triton
import triton.language as tl

from thinwire.kernels.top_k_layout import CHUNK as _CHUNK
from thinwire.kernels.triton_elements import decode_row, encode_row, job_and_tile, only_if
from thinwire.kernels.triton_launch import jobs_kernel
from thinwire.kernels.triton_top_k_places import BITMAP, COUNTS, INDICES, PACKED, place_word

CHUNK = tl.constexpr(_CHUNK)


@triton.jit
def _pointer(places, job, WHICH: tl.constexpr, DTYPE: tl.constexpr):
    return place_word(places, job, WHICH).to(tl.pointer_type(DTYPE))


@jobs_kernel
def write_packed(flags, table, num_tiles, places, TILE: tl.constexpr):
    """Write 12 bits each, two in three bytes."""
    job, tile = job_and_tile(num_tiles)
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)
    pair = tile * TILE + tl.arange(0, TILE)
    wanted = only_if(2 * pair < k, place_word(places, job, PACKED))
    indices = _pointer(places, job, INDICES, tl.uint16)
    low = tl.load(indices + 2 * pair, mask=wanted, other=0).to(tl.int32) % CHUNK
    high = tl.load(indices + 2 * pair + 1, mask=wanted & (2 * pair + 1 < k), other=0).to(tl.int32) % CHUNK
    packed = _pointer(places, job, PACKED, tl.uint8) + 3 * pair
    tl.store(packed, (low & 0xFF).to(tl.uint8), mask=wanted)
    tl.store(packed + 1, ((low >> 8) | ((high & 15) << 4)).to(tl.uint8), mask=wanted)
    tl.store(packed + 2, (high >> 4).to(tl.uint8), mask=wanted & (2 * pair + 1 < k))


@jobs_kernel
def write_counts(flags, table, num_tiles, places, TILE: tl.constexpr):
    """Write how many indices each chunk has."""
    job, _ = job_and_tile(num_tiles)
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)
    num_chunks = tl.cdiv(tl.load(encode_row(table, job) + 3), CHUNK)
    indices = _pointer(places, job, INDICES, tl.uint16)
    counts = tl.zeros((32,), tl.int32)
    for start in range(0, k, TILE):
        place = start + tl.arange(0, TILE)
        index = tl.load(indices + place, mask=place < k, other=0).to(tl.int32)
        counts += tl.histogram(tl.where(place < k, index // CHUNK, 31), 32)
    chunk = tl.arange(0, 32)
    out = _pointer(places, job, COUNTS, tl.uint16)
    tl.store(out + chunk, counts.to(tl.uint16), mask=only_if(chunk < num_chunks, place_word(places, job, COUNTS)))


@jobs_kernel
def mark(flags, table, num_tiles, places, marks, room, TILE: tl.constexpr):
    """Set a byte of `marks` for every index of a job with a bitmap."""
    job, tile = job_and_tile(num_tiles)
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)
    place = tile * TILE + tl.arange(0, TILE)
    wanted = only_if(place < k, place_word(places, job, BITMAP))
    index = tl.load(_pointer(places, job, INDICES, tl.uint16) + place, mask=wanted, other=0).to(tl.int32)
    tl.store(marks + job.to(tl.int64) * room + index, tl.full((TILE,), 1, tl.uint8), mask=wanted)


@jobs_kernel
def write_bitmap(flags, table, num_tiles, places, marks, room, TILE: tl.constexpr):
    """Write a bit for each element, the least of a byte first."""
    job, tile = job_and_tile(num_tiles)
    n = tl.load(encode_row(table, job) + 3)
    byte = tile * TILE + tl.arange(0, TILE)
    packed = tl.zeros((TILE,), tl.int32)
    for bit in tl.static_range(8):
        place = 8 * byte + bit
        packed |= tl.load(marks + job.to(tl.int64) * room + place, mask=place < n, other=0).to(tl.int32) << bit
    wanted = only_if(8 * byte < n, place_word(places, job, BITMAP))
    tl.store(_pointer(places, job, BITMAP, tl.uint8) + byte, packed.to(tl.uint8), mask=wanted)


@jobs_kernel
def read_packed(flags, table, num_tiles, places, TILE: tl.constexpr):
    """Leave 16-bit indices of packed ones, of which counts may say to what chunk each belongs."""
    job, tile = job_and_tile(num_tiles)
    k = (tl.load(decode_row(table, job) + 4) & 0xFFFFFFFF).to(tl.int32)
    num_chunks = tl.cdiv(tl.load(decode_row(table, job) + 2), CHUNK)
    place = tile * TILE + tl.arange(0, TILE)
    wanted = only_if(place < k, place_word(places, job, PACKED))
    packed = _pointer(places, job, PACKED, tl.uint8) + place // 2 * 3 + place % 2
    word = tl.load(packed, mask=wanted, other=0).to(tl.int32)
    word |= tl.load(packed + 1, mask=wanted, other=0).to(tl.int32) << 8
    index = tl.where(place % 2 == 0, word & 0xFFF, word >> 4)
    has_counts = place_word(places, job, COUNTS)
    counts = _pointer(places, job, COUNTS, tl.uint16)
    total = tl.zeros((), tl.int32)
    for chunk in range(0, tl.where(has_counts != 0, num_chunks, 0).to(tl.int32)):
        total += tl.load(counts + chunk).to(tl.int32)
        index += tl.where(place >= total, CHUNK, 0)
    tl.store(flags, 1, mask=(has_counts != 0) & (total != k))
    tl.store(_pointer(places, job, INDICES, tl.uint16) + place, index.to(tl.uint16), mask=wanted)


@jobs_kernel
def read_bitmap(flags, table, num_tiles, places, TILE: tl.constexpr):
    """Leave 16-bit indices of the bits that are set."""
    job, _ = job_and_tile(num_tiles)
    k = (tl.load(decode_row(table, job) + 4) & 0xFFFFFFFF).to(tl.int32)
    has_bitmap = place_word(places, job, BITMAP)
    nbytes = tl.where(has_bitmap != 0, tl.cdiv(tl.load(decode_row(table, job) + 2), 8), 0).to(tl.int32)
    bitmap, indices = _pointer(places, job, BITMAP, tl.uint8), _pointer(places, job, INDICES, tl.uint16)
    count = tl.zeros((), tl.int32)
    for start in range(0, 8 * nbytes, TILE):
        place = start + tl.arange(0, TILE)
        byte = tl.load(bitmap + place // 8, mask=place < 8 * nbytes, other=0).to(tl.int32)
        one = (byte >> (place % 8)) & 1
        to = count + tl.cumsum(one, axis=0) - one
        tl.store(indices + to, place.to(tl.uint16), mask=(one != 0) & (to < k))
        count += tl.sum(one, axis=0)
    tl.store(flags, 1, mask=(has_bitmap != 0) & (count != k))
