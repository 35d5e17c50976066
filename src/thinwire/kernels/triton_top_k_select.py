"""Which k elements top-k sends, found by one program a partition; reference_top_k.py defines the selections.

Selections rank elements by a number each: exact by the magnitude, bisect by its upper 16 bits, sampled by which of two
bounds it reaches. Steps of four bits find the k-th largest number (`_digit_counts`, `_next_digit`); a last pass keeps
what lies above it, and of those that equal it the first, or some spread evenly.

For exact selection and bisection, a sample first gives a bound that a little more than k elements reach, and one pass
collects those, in order (`narrow`). Where the bound turns out wrong, or k is large, all elements are candidates. No
byte depends on that sample.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton_elements import (
    encode_row,
    flag_non_finite,
    floats_at,
    form_q,
    input_of,
    job_and_tile,
    leave,
    magnitude,
    only_if,
    zero_padding,
)
from thinwire.kernels.triton_launch import jobs_kernel
from thinwire.kernels.triton_top_k_places import END, INDICES, VALUES, place_word
from thinwire.kernels.triton_values import store_values

SAMPLES = tl.constexpr(1024)


@triton.jit
def _digit_counts(bits, mask, found, step):
    """Count the digits of step `step`, four bits from the top, of the magnitudes that share all digits before."""
    same = 0x7FFFFFFF >> tl.maximum(4 * step - 1, 0)  # a magnitude that differs from `found` by at most this
    return tl.histogram(tl.where(mask & ((bits ^ found) <= same), (bits >> (28 - 4 * step)) & 15, 16), 32)


@triton.jit
def _next_digit(counts, found, rank, step):
    """Add a digit to `found`, so that it grows to the rank-th largest magnitude; take from `rank` what lies above.

    Returns them, and how many have that digit.
    """
    digits = tl.arange(0, 32)
    counts = tl.where(digits < 16, counts, 0)  # 16: others
    reach = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts  # how many have this digit or a higher one
    digit = tl.sum(((reach >= rank) & (digits < 16)).to(tl.int32), axis=0) - 1
    rank -= tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    # At rank 0 the digit is 15 everywhere: nothing lies above that.
    found |= (digit << (28 - 4 * step)) & 0x7FFFFFFF
    return found, rank, tl.sum(tl.where(digits == digit, counts, 0), axis=0)


@jobs_kernel
def narrow(flags, table, num_tiles, candidates, found, room, REGULAR: tl.constexpr, TILE: tl.constexpr):
    """Leave q where the residual was. Collect indices, ascending, of at least k elements that hold the k largest.

    How many they are is left in `found`, 0 where all elements are candidates.
    """
    job, _ = job_and_tile(num_tiles)
    x, residual, has_residual, scale, left = input_of(table, job, 0, REGULAR)
    n = left.to(tl.int32)
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)

    expected = k * 1.0 * SAMPLES / tl.maximum(n, 1)
    rank = (expected + 3.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
    sampled = (n >= 4 * SAMPLES) & (rank <= SAMPLES // 4)
    bound = tl.zeros((), tl.int32)
    if sampled:
        # 2**32 / golden ratio: spread evenly, in step with no row length.
        spread = (tl.arange(0, SAMPLES).to(tl.uint32) * 2654435769).to(tl.uint64)
        place = ((spread * n.to(tl.uint64)) >> 32).to(tl.int32)
        bits = magnitude(form_q(x, residual, has_residual, scale, place, place < n))
        for step in range(0, 4):  # fifteen bits: a little lower than the exact bound
            bound, rank, _ = _next_digit(_digit_counts(bits, place < n, bound, step), bound, rank, step)

    candidates += job.to(tl.int64) * room
    count = tl.zeros((), tl.int32)
    peak = tl.zeros((), tl.int32)
    for start in range(0, n, TILE):
        place = start + tl.arange(0, TILE)
        mask = place < n
        q = form_q(x, residual, has_residual, scale, place, mask)
        leave(residual, has_residual, place, mask, q)
        bits = magnitude(q)
        peak = tl.maximum(peak, tl.max(bits, axis=0))
        if sampled:
            reach = mask & (bits >= bound)
            one = reach.to(tl.int32)
            to = count + tl.cumsum(one, axis=0) - one
            tl.store(candidates + to, place.to(tl.uint16), mask=reach & (to < room))
            count += tl.sum(one, axis=0)
    good = (count >= k) & (count <= room)
    tl.store(found + 2 * job, tl.where(good, count, 0))
    flag_non_finite(flags, job, peak)


@jobs_kernel
def bounds(flags, table, num_tiles, found, REGULAR: tl.constexpr, TILE: tl.constexpr):
    """Leave q where the residual was; leave the bounds of sampled selection in `found`, -1 where it is exact."""
    job, _ = job_and_tile(num_tiles)
    x, residual, has_residual, scale, left = input_of(table, job, 0, REGULAR)
    n = left.to(tl.int32)
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)

    num_samples = tl.maximum(SAMPLES, tl.cdiv(64 * n, tl.maximum(k, 1)))
    sampled = num_samples < n
    expected = k * num_samples // tl.maximum(n, 1)
    spread = tl.sqrt_rn((4 * expected).to(tl.float32)).to(tl.int32)
    upper_rank, lower_rank = expected - spread, tl.minimum(num_samples, expected + spread)
    upper, lower = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if sampled:
        for step in range(0, 8):
            upper_counts, lower_counts = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
            for start in range(0, num_samples, TILE):
                i = start + tl.arange(0, TILE)
                spread_place = ((i + 1).to(tl.uint32) * 2654435769).to(tl.uint64)  # 2**32 / golden ratio
                sample = ((spread_place * n.to(tl.uint64)) >> 32).to(tl.int32)
                bits = magnitude(form_q(x, residual, has_residual, scale, sample, i < num_samples))
                upper_counts += _digit_counts(bits, i < num_samples, upper, step)
                lower_counts += _digit_counts(bits, i < num_samples, lower, step)
            upper, upper_rank, _ = _next_digit(upper_counts, upper, upper_rank, step)
            lower, lower_rank, _ = _next_digit(lower_counts, lower, lower_rank, step)
    tl.store(found + 2 * job, tl.where(sampled, upper, -1))
    tl.store(found + 2 * job + 1, tl.where(sampled, lower, -1))

    peak = tl.zeros((), tl.int32)
    for start in range(0, n, TILE):
        place = start + tl.arange(0, TILE)
        q = form_q(x, residual, has_residual, scale, place, place < n)
        leave(residual, has_residual, place, place < n, q)
        peak = tl.maximum(peak, tl.max(magnitude(q), axis=0))
    flag_non_finite(flags, job, peak)


@triton.jit
def _candidates(candidates, narrowed, count, start, TILE: tl.constexpr):
    """Return where a tile of the candidates lies in the partition, and their mask."""
    i = start + tl.arange(0, TILE)
    mask = i < count
    listed = only_if(mask, narrowed)
    return tl.where(listed, tl.load(candidates + i, mask=listed, other=0).to(tl.int32), i), mask


@triton.jit
def _number(bits, upper, lower, SELECTION: tl.constexpr):
    """Return what elements are ranked by."""
    if SELECTION == "bisect":
        number = bits >> 15
    elif SELECTION == "sampled":
        number = tl.where(upper < 0, bits, (bits >= upper).to(tl.int32) + (bits >= lower).to(tl.int32))
    else:
        number = bits
    return number


@triton.jit
def _num_kept(count, ties, num_equal, upper, SELECTION: tl.constexpr):
    """Return how many are kept of the first `count` of those that equal the k-th largest: `ties` of them all."""
    first = tl.minimum(count, ties)
    if SELECTION != "exact":
        evenly = count.to(tl.int64) * ties // tl.maximum(num_equal, 1)
        first = tl.where(upper < 0, first, evenly.to(tl.int32))
    return first


@jobs_kernel
def select(
    flags,
    table,
    num_tiles,
    places,
    found,
    candidates,
    room,
    SELECTION: tl.constexpr,
    NUMBER: tl.constexpr,
    NBYTES: tl.constexpr,
    REGULAR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the values and the indices; take what was sent out of the residual."""
    job, tile = job_and_tile(num_tiles)
    _, residual, has_residual, _, left = input_of(table, job, 0, REGULAR)
    x = tl.load(encode_row(table, job))
    source = floats_at(tl.where(has_residual != 0, has_residual, x), REGULAR)  # where q lies
    k = (tl.load(encode_row(table, job) + 8) >> 32).to(tl.int32)
    narrowed = tl.zeros((), tl.int32)
    upper, lower, first_step = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if SELECTION == "sampled":
        upper, lower = tl.load(found + 2 * job), tl.load(found + 2 * job + 1)
        first_step = tl.where(upper < 0, 0, 7)  # a class is one digit
    else:
        narrowed = tl.load(found + 2 * job)
        candidates += job.to(tl.int64) * room
    if SELECTION == "bisect":
        first_step += 4  # 16 bits are four
    count = tl.where(narrowed > 0, narrowed, left.to(tl.int32))

    kth, num_equal = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    ties = k  # how many to keep of those that share the digits of `kth` so far
    for step in range(first_step, 8):
        counts = tl.zeros((32,), tl.int32)
        for start in range(0, count, TILE):
            place, mask = _candidates(candidates, narrowed, count, start, TILE)
            bits = magnitude(tl.load(source + place, mask=mask, other=0.0))
            counts += _digit_counts(_number(bits, upper, lower, SELECTION), mask, kth, step)
        kth, ties, num_equal = _next_digit(counts, kth, ties, step)

    values, indices = place_word(places, job, VALUES), place_word(places, job, INDICES)
    indices = indices.to(tl.pointer_type(tl.int16))
    num_above, num_equal_before = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    peak = tl.zeros((), tl.int32)
    for start in range(0, count, TILE):
        place, mask = _candidates(candidates, narrowed, count, start, TILE)
        q = tl.load(source + place, mask=mask, other=0.0)
        number = _number(magnitude(q), upper, lower, SELECTION)
        above, equal = mask & (number > kth), mask & (number == kth)
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)  # two counts in one sum; neither reaches 2**16
        before = tl.cumsum(both, axis=0) - both
        equal_before = num_equal_before + (before >> 16)
        kept_before = _num_kept(equal_before, ties, num_equal, upper, SELECTION)
        keep = above | (equal & (_num_kept(equal_before + 1, ties, num_equal, upper, SELECTION) > kept_before))
        to = num_above + (before & 0xFFFF) + kept_before
        sent = store_values(values, to, keep, q, NUMBER, NBYTES)
        if NUMBER != "float32":
            peak = tl.maximum(peak, tl.max(tl.where(keep, magnitude(sent), 0), axis=0))
        tl.store(indices + to, place.to(tl.int16), mask=keep)
        leave(residual, has_residual, place, keep, q - sent)
        total = tl.sum(both, axis=0)
        num_above += total & 0xFFFF
        num_equal_before += total >> 16
    flag_non_finite(flags, job, peak)
    zero_padding(table, job, tile, num_tiles, place_word(places, job, END), 1024)
