"""Values on the wire: float32, float16, bfloat16, or the one-byte natural codes of reference_values.py."""

import torch
import triton
import triton.language as tl

from thinwire.kernels.top_k_layout import NATURAL
from thinwire.kernels.triton_elements import INF_BITS, pointer_to

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", NATURAL: "natural"}
_EXPONENT_OFFSET = tl.constexpr(36)  # the exponent field of 2**(c - 91) is c + 36


@triton.jit
def _natural_bits(code):
    """Return the bits of the float32 that a code stands for."""
    magnitude = code & 127
    return tl.where(magnitude > 0, ((magnitude + _EXPONENT_OFFSET) << 23) | ((code >> 7) << 31), 0)


@triton.jit
def store_values(address, place, mask, value, NUMBER: tl.constexpr, ALIGN: tl.constexpr):
    """Write float32 values as they travel; return what they will be read as, inf where they overflow."""
    if NUMBER == "bfloat16":  # in integers, so that every chip rounds to nearest even; a NaN may become anything
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointer_to(address, tl.uint16, ALIGN) + place, bits.to(tl.uint16), mask=mask)
        sent = (bits << 16).to(tl.float32, bitcast=True)
    elif NUMBER == "float16":
        half = value.to(tl.float16)
        tl.store(pointer_to(address, tl.float16, ALIGN) + place, half, mask=mask)
        sent = half.to(tl.float32)
    elif NUMBER == "natural":  # half of the last exponent step rounds
        bits = value.to(tl.int32, bitcast=True)
        magnitude = (((bits & 0x7FFFFFFF).to(tl.uint32) + 0x400000) >> 23).to(tl.int32) - _EXPONENT_OFFSET
        code = tl.where(magnitude > 0, tl.minimum(magnitude, 127) | tl.where(bits < 0, 128, 0), 0)
        tl.store(pointer_to(address, tl.uint8, ALIGN) + place, code.to(tl.uint8), mask=mask)
        sent = tl.where(magnitude > 127, INF_BITS, _natural_bits(code)).to(tl.float32, bitcast=True)
    else:
        tl.store(pointer_to(address, tl.float32, ALIGN) + place, value, mask=mask)
        sent = value
    return sent


@triton.jit
def load_values(address, place, mask, NUMBER: tl.constexpr, ALIGN: tl.constexpr):
    """Return the values as float32."""
    if NUMBER == "bfloat16":
        bits = tl.load(pointer_to(address, tl.uint16, ALIGN) + place, mask=mask, other=0)
        value = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif NUMBER == "float16":
        half = tl.load(pointer_to(address, tl.float16, ALIGN) + place, mask=mask, other=0.0)
        value = half.to(tl.float32)
    elif NUMBER == "natural":
        code = tl.load(pointer_to(address, tl.uint8, ALIGN) + place, mask=mask, other=0).to(tl.int32)
        value = _natural_bits(code).to(tl.float32, bitcast=True)
    else:
        value = tl.load(pointer_to(address, tl.float32, ALIGN) + place, mask=mask, other=0.0)
    return value
