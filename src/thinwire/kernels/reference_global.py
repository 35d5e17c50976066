"""Global-QSGD in plain torch, the specification: codes of a scale that all ranks agreed on. See reference.py.

The scale M is made of `job.shared`, one number a partition, and does not travel with the codes: linear codes of several
ranks may be added as they are, exponential ones are merged pair by pair.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob, ReduceJob
from thinwire.kernels.reference_dither import natural_codes, natural_values
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

SMALLEST_SQUARE = 2.0**-126
SIGN = 128


# --- what is agreed -------------------------------------------------------------------------------------------------


def shared_norms(jobs: Sequence[EncodeJob], *, block: int, l2: bool, squared: bool, threads: int = 1) -> None:
    """Write one norm per `block` elements (0: of all) into `job.shared`: max|q|, or the L2 norm; perhaps its square.

    Sums of squares run in float64 by `tree_sum`; the result is rounded to float32, norms to at most the largest one,
    squares other than 0 to at least 2**-126. The norm of elements that are not all finite is inf.
    """
    for job in jobs:
        assert job.shared is not None, "a statistic needs a place"
        q = with_residual(job)
        rows = in_blocks(q if q.numel() or block else q.new_zeros(1), block).to(torch.float64)  # of nothing, 0
        squares = tree_sum(rows.square()) if l2 else rows.abs().amax(dim=1).square()
        if squared:
            norms = torch.where(squares > 0, squares.to(torch.float32).clamp(min=SMALLEST_SQUARE), 0.0)
        else:
            norms = sqrt(squares).to(torch.float32).clamp(max=FLOAT32_MAX)
        job.shared.copy_(torch.where(rows.isfinite().all(dim=1), norms, torch.inf))


def _norm(shared: Tensor | None, squared: bool) -> tuple[Tensor, bool]:
    """Return M, and whether there is one: a message in which a norm is not finite was flagged."""
    assert shared is not None, "the scale is shared: it needs a place"
    norm = sqrt(shared) if squared else shared
    good = bool((norm >= 0) & norm.isfinite())
    return norm if good else torch.zeros_like(norm), good


# --- linear codes, 8 or 4 bits --------------------------------------------------------------------------------------


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return bytes: of 4 bits, byte j of h = ceil(n / 2) is the number codes[j] + 16 codes[j + h]."""
    if bits == 8:
        return codes.to(torch.int8).view(torch.uint8)
    padded = codes.new_zeros(codes.numel() + codes.numel() % 2)
    padded[: codes.numel()] = codes
    low, high = padded.view(2, -1)
    return (low + 16 * high).to(torch.int8).view(torch.uint8)


