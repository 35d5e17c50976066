"""Every kernel in plain torch. This file and reference_*.py are the specification: other backends give the same bytes.

Rules that make byte equality possible: sums for scales run in one fixed tree (`tree_sum`); a product and a sum are two
roundings (no fused multiply-add); rounding is to nearest, ties to even; divisions are IEEE divisions, never products
with a reciprocal.

An encoder returns, per job, whether everything it read and wrote was finite. Where it was not, the bytes and the
residual of that job are unspecified; the caller flags the message and restores the residual.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.codes import pack, unpack
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.low_rank import decode_low_rank as decode_low_rank
from thinwire.kernels.low_rank import draw_q as draw_q
from thinwire.kernels.low_rank import encode_low_rank as encode_low_rank
from thinwire.kernels.low_rank import orthogonalise_ as orthogonalise_
from thinwire.kernels.low_rank import reconstruct as reconstruct
from thinwire.kernels.reference_block_cast import decode_block_cast as decode_block_cast
from thinwire.kernels.reference_block_cast import encode_block_cast as encode_block_cast
from thinwire.kernels.reference_dither import decode_dither as decode_dither
from thinwire.kernels.reference_dither import encode_dither as encode_dither
from thinwire.kernels.reference_fixed_point import decode_fixed_point as decode_fixed_point
from thinwire.kernels.reference_fixed_point import encode_fixed_point as encode_fixed_point
from thinwire.kernels.reference_global import decode_global_exponential as decode_global_exponential
from thinwire.kernels.reference_global import decode_global_linear as decode_global_linear
from thinwire.kernels.reference_global import encode_global_exponential as encode_global_exponential
from thinwire.kernels.reference_global import encode_global_linear as encode_global_linear
from thinwire.kernels.reference_global import reduce_global_exponential as reduce_global_exponential
from thinwire.kernels.reference_global import reduce_global_linear as reduce_global_linear
from thinwire.kernels.reference_global import shared_norms as shared_norms
from thinwire.kernels.reference_min_max import decode_min_max as decode_min_max
from thinwire.kernels.reference_min_max import encode_min_max as encode_min_max
from thinwire.kernels.reference_natural import decode_natural as decode_natural
from thinwire.kernels.reference_natural import encode_natural as encode_natural
from thinwire.kernels.reference_random_k import decode_random_k as decode_random_k
from thinwire.kernels.reference_random_k import encode_random_k as encode_random_k
from thinwire.kernels.reference_rotate import rotate, unrotate
from thinwire.kernels.reference_sign import decode_sign as decode_sign
from thinwire.kernels.reference_sign import encode_sign as encode_sign
from thinwire.kernels.reference_sign import majority_vote as majority_vote
from thinwire.kernels.reference_steps import deliver, finish, in_blocks, scale_of, sqrt, tree_sum, with_residual
from thinwire.kernels.reference_ternary import decode_ternary as decode_ternary
from thinwire.kernels.reference_ternary import encode_ternary as encode_ternary
from thinwire.kernels.reference_top_chunks import decode_top_chunks as decode_top_chunks
from thinwire.kernels.reference_top_chunks import encode_top_chunks as encode_top_chunks
from thinwire.kernels.reference_top_k import decode_top_k as decode_top_k
from thinwire.kernels.reference_top_k import encode_top_k as encode_top_k
from thinwire.random import uniform


def all_finite(tensors: Sequence[Tensor], *, threads: int = 1) -> list[bool]:
    """Return, per tensor, whether every value is finite."""
    return [bool(torch.isfinite(x).all()) for x in tensors]


def add_residual(jobs: Sequence[EncodeJob], *, threads: int = 1) -> list[bool]:
    """Leave q where the residual was, and write no bytes; return, per job, whether all of q is finite."""
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        if job.residual is not None:
            job.residual.copy_(q)
        finite.append(bool(torch.isfinite(q).all()))
    return finite


# --- casts: the values themselves, float32, float16 or bfloat16 -----------------------------------------------------


def encode_cast(jobs: Sequence[EncodeJob], *, dtype: torch.dtype, threads: int = 1) -> list[bool]:
    """Write n values of `dtype`, rounded to nearest even."""
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        values = q.to(dtype)
        job.out[: values.numel() * dtype.itemsize].view(dtype).copy_(values)
        job.out[values.numel() * dtype.itemsize :].zero_()
        finite.append(finish(job, q, values.to(torch.float32)))
    return finite


def decode_cast(jobs: Sequence[DecodeJob], *, dtype: torch.dtype, threads: int = 1) -> None:
    """Read n values of `dtype`."""
    for job in jobs:
        values = job.data[: job.out.numel() * dtype.itemsize].view(dtype)
        deliver(job, values.to(torch.float32))


# --- block quantisation: one float32 scale a block, then codes of 2 to 8 bits ---------------------------------------


def _num_blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def encode_block_quant(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, stochastic: bool, rotation: int = 0, threads: int = 1
) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes, two's complement, packed block by block as codes.py says.

    Per block, L = 2**(bits-1) - 1 and s = max|q| / L, moved up one ulp where L * s < max|q| and down to `max_scale(L)`
    where L * s would overflow. Codes are q/s rounded to nearest even, or floor(q/s + u), clamped to [-L, L]. A block
    of zeros has s = 0 and codes 0. With `rotation`, a divisor of `block`, that is done to `rotate(q)`, and a residual
    that overflows counts as not finite.
    """
    levels = 2 ** (bits - 1) - 1
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        n, num_blocks = q.numel(), _num_blocks(q.numel(), block)
        blocks = in_blocks(rotate(q, rotation) if rotation else q, block)
        scale = scale_of(blocks.abs().amax(dim=1, keepdim=True), levels)
        y = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks))
        if stochastic:
            assert job.key is not None, "stochastic rounding needs a key"
            y = torch.floor(y + in_blocks(uniform(job.key, n, q.device), block))
        else:
            y = torch.round(y)
        codes = y.clamp(-levels, levels).nan_to_num(0.0).to(torch.int8)
        scale_nbytes = 4 * num_blocks
        job.out[:scale_nbytes].view(torch.float32).copy_(scale.view(-1))
        payload = pack(codes.view(-1)[:n].view(torch.uint8), bits, block)
        job.out[scale_nbytes : scale_nbytes + payload.numel()] = payload
        job.out[scale_nbytes + payload.numel() :].zero_()
        decoded = (codes.to(torch.float32) * scale).view(-1)[:n]
        fits = finish(job, q, unrotate(decoded, rotation) if rotation else decoded)
        finite.append(fits and (not rotation or job.residual is None or bool(torch.isfinite(job.residual).all())))
    return finite


