"""The kernels of fixed-point codes in plain torch, which specify their bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.codes import blocks_nbytes, pack, unpack
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver, finish, in_blocks, with_residual

FIXED_POINT_EPSILON = 1e-6  # added to scales before dividing


def encode_fixed_point(jobs: Sequence[EncodeJob], *, bits: int, block: int, threads: int = 1) -> list[bool]:
    """Write a float16 scale for every block (`block` = 0: the whole partition), then the codes, packed block by block.

    s = max|q|, rounded to float16, and H = 2**(bits-1). Codes are q / (s + 1e-6) * H rounded to nearest even, clamped
    to [-H, H - 1], plus H; the value is (code - H) / H * s. A scale that overflows counts as not finite.
    """
    half = 2 ** (bits - 1)
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        n, rows = q.numel(), in_blocks(q, block)
        narrow = rows.abs().amax(dim=1, keepdim=True).to(torch.float16)
        scale = narrow.to(torch.float32)
        fractions = torch.round(rows / (scale + FIXED_POINT_EPSILON) * half).clamp(-half, half - 1).nan_to_num(0.0)
        codes = (fractions + half).to(torch.uint8)
        num_scales = 2 * len(rows)
        job.out[:num_scales].view(torch.float16).copy_(narrow.view(-1))
        packed = pack(codes.view(-1)[:n], bits, rows.shape[1])
        job.out[num_scales : num_scales + packed.numel()] = packed
        job.out[num_scales + packed.numel() :].zero_()
        fits = finish(job, q, _values(codes, scale, half).view(-1)[:n])
        finite.append(fits and bool(torch.isfinite(scale).all()))
    return finite


def decode_fixed_point(jobs: Sequence[DecodeJob], *, bits: int, block: int, threads: int = 1) -> None:
    """Set value = (code - H) / H times the scale of its block."""
    half = 2 ** (bits - 1)
    for job in jobs:
        n = job.out.numel()
        width = block or max(n, 1)
        num_scales = 2 * -(-n // width)
        scale = job.data[:num_scales].view(torch.float16).to(torch.float32)
        packed = job.data[num_scales:][: blocks_nbytes(n, bits, width)]
        codes = in_blocks(unpack(packed, n, bits, width), block)
        deliver(job, _values(codes, scale[:, None], half).view(-1)[:n])


def _values(codes: Tensor, scale: Tensor, half: int) -> Tensor:
    return (codes.to(torch.float32) - half) / half * scale
