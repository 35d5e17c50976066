"""Dithering in plain torch, the specification: values rounded by chance to levels that a scale sets."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.codes import blocks_nbytes, pack, unpack
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import (
    FLOAT32_MAX,
    deliver,
    finish,
    in_blocks,
    scale_of,
    sqrt,
    tree_sum,
    with_residual,
)
from thinwire.random import uniform


def _linear_codes(rows: Tensor, step: Tensor, u: Tensor, levels: int) -> Tensor:
    """Return floor(q / step + u), clamped, in two's complement."""
    y = torch.where(step > 0, rows / step, torch.zeros_like(rows))
    codes = torch.floor(y + u).clamp(-levels, levels).nan_to_num(0.0)
    return codes.to(torch.int8).view(torch.uint8)


def _linear_values(codes: Tensor, step: Tensor, bits: int) -> Tensor:
    sign = 2 ** (bits - 1)
    signed = ((codes.to(torch.int16) & (2 * sign - 1)) ^ sign) - sign
    return signed.to(torch.float32) * step


def natural_codes(rows: Tensor, scale: Tensor, u: Tensor, levels: int, sign: int) -> Tensor:
    """Return c, plus `sign` where negative: |q| / scale becomes 2^(c - levels), or 0 where c = 0.

    A random fraction added to the bits of a float carries into its exponent with the probability of its mantissa.
    """
    y = torch.where(scale > 0, rows.abs() / scale, torch.zeros_like(rows))
    carried = (y.view(torch.int32) + (u * 2.0**23).to(torch.int32)) >> 23
    lowest = torch.floor(y * 2.0 ** (levels - 1) + u)  # below the lowest level: it, or 0
    codes = torch.where(y < 2.0 ** (1 - levels), lowest.nan_to_num(0.0).to(torch.int32), carried - 127 + levels)
    codes = codes.clamp(0, levels)
    return torch.where((codes > 0) & (rows < 0), codes + sign, codes).to(torch.uint8)


def natural_values(codes: Tensor, scale: Tensor, levels: int, sign: int) -> Tensor:
    """Return what `natural_codes` stand for; also codes above `levels`, which sums have."""
    exponent = (codes & (sign - 1)).to(torch.int32)
    level = torch.where(exponent > 0, (exponent + (127 - levels)) << 23, 0).view(torch.float32)
    value = level * scale
    return torch.where(codes & sign > 0, -value, value)


def _codes(rows: Tensor, scale: Tensor, u: Tensor, levels: int, natural: bool) -> Tensor:
    return natural_codes(rows, scale, u, levels, levels + 1) if natural else _linear_codes(rows, scale, u, levels)


def _values(codes: Tensor, scale: Tensor, bits: int, natural: bool) -> Tensor:
    half = 2 ** (bits - 1)
    return natural_values(codes, scale, half - 1, half) if natural else _linear_values(codes, scale, bits)


def encode_dither(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, natural: bool, l2: bool, threads: int = 1
) -> list[bool]:
    """Write one float32 scale a block (`block` = 0: the whole partition), then the codes, packed block by block.

    The scale is max|q|, or the L2 norm, summed in float64 by `tree_sum`, rounded, and at most the largest float32.
    With L = 2**(bits-1) - 1 levels, linear codes are floor(q / s + u), s = scale / L as in block quantisation, which is
    what is sent; natural codes round |q| / scale by chance to 0, 2**(1-L), ..., 1/2, 1. A block of zeros has codes 0.
    """
    levels = 2 ** (bits - 1) - 1
    finite: list[bool] = []
    for job in jobs:
        assert job.key is not None, "dithering needs a key"
        q = with_residual(job)
        n, rows = q.numel(), in_blocks(q, block)
        u = in_blocks(uniform(job.key, n, q.device), block)
        if l2:
            norm = sqrt(tree_sum(rows.to(torch.float64).square())).to(torch.float32)
            scale = norm.clamp(max=FLOAT32_MAX)[:, None]
        else:
            scale = rows.abs().amax(dim=1, keepdim=True)
        if not natural:
            scale = scale_of(scale, levels)
        codes = _codes(rows, scale, u, levels, natural)
        num_scales = 4 * len(rows)
        job.out[:num_scales].view(torch.float32).copy_(scale.view(-1))
        packed = pack(codes.view(-1)[:n], bits, rows.shape[1])
        job.out[num_scales : num_scales + packed.numel()] = packed
        job.out[num_scales + packed.numel() :].zero_()
        values = _values(codes, scale, bits, natural)
        finite.append(finish(job, q, values.view(-1)[:n]))
    return finite


def decode_dither(jobs: Sequence[DecodeJob], *, bits: int, block: int, natural: bool, threads: int = 1) -> None:
    """Set value = level of the code, times the scale of its block."""
    for job in jobs:
        n = job.out.numel()
        width = block or max(n, 1)
        num_scales = -(-n // width)
        scale = job.data[: 4 * num_scales].view(torch.float32).repeat_interleave(width)[:n]
        packed = job.data[4 * num_scales :][: blocks_nbytes(n, bits, width)]
        codes = unpack(packed, n, bits, width)
        deliver(job, _values(codes, scale, bits, natural))
