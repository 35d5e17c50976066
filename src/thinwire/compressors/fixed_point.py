"""Fixed-point codes: two's-complement fractions of a block's largest magnitude, as AQ-SGD sends activations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import Contract, Contractive
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.codes import blocks_nbytes
from thinwire.kernels.reference_fixed_point import FIXED_POINT_EPSILON
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

_SMALLEST = 2.0**-6  # magnitudes beside which the epsilon is small
_ROUNDING = 2.0**-11  # of a scale in float16, relative


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedPoint(Compressor):
    r"""b-bit fractions of the largest magnitude, whose scale is a float16.

    With H = 2^(bits-1), per d values that share a scale:

        s = float16(max_i |x_i|),   c_i = round(x_i / (s + 1e-6) H) in [-H, H - 1],   C(x)_i = c_i s / H.

    The levels are not symmetric: a largest value that is positive comes back as (1 - 1/H) s. Contractive with
    delta = (1 - a^2) / (1 + (d - 1) h^2), a = (1 + r) (1/H + r), h = (1 + r) / (2 H) + 1e-6 / 2^-6 and r = 2^-11, for
    |x_i| from 2^-6 to 65504: 0.992 for 8 bits of 512 values, 0.33 for 4. Beside smaller values the 1e-6 and the steps
    of float16 weigh more, and below 2^-25 all of a block becomes 0: for activations, not for gradients as they are.
    A scale of 65520 or more is not finite.

    Wire: the float16 scales, then c_i + H, packed as `BlockQuant`'s codes are. `bits` + 16/d bits a value.

    Args:
        bits: 2 to 8.
        block: values that share a scale, 32 to 65,536, even; None: all of the partition.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> q = FixedPoint(bits=4)
        >>> q.decode(q.encode(torch.tensor([-1.0, -0.2, 0.1, 0.45, 2.0])), BlockSpec(shape=(5,)))
        tensor([-1.0000, -0.2500,  0.0000,  0.5000,  1.7500])

    References:
        Jue Wang, Binhang Yuan, Luka Rimanic, Yongjun He, Tri Dao, Beidi Chen, Christopher Re, Ce Zhang, "Fine-tuning
        Language Models over Slow Networks using Activation Quantization with Guarantees" (AQ-SGD), 2022: the quantiser
        of the released code, whose scales are one a channel. Differs from it: scales belong to runs of values, so that
        a channel must be one; rounding to nearest only.
    """

    bits: Literal[2, 3, 4, 5, 6, 7, 8] = 8
    block: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise RecipeError(f"FixedPoint: expected bits from 2 to 8, got {self.bits}")
        if self.block is not None and (not 32 <= self.block <= 65536 or self.block % 2):
            raise RecipeError(f"FixedPoint: expected an even block from 32 to 65536, or None, got {self.block}")

    @property
    def levels(self) -> int:
        """H, the steps below zero."""
        return 2 ** (self.bits - 1)

    def layout(self, spec: BlockSpec) -> Layout:
        """Scales, then codes."""
        width = self.block or max(spec.numel, 1)
        num_blocks, nbytes = -(-spec.numel // width), blocks_nbytes(spec.numel, self.bits, width)
        return Layout.of(scales=(torch.float16, (num_blocks,)), codes=(torch.uint8, (nbytes,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        # The worst block has its largest value beyond the top level, and all others half a step from 0.
        d = max(min(self.block or spec.numel, spec.numel), 1)
        a = (1 + _ROUNDING) * (1 / self.levels + _ROUNDING)
        h = (1 + _ROUNDING) / (2 * self.levels) + FIXED_POINT_EPSILON / _SMALLEST
        largest = torch.finfo(torch.float16).max
        return Contractive((1 - a**2) / (1 + (d - 1) * h**2), smallest=_SMALLEST, largest=largest)

    def recipe(self) -> str:
        """`fixpoint:BITS`, with `block=N`."""
        return f"fixpoint:{self.bits}" + (f":block={self.block}" if self.block is not None else "")

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass to find the scales, one to quantise and leave the residual."""
        return kernels.serving(jobs).encode_fixed_point(jobs, bits=self.bits, block=self.block or 0, threads=threads)

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply fractions by their scales."""
        kernels.serving(jobs).decode_fixed_point(jobs, bits=self.bits, block=self.block or 0, threads=threads)
