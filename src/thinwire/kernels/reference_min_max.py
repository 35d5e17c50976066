"""Min-max quantisation in plain torch, the specification: codes count steps between the ends of a block's range."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.codes import blocks_nbytes, pack, unpack
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import FLOAT32_MAX, deliver, finish, in_blocks, scale_of, with_residual
from thinwire.random import uniform

BAGUA_EPSILON = 1e-7  # what BAGUA adds to the range
_BAGUA_OFFSET = 2.0**16  # steps from 0 up to which float32 still tells a step's fractions apart


def _ordered(bits: Tensor) -> Tensor:
    """Turn the bits of floats into integers that order as the floats do, -0 below 0; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _range_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    order = _ordered(rows.view(torch.int32))
    lo, hi = order.amin(dim=1, keepdim=True), order.amax(dim=1, keepdim=True)
    return _ordered(lo).view(torch.float32), _ordered(hi).view(torch.float32)


def _at_least_0(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)


@dataclass
class _Affine:
    """Steps of (hi - lo) / N from lo on; lo and hi, (rows, 1), are sent as they are."""

    lo: Tensor
    hi: Tensor
    levels: int  # N

    def __post_init__(self) -> None:
        width = _at_least_0(self.hi - self.lo)  # foreign bytes may say otherwise
        tiny = (width > 0) & (width < 2.0**-100)  # N / width might overflow
        self.factor = torch.where(torch.isinf(width), 0.5, torch.where(tiny, 2.0**100, 1.0))
        self.base = self.lo * self.factor
        width = _at_least_0(self.hi * self.factor - self.base)
        self.step = scale_of(width, self.levels)
        # A number over a tensor would be a product with its reciprocal.
        self.scale = torch.where(width > 0, torch.full_like(width, self.levels) / width, 0.0)

    def codes(self, rows: Tensor, u: Tensor | None) -> Tensor:
        y = (rows * self.factor - self.base) * self.scale
        return (torch.round(y) if u is None else torch.floor(y + u)).clamp(max=self.levels)

    def values(self, codes: Tensor) -> Tensor:
        values = (codes * self.step + self.base) * (1 / self.factor)
        return torch.where(values < self.hi, values, self.hi)


@dataclass
class _Bagua:
    """Steps of (hi - lo + 1e-7) / N, counted from 0; from lo where they would be too many, and where hi = lo."""

    lo: Tensor
    hi: Tensor
    levels: int

    def __post_init__(self) -> None:
        wide = self.hi.to(torch.float64) - self.lo.to(torch.float64) + BAGUA_EPSILON
        self.scale = (torch.full_like(wide, self.levels) / wide).to(torch.float32)
        self.step = (wide / self.levels).to(torch.float32)
        peak = torch.maximum(self.lo.abs(), self.hi.abs())
        near = (peak * self.scale < _BAGUA_OFFSET) & (self.lo != self.hi)
        self.base = torch.where(near, 0.0, self.lo)
        self.last = torch.where(near, torch.round(self.hi * self.scale), float(self.levels))
        self.first = self.last - self.levels

    def codes(self, rows: Tensor, u: Tensor | None) -> Tensor:
        y = torch.round((rows - self.base) * self.scale)
        return torch.maximum(torch.minimum(y, self.last), self.first) - self.first

    def values(self, codes: Tensor) -> Tensor:
        return ((codes + self.first) * self.step + self.base).clamp(-FLOAT32_MAX, FLOAT32_MAX)


def encode_min_max(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, bagua: bool, stochastic: bool, threads: int = 1
) -> list[bool]:
    """Write float32 lo, hi for every block (`block` = 0: the whole partition), then the codes, packed block by block.

    lo and hi are the least and the largest q of the block, -0 below 0, and N = 2**bits - 1. Affine: with
    a = N / (hi - lo), 0 where hi = lo, codes are (q - lo) * a rounded to nearest even, or its floor with u added, at
    most N; with s = (hi - lo) / N, moved as in block quantisation, the value is lo + code * s, at most hi. Where
    hi - lo overflows, or is below 2**-100 and not 0, q, lo and hi are first multiplied by 1/2 or 2**100, and the value,
    before it is compared with hi, is divided by that.

    BAGUA: with a = N / (hi - lo + 1e-7) and s its inverse, both computed in float64 and rounded, last = round(hi * a)
    and first = last - N, codes are round(q * a), clamped to [first, last], less first; the value is (code + first) * s,
    at most the largest float32. Where max(|lo|, |hi|) * a reaches 2**16, or lo = hi: first = 0, and lo is taken off q
    and added to the value.

    A residual that overflows, as a step of twice the largest float32 may leave, counts as not finite.
    """
    grid_of = _Bagua if bagua else _Affine
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        n, rows = q.numel(), in_blocks(q, block)
        rows.view(-1)[n:] = q[-1:]  # padding must not widen the range
        u = None
        if stochastic:
            assert job.key is not None, "stochastic rounding needs a key"
            u = in_blocks(uniform(job.key, n, q.device), block)
        lo, hi = _range_of(rows)
        grid = grid_of(lo, hi, 2**bits - 1)
        codes = grid.codes(rows, u).nan_to_num(0.0).to(torch.uint8)
        num_ranges = 8 * len(rows)
        job.out[:num_ranges].view(torch.float32).copy_(torch.cat([lo, hi], dim=1).view(-1))
        packed = pack(codes.view(-1)[:n], bits, rows.shape[1])
        job.out[num_ranges : num_ranges + packed.numel()] = packed
        job.out[num_ranges + packed.numel() :].zero_()
        fits = finish(job, q, grid.values(codes.to(torch.float32)).view(-1)[:n])
        finite.append(fits and (job.residual is None or bool(torch.isfinite(job.residual).all())))
    return finite


def decode_min_max(jobs: Sequence[DecodeJob], *, bits: int, block: int, bagua: bool, threads: int = 1) -> None:
    """Set each value from its code and the range of its block."""
    grid_of = _Bagua if bagua else _Affine
    for job in jobs:
        n = job.out.numel()
        width = block or max(n, 1)
        num_blocks = -(-n // width)
        ranges = job.data[: 8 * num_blocks].view(torch.float32).view(num_blocks, 2)
        packed = job.data[8 * num_blocks :][: blocks_nbytes(n, bits, width)]
        codes = in_blocks(unpack(packed, n, bits, width).to(torch.float32), block)
        deliver(job, grid_of(ranges[:, :1], ranges[:, 1:], 2**bits - 1).values(codes).view(-1)[:n])
