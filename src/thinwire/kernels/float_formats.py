"""Floating-point formats of 8 and 4 bits, as numbers that kernels, contracts and tests share.

A code is a sign bit, then an exponent e, then m of `mantissa` bits. Its magnitude is m 2^(1 - bias - mantissa) where
e = 0, else (1 + m 2^-mantissa) 2^(e - bias). fp8 is what torch's float8 dtypes are.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FloatFormat = Literal["e4m3", "e5m2", "e3m0"]


@dataclass(frozen=True, slots=True)
class Format:
    """How wide a format is, and the largest magnitude it holds; codes above that are infinity or nan."""

    bits: int
    mantissa: int
    bias: int
    largest: float
    dtype: torch.dtype  # torch's own, or uint8: packed codes

    def values(self) -> Tensor:
        """Return the value of every code, float32."""
        if self.dtype != torch.uint8:
            return torch.arange(256, dtype=torch.uint8).view(self.dtype).to(torch.float32)
        codes = torch.arange(2 ** (self.bits - 1))
        e, m = codes >> self.mantissa, codes & (2**self.mantissa - 1)
        significand = torch.where(e > 0, m + 2**self.mantissa, m).to(torch.float32)
        magnitudes = torch.ldexp(significand, e.clamp(min=1) - self.bias - self.mantissa)
        return torch.cat([magnitudes, -magnitudes])

    def levels(self) -> list[float]:
        """Return every finite magnitude, ascending."""
        magnitudes = self.values()[: 2 ** (self.bits - 1)]
        return magnitudes[magnitudes.isfinite()].tolist()


FORMATS: dict[FloatFormat, Format] = {
    "e4m3": Format(8, 3, 7, 448.0, torch.float8_e4m3fn),
    "e5m2": Format(8, 2, 15, 57344.0, torch.float8_e5m2),
    "e3m0": Format(4, 0, 7, 1.0, torch.uint8),
}
