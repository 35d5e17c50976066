"""Values of sparse kinds on the wire: 32, 16 or 8 bits each.

A *natural* code is one byte, a sign (bit 7) and a magnitude c in [0, 127] that stands for 2**(c - 91), or 0 where c
is 0. Values are rounded to the nearest power of two, half-way up. What rounds to less than 2**-90 is sent as 0; what
rounds to more than 2**36 overflows, as 65520 does in float16.
"""

import torch
from torch import Tensor

from thinwire.kernels.top_k_layout import NATURAL

_EXPONENT_OFFSET = 36  # the exponent field of 2**(c - 91) is c + 36


def to_wire(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float32 values as they travel, and what they will be decoded to (inf where they overflow)."""
    if dtype is not NATURAL:
        rounded = values.to(dtype)
        return rounded, rounded.to(torch.float32)
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = (((bits & 0x7FFFFFFF) + 0x400000) >> 23) - _EXPONENT_OFFSET  # half the last exponent step rounds
    codes = torch.where(magnitude > 0, magnitude.clamp(max=127) | (bits >> 31 << 7), 0).to(torch.uint8)
    decoded = from_wire(codes)
    return codes, torch.where(magnitude > 127, torch.full_like(decoded, torch.inf), decoded)


def from_wire(values: Tensor) -> Tensor:
    """Return what values on the wire stand for, float32."""
    if values.dtype is not NATURAL:
        return values.to(torch.float32)
    codes = values.to(torch.int32)
    magnitude = codes & 127
    sign = torch.where(codes > 127, -(2**31), 0).to(torch.int32)
    bits = ((magnitude + _EXPONENT_OFFSET) << 23) | sign
    return torch.where(magnitude > 0, bits, torch.zeros_like(bits)).view(torch.float32)