def _unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """Return the n codes, int16. Also of sums of bytes, while the sums of the codes stay within -7 to 7."""
    if bits == 8:
        return data[:n].view(torch.int8).to(torch.int16)
    numbers = data[: -(-n // 2)].view(torch.int8).to(torch.int16)
    low = ((numbers & 15) ^ 8) - 8
    return torch.cat([low, (numbers - low).to(torch.int8).to(torch.int16) >> 4])[:n]


def encode_global_linear(
    jobs: Sequence[EncodeJob], *, bits: int, levels: int, squared: bool, threads: int = 1
) -> list[bool]:
    """Write codes floor(q / s + u), clamped to [-levels, levels], with s = M / levels as in block quantisation.

    M is `job.shared`, or its square root where `squared`. Where M is 0 codes are 0.
    """
    finite: list[bool] = []
    for job in jobs:
        assert job.key is not None, "dithering needs a key"
        q = with_residual(job)
        norm, good = _norm(job.shared, squared)
        step = scale_of(norm, levels)
        y = torch.where(step > 0, q / step, torch.zeros_like(q))
        codes = torch.floor(y + uniform(job.key, q.numel(), q.device)).clamp(-levels, levels).nan_to_num(0.0)
        packed = _pack(codes.to(torch.int16), bits)
        job.out[: packed.numel()] = packed
        job.out[packed.numel() :].zero_()
        decoded = codes.to(torch.int8).to(torch.float32) * step
        finite.append(finish(job, q, decoded) and good)
    return finite


def decode_global_linear(jobs: Sequence[DecodeJob], *, bits: int, levels: int, squared: bool, threads: int = 1) -> None:
    """Set value = code * s."""
    for job in jobs:
        codes = _unpack(job.data, job.out.numel(), bits)
        deliver(job, codes.to(torch.float32) * scale_of(_norm(job.shared, squared)[0], levels))


def reduce_global_linear(jobs: Sequence[ReduceJob], *, bits: int, threads: int = 1) -> None:
    """Set acc to the mean of the codes, weighted by `counts`: floor(y + u), y = (ca a + cb b) / (ca + cb)."""
    for job in jobs:
        (ca, cb), n = job.counts, job.numel
        a, b = (_unpack(data, n, bits).to(torch.float32) for data in (job.acc, job.data))
        y = (a * ca + b * cb) / (ca + cb)
        codes = torch.floor(y + uniform(job.key, n, job.acc.device))
        packed = _pack(codes.to(torch.int16), bits)
        job.acc[: packed.numel()] = packed


# --- exponential codes: a sign and an exponent in a byte ------------------------------------------------------------


def encode_global_exponential(jobs: Sequence[EncodeJob], *, levels: int, squared: bool, threads: int = 1) -> list[bool]:
    """Write a byte a value, sign in bit 7: |q| / M rounded by chance to 2**(c - levels), c up to `levels`, or 0.

    Codes above `levels` are head-room for sums.
    """
    finite: list[bool] = []
    for job in jobs:
        assert job.key is not None, "dithering needs a key"
        q = with_residual(job)
        n = q.numel()
        norm, good = _norm(job.shared, squared)
        codes = natural_codes(q, norm, uniform(job.key, n, q.device), levels, SIGN)
        job.out[:n] = codes
        job.out[n:].zero_()
        finite.append(finish(job, q, natural_values(codes, norm, levels, SIGN)) and good)
    return finite


def decode_global_exponential(jobs: Sequence[DecodeJob], *, levels: int, squared: bool, threads: int = 1) -> None:
    """Set value = 2**(c - levels) * M, with the sign; 0 where c = 0, whatever the sign."""
    for job in jobs:
        norm, _ = _norm(job.shared, squared)
        deliver(job, natural_values(job.data[: job.out.numel()], norm, levels, SIGN))


def reduce_global_exponential(jobs: Sequence[ReduceJob], *, threads: int = 1) -> None:
    """Set acc to the sum, rounded by chance to a power of two.

    With h >= l the larger and the smaller c and d = h - l: where l = 0, the larger operand; of equal signs, h + 1 with
    probability 2**-d, else h, at most 127; of different signs, 0 where d = 0, else h - 1 with probability 2**(1 - d),
    else h. The sign is that of the larger one. u < 2**-m has the probability of 2**-m for m up to 16, above none.
    """
    for job in jobs:
        n = job.numel
        u = uniform(job.key, n, job.acc.device)
        a, b = (data[:n].to(torch.int32) for data in (job.acc, job.data))
        magnitude_a, magnitude_b = a & 127, b & 127
        larger = torch.where(magnitude_a >= magnitude_b, a, b)
        high, low = torch.maximum(magnitude_a, magnitude_b), torch.minimum(magnitude_a, magnitude_b)
        same, apart = (a ^ b) & SIGN == 0, high - low
        moved = (u < torch.exp2(-(apart - torch.where(same, 0, 1)).to(torch.float32))).to(torch.int32)
        total = torch.where(same, (high + moved).clamp(max=127), torch.where(apart == 0, 0, high - moved))
        total = torch.where(low == 0, high, total)
        job.acc[:n] = torch.where(total > 0, total | (larger & SIGN), 0).to(torch.uint8)
