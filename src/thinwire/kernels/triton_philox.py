"""The uniforms of random.py, drawn where they are needed."""

import triton
import triton.language as tl

from thinwire.kernels.triton_launch import ENCODE_N, OFFSET, Table


@triton.jit
def uniform(key, steps, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the uniforms of random.py for WIDTH elements from each of `first` on, indices in the parameter.

    `CHUNKED`: rows begin and end with chunks of 128 elements, so that a counter is worked out once for the eight
    elements that share it; else once for each.
    """
    step, stream = steps.to(tl.uint32), (steps >> 32).to(tl.uint32)
    if CHUNKED:
        counter = (first >> 3) + tl.arange(0, WIDTH // 8)[None, :]
        w0, w1, w2, w3 = tl.philox(key, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), step, stream)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., i, j]: word 2 * i + j
        halves = tl.join(words & 0xFFFF, words >> 16).to(tl.uint16)  # [..., i, j, h]: elements 16 * (4 i + 2 j + h) on
        halves = tl.permute(tl.reshape(halves, (ROWS, WIDTH // 128, 16, 8)), (0, 1, 3, 2))
        bits = tl.reshape(halves, (ROWS, WIDTH)).to(tl.int32)
    else:
        index = first + tl.arange(0, WIDTH)[None, :]
        counter = (index >> 7) * 16 + (index & 15)
        w0, w1, w2, w3 = tl.philox(key, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), step, stream)
        e = (index & 127).to(tl.uint32)
        word = tl.where(e < 64, tl.where(e < 32, w0, w1), tl.where(e < 96, w2, w3))
        bits = ((word >> (e & 16)) & 0xFFFF).to(tl.int32)
    return (bits.to(tl.float32) + 0.5) * 0.0000152587890625  # 2**-16


def chunked_planes(table: Table, planes: int, n: int = ENCODE_N, offset: int = OFFSET) -> bool:
    """Return whether each of so many equal parts of every partition begins with a chunk of random numbers.

    `n` and `offset` are columns of the table.
    """
    return table.any_bits(offset) % 128 == 0 and (planes == 1 or table.any_bits(n) % (128 * planes) == 0)
