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

from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_elements import deliver, finish, with_residual
from thinwire.kernels.reference_random_k import decode_random_k as decode_random_k
from thinwire.kernels.reference_random_k import encode_random_k as encode_random_k
from thinwire.kernels.reference_top_k import decode_top_k as decode_top_k
from thinwire.kernels.reference_top_k import encode_top_k as encode_top_k
from thinwire.random import uniform

FLOAT32_MAX = torch.finfo(torch.float32).max
TREE_CHUNK = 1024


def tree_sum(x: Tensor) -> Tensor:
    """Sum a 1-D float64 tensor in the tree that every backend shares.

    Each chunk of 1024 elements (the last one zero-padded) is summed by halving: element i gains element i + 512, then
    i + 256, and so on down to i + 1. The chunks' sums are summed the same way until one is left.
    """
    while True:
        num_chunks = max(1, -(-x.numel() // TREE_CHUNK))
        padded = x.new_zeros(num_chunks * TREE_CHUNK)
        padded[: x.numel()] = x
        chunks = padded.view(num_chunks, TREE_CHUNK)
        while chunks.shape[1] > 1:
            half = chunks.shape[1] // 2
            chunks = chunks[:, :half] + chunks[:, half:]
        x = chunks[:, 0]
        if num_chunks == 1:
            return x[0]


def all_finite(tensors: Sequence[Tensor], *, threads: int = 1) -> list[bool]:
    """Return, per tensor, whether every value is finite."""
    return [bool(torch.isfinite(x).all()) for x in tensors]


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


# --- block quantisation: one float32 scale a block, then 8- or 4-bit codes ------------------------------------------


def max_scale(levels: int) -> float:
    """Return the largest float32 s with `levels * s` still finite."""
    s = torch.tensor(FLOAT32_MAX, dtype=torch.float32) / levels
    while torch.isinf(s * levels):
        s = torch.nextafter(s, torch.zeros_like(s))
    return float(s)


def _num_blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def _pack_nibbles(codes: Tensor, block: int) -> Tensor:
    """Planar within each block of m codes: byte j = code[j] | code[j + ceil(m/2)] << 4, two's complement nibbles."""
    packed: list[Tensor] = []
    for piece in codes.split(block):
        half = -(-piece.numel() // 2)
        low, high = piece[:half].to(torch.int16), piece.new_zeros(half).to(torch.int16)
        high[: piece.numel() - half] = piece[half:].to(torch.int16)
        packed.append(((low & 15) | ((high & 15) << 4)).to(torch.uint8))
    return torch.cat(packed) if packed else codes.new_zeros(0, dtype=torch.uint8)


def _unpack_nibbles(packed: Tensor, numel: int, block: int) -> Tensor:
    codes: list[Tensor] = []
    place = 0
    for start in range(0, numel, block):
        m = min(block, numel - start)
        half = -(-m // 2)  # an odd block takes half a byte more than it fills
        piece = packed[place : place + half].to(torch.int16)
        place += half
        both = torch.cat([piece & 15, piece >> 4])[:m]
        codes.append(((both ^ 8) - 8).to(torch.int8))
    return torch.cat(codes) if codes else packed.new_zeros(0, dtype=torch.int8)


def encode_block_quant(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, stochastic: bool, threads: int = 1
) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes: int8 (8 bits) or planar nibbles (4 bits).

    Per block, L = 2**(bits-1) - 1 and s = max|q| / L, moved up one ulp where L * s < max|q| and down to `max_scale(L)`
    where L * s would overflow. Codes are q/s rounded to nearest even, or floor(q/s + u), clamped to [-L, L]. A block
    of zeros has s = 0 and codes 0.
    """
    levels = 2 ** (bits - 1) - 1
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        n, num_blocks = q.numel(), _num_blocks(q.numel(), block)
        padded = q.new_zeros(num_blocks * block)
        padded[:n] = q
        blocks = padded.view(num_blocks, block)
        peak = blocks.abs().amax(dim=1, keepdim=True) if num_blocks else blocks.new_zeros(0, 1)
        scale = peak / levels
        scale = torch.where(scale * levels < peak, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
        scale = scale.clamp(max=max_scale(levels))
        y = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks))
        if stochastic:
            assert job.key is not None, "stochastic rounding needs a key"
            u = padded.new_zeros(padded.numel())
            u[:n] = uniform(job.key, n, q.device)
            y = torch.floor(y + u.view_as(y))
        else:
            y = torch.round(y)
        codes = y.clamp(-levels, levels).nan_to_num(0.0).to(torch.int8)
        scale_nbytes = 4 * num_blocks
        job.out[:scale_nbytes].view(torch.float32).copy_(scale.view(-1))
        flat = codes.view(-1)[:n]
        payload = flat.view(torch.uint8) if bits == 8 else _pack_nibbles(flat, block)
        job.out[scale_nbytes : scale_nbytes + payload.numel()] = payload
        job.out[scale_nbytes + payload.numel() :].zero_()
        decoded = (codes.to(torch.float32) * scale).view(-1)[:n]
        finite.append(finish(job, q, decoded))
    return finite


def decode_block_quant(jobs: Sequence[DecodeJob], *, bits: int, block: int, threads: int = 1) -> None:
    """Set value = code * scale of its block."""
    for job in jobs:
        n, num_blocks = job.out.numel(), _num_blocks(job.out.numel(), block)
        scale = job.data[: 4 * num_blocks].view(torch.float32)
        payload = job.data[4 * num_blocks :]
        codes = payload[:n].view(torch.int8) if bits == 8 else _unpack_nibbles(payload, n, block)
        deliver(job, codes.to(torch.float32) * scale.repeat_interleave(block)[:n])


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
        scale = (mean.sqrt() if rms else mean).to(torch.float32)
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
