"""Natural compression in plain torch, the specification: values rounded by chance to powers of two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.codes import pack, packed_nbytes, unpack
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver, finish, with_residual
from thinwire.random import uniform

OFFSET = {8: 18, 9: 0}  # code c stands for 2**(c + offset - 127); its exponent field is c + offset
TOP = {8: 127, 9: 254}  # the largest code that is written


def _values(codes: Tensor, negative: Tensor, bits: int) -> Tensor:
    level = torch.where(codes > 0, (codes.to(torch.int32) + OFFSET[bits]) << 23, 0).view(torch.float32)
    return torch.where(negative, -level, level)


def encode_natural(jobs: Sequence[EncodeJob], *, bits: int, threads: int = 1) -> list[bool]:
    """Write the codes, packed as codes.py says: the highest of 8 or 9 bits is the sign, the others c.

    A random fraction added to the bits of a float carries into its exponent field with the probability of its mantissa;
    c is the field less `OFFSET`. What is below the smallest level becomes it, or 0, by chance too. Above the largest
    level is an overflow, as inf is.
    """
    finite: list[bool] = []
    smallest, largest = 2.0 ** (1 + OFFSET[bits] - 127), 2.0 ** (TOP[bits] + OFFSET[bits] - 127)
    for job in jobs:
        assert job.key is not None, "natural compression needs a key"
        q = with_residual(job)
        n, size, u = q.numel(), q.abs(), uniform(job.key, q.numel(), q.device)
        carried = (size.view(torch.int32) + (u * 2.0**23).to(torch.int32)) >> 23
        low = (size * (1 / smallest) + u >= 1).to(torch.int32)
        codes = torch.where(size < smallest, low, carried - OFFSET[bits]).clamp(0, TOP[bits])
        negative = (q < 0) & (codes > 0)
        if bits == 8:
            packed = (codes | negative << 7).to(torch.uint8)
        else:
            packed = torch.cat([codes.to(torch.uint8), pack(negative.to(torch.uint8), 1, max(n, 1))])
        job.out[: packed.numel()] = packed
        job.out[packed.numel() :].zero_()
        in_range = bool((size <= largest).all())
        finite.append(finish(job, q, _values(codes, negative, bits)) and in_range)
    return finite


def decode_natural(jobs: Sequence[DecodeJob], *, bits: int, threads: int = 1) -> None:
    """Set value = 2**(c + offset - 127) with its sign, or 0 where c = 0."""
    for job in jobs:
        n = job.out.numel()
        if bits == 8:
            codes, negative = job.data[:n] & 127, job.data[:n] > 127
        else:
            codes, negative = job.data[:n], unpack(job.data[n : packed_nbytes(n, 9)], n, 1, max(n, 1)) > 0
        deliver(job, _values(codes, negative, bits))