def decode_block_quant(
    jobs: Sequence[DecodeJob], *, bits: int, block: int, rotation: int = 0, threads: int = 1
) -> None:
    """Set value = code * scale of its block, rotated back."""
    for job in jobs:
        n, num_blocks = job.out.numel(), _num_blocks(job.out.numel(), block)
        scale = job.data[: 4 * num_blocks].view(torch.float32)
        codes = unpack(job.data[4 * num_blocks :], n, bits, block).to(torch.int16)
        sign = 2 ** (bits - 1)
        codes = (codes ^ sign) - sign
        decoded = codes.to(torch.float32) * scale.repeat_interleave(block)[:n]
        deliver(job, unrotate(decoded, rotation) if rotation else decoded)


# --- one bit: one float32 scale, then sign bits ---------------------------------------------------------------------


def encode_one_bit(jobs: Sequence[EncodeJob], *, rms: bool, threads: int = 1) -> list[bool]:
    """Write the scale, then ceil(n/8) bytes; bit i % 8 (from the least) of byte i // 8 is 1 iff q[i] < 0.

    scale = sum|q| / n, or sqrt(sum q^2 / n) when `rms`; summed in float64 by `tree_sum`, then rounded to float32.
    """
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        n = q.numel()
        wide = q.to(torch.float64)
        total = tree_sum(wide * wide if rms else wide.abs())
        mean = total / max(n, 1)
        scale = (sqrt(mean) if rms else mean).to(torch.float32)
        negative = q < 0
        padded = torch.zeros(-(-n // 8) * 8, dtype=torch.uint8, device=q.device)
        padded[:n] = negative
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=q.device)
        packed = (padded.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
        job.out[:4].view(torch.float32).copy_(scale)
        job.out[4 : 4 + packed.numel()] = packed
        job.out[4 + packed.numel() :].zero_()
        finite.append(finish(job, q, torch.where(negative, -scale, scale)))
    return finite


def decode_one_bit(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +scale where the bit is 0, -scale where it is 1."""
    for job in jobs:
        n = job.out.numel()
        scale = job.data[:4].view(torch.float32)
        packed = job.data[4 : 4 + -(-n // 8)]
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
        negative = ((packed[:, None] >> shifts) & 1).view(-1)[:n].bool()
        deliver(job, torch.where(negative, -scale, scale))
