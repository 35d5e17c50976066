"""Block casts in plain torch, the specification: one float32 scale a block, then floats of 8 or 4 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.codes import blocks_nbytes, pack, unpack
from thinwire.kernels.float_formats import FORMATS, FloatFormat, Format
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver, finish, in_blocks, scale_of, with_residual


def _codes(y: Tensor, to: Format) -> Tensor:
    """Return the codes of the nearest values, ties to the even code; |y| is at most `to.largest`."""
    dropped = 23 - to.mantissa  # bits of a float32's mantissa that the format has no room for
    magnitude = y.abs()
    small = torch.round(magnitude * 2.0 ** (to.bias - 1 + to.mantissa)).to(torch.int32)  # in units of the lowest level
    bits = magnitude.view(torch.int32)
    rounded = bits + (2 ** (dropped - 1) - 1) + ((bits >> dropped) & 1)
    normal = (rounded >> dropped) - ((127 - to.bias) << to.mantissa)
    codes = torch.where(magnitude < 2.0 ** (1 - to.bias), small, normal)
    return torch.where(torch.signbit(y), codes + 2 ** (to.bits - 1), codes).to(torch.uint8)


def encode_block_cast(jobs: Sequence[EncodeJob], *, format: FloatFormat, block: int, threads: int = 1) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes, packed block by block as codes.py says.

    Per block s is max|q| / largest, as `scale_of` makes it; codes are those nearest to q / s, ties to the even code,
    with the sign of q, of zeros too. A block of zeros has s = 0 and codes 0.
    """
    to = FORMATS[format]
    finite: list[bool] = []
    for job in jobs:
        q = with_residual(job)
        n, rows = q.numel(), in_blocks(q, block)
        scale = scale_of(rows.abs().amax(dim=1, keepdim=True), to.largest)
        y = torch.where(scale > 0, rows / scale, torch.zeros_like(rows))
        codes = _codes(y.nan_to_num(0.0).clamp(-to.largest, to.largest), to)
        scale_nbytes = 4 * len(rows)
        job.out[:scale_nbytes].view(torch.float32).copy_(scale.view(-1))
        packed = pack(codes.view(-1)[:n], to.bits, block)
        job.out[scale_nbytes : scale_nbytes + packed.numel()] = packed
        job.out[scale_nbytes + packed.numel() :].zero_()
        decoded = to.values().to(q.device)[codes.long()] * scale
        finite.append(finish(job, q, decoded.view(-1)[:n]))
    return finite


def decode_block_cast(jobs: Sequence[DecodeJob], *, format: FloatFormat, block: int, threads: int = 1) -> None:
    """Set value = value of the code, infinity and nan too, times the scale of its block."""
    to = FORMATS[format]
    for job in jobs:
        n = job.out.numel()
        num_blocks = -(-n // block)
        scale = job.data[: 4 * num_blocks].view(torch.float32).repeat_interleave(block)[:n]
        codes = unpack(job.data[4 * num_blocks :][: blocks_nbytes(n, to.bits, block)], n, to.bits, block)
        deliver(job, to.values().to(job.out.device)[codes.long()] * scale)
