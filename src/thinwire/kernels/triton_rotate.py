"""Rotations: fast Walsh-Hadamard transforms of groups of ROTATION values, with the sums of reference_rotate.py."""

import triton
import triton.language as tl

from thinwire.kernels.reference_steps import FLOAT32_MAX

LARGEST = tl.constexpr(FLOAT32_MAX)


@triton.jit
def _butterflies(values, SIZE: tl.constexpr, ROTATION: tl.constexpr):
    """Return H times each group: pairs 1 apart become sum and difference, then pairs 2 apart, 4 apart, ..."""
    shape: tl.constexpr = values.shape
    for level in tl.static_range(7):
        if (1 << level) < ROTATION:
            pairs = tl.reshape(values, (SIZE >> (level + 1), 2, 1 << level))
            a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
            values = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), shape)
    return values


@triton.jit
def _whole(place, end, ROTATION: tl.constexpr):
    """Tell elements of whole groups from the rest behind them. Groups are counted from place 0."""
    return (place // ROTATION + 1) * ROTATION <= end


@triton.jit
def rotate(values, place, end, SIZE: tl.constexpr, ROTATION: tl.constexpr):
    """Return the rotated values; `place` are those of whole groups, but that what is from `end` on is 0."""
    groups = _butterflies(values * (1.0 / ROTATION), SIZE, ROTATION)
    rest = values * (0.1767766952966369 if ROTATION == 32 else 0.08838834764831845)  # 2**(-k / 2)
    return tl.where(_whole(place, end, ROTATION), groups, rest)


@triton.jit
def unrotate(values, place, end, SIZE: tl.constexpr, ROTATION: tl.constexpr):
    """Return the inverse, at most the largest float32."""
    groups = _butterflies(values * (1.0 / ROTATION), SIZE, ROTATION) * (ROTATION * 1.0)
    rest = values * (5.656854249492381 if ROTATION == 32 else 11.313708498984761)  # 2**(k / 2)
    value = tl.where(_whole(place, end, ROTATION), groups, rest)
    return tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
