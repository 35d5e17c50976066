"""Steps that several Triton kernels share: reading a job, forming q, telling finite from not, delivering a value."""

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def job_and_tile(num_tiles):
    """Return which job this program works on, and on which of its tiles."""
    program = tl.program_id(0)
    return program // num_tiles, program % num_tiles


@triton.jit
def encode_row(table, job):
    """Return where a job's words lie.

    They are: x, residual, out, n, out_nbytes, key, offset, step and stream, residual_scale and num_kept.
    """
    return table + job * 9


@triton.jit
def decode_row(table, job):
    """Return where a job's words lie: data, out, n, alpha and accumulate, num_kept."""
    return table + job * 5


@triton.jit
def low_float(word):
    """Return the float32 in the low half of a word."""
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def pointer_to(address, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Return the address as a pointer. The host has seen to it that ALIGN divides it, so ALIGN bytes may move at once.

    Such a promise only holds where it is given in the function that makes the value.
    """
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGN)


@triton.jit
def floats_at(address, REGULAR: tl.constexpr):
    """Return the address as a pointer to float32; `REGULAR`: 16 divides it."""
    return pointer_to(address, tl.float32, 16 if REGULAR else 4)


@triton.jit
def left_from(n_word, first, REGULAR: tl.constexpr):
    """Return how many elements there are from `first` on, negative beyond the end; `REGULAR`: 16 divides them all."""
    n = tl.load(n_word)
    if REGULAR:
        n = tl.multiple_of(n, 16)
    return n - first


@triton.jit
def only_if(mask, word):
    """Return the mask where `word` is not 0, and nothing where it is."""
    return mask & (tl.broadcast_to(word, mask.shape) != 0)


@triton.jit
def input_of(table, job, first, REGULAR: tl.constexpr):
    """Return what `form_q` takes, from element `first` on, and how many elements there are from there on."""
    row = encode_row(table, job)
    x = floats_at(tl.load(row) + 4 * first, REGULAR)
    has_residual = tl.load(row + 1)  # its address: 0 where there is none
    residual = floats_at(has_residual + 4 * first, REGULAR)
    left = left_from(row + 3, first, REGULAR)
    return x, residual, has_residual, low_float(tl.load(row + 8)), left


@triton.jit
def form_q(x, residual, has_residual, scale, place, mask):
    """Return q = x + scale * residual, in two roundings."""
    value = tl.load(x + place, mask=mask, other=0.0)
    kept_mask = only_if(mask, has_residual)
    kept = tl.load(residual + place, mask=kept_mask, other=0.0)
    return tl.where(kept_mask, value + kept * scale, value)


@triton.jit
def leave(residual, has_residual, place, mask, value):
    """Store what was not sent."""
    tl.store(residual + place, value, mask=only_if(mask, has_residual))


@triton.jit
def magnitude(value):
    """Return the bits of |value|. They order as |value| does, with infinities and then NaNs on top."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def flag_non_finite(flags, job, peak):
    """Set the job's flag where the magnitude `peak` is none of a finite number."""
    tl.store(flags + job, 1, mask=peak >= INF_BITS)


@triton.jit
def zero_padding(table, job, tile, num_tiles, used, TILE: tl.constexpr):
    """Zero the bytes of `out` from `used` on; the tiles share them."""
    row = encode_row(table, job)
    out = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    nbytes = tl.load(row + 4)
    for start in range(used + tile.to(tl.int64) * TILE, nbytes, num_tiles.to(tl.int64) * TILE):
        place = start + tl.arange(0, TILE)
        tl.store(out + place, 0, mask=place < nbytes)


@triton.jit
def output_of(table, job, first, REGULAR: tl.constexpr):
    """Return what `deliver` takes, from element `first` on, and how many elements there are from there on."""
    row = decode_row(table, job)
    out = floats_at(tl.load(row + 1) + 4 * first, REGULAR)
    left = left_from(row + 2, first, REGULAR)
    word = tl.load(row + 3)
    return out, low_float(word), word >> 32, left


@triton.jit
def deliver(out, alpha, accumulate, place, mask, value):
    """Set out = value, or out += alpha * value in two roundings."""
    add = only_if(mask, accumulate)
    before = tl.load(out + place, mask=add, other=0.0)
    tl.store(out + place, tl.where(add, before + value * alpha, value), mask=mask)
