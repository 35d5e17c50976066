"""Min-max quantisation: codes count steps between the least and the largest value of a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Additive, Contract, Contractive, Unbiased
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.codes import blocks_nbytes
from thinwire.kernels.reference_min_max import BAGUA_EPSILON
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

_BAGUA_SMALLEST = 1e-6  # magnitudes beside which BAGUA's epsilon is small


@dataclass(frozen=True, kw_only=True, slots=True)
class MinMax(Compressor):
    r"""Unsigned b-bit codes between the least and the largest of the d values that share a range.

    With N = 2^bits - 1, lo = min_i x_i and hi = max_i x_i, `rule` is one of:

        "affine"   s = (hi - lo) / N,        c_i = round((x_i - lo) / s),               C(x)_i = lo + c_i s
        "bagua"    a = N / (hi - lo + 1e-7), c_i = min(round(x_i a), round(hi a)) - f,  C(x)_i = (c_i + f) / a

    with f = round(hi a) - N. Affine levels begin at lo and need not hold 0; BAGUA's are multiples of 1/a, and 0 is one
    of them where lo <= 0 <= hi. Constant blocks come back exactly.

    No value errs by more than half a step. Affine, nearest: Contractive with delta = 1 - (d - 2) / (2 N^2) where that
    is above 0, 0.996 for 8 bits of 512 values; else Additive(1 / (2 N)), for 4 bits and less of 512. BAGUA: Contractive
    with delta = (1 - 2 w) / (1 + (d - 2) w), w = 0.5525 / N^2, for |x_i| of at least 1e-6: 0.996 for 8 bits, 0.44 for
    4. Affine, `stochastic` (floor(y + u) for round(y)): Unbiased with omega = (d - 2) / (2 N^2).

    Wire: float32 lo and hi of every block, then the codes, packed as `BlockQuant`'s are. `bits` + 64/d bits a value.

    Args:
        bits: 1 to 8; "bagua" from 2 on.
        block: values that share a range, 32 to 65,536, even; None: all of the partition.
        rule: "affine" or "bagua".
        rounding: "nearest", or "stochastic", for "affine" only: BAGUA's levels do not reach hi, and would be biased.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> q = MinMax(bits=4)
        >>> q.decode(q.encode(torch.tensor([5.0, 6.0, 20.0])), BlockSpec(shape=(3,)))
        tensor([ 5.,  6., 20.])

    References:
        Mikhail Rudakov, Aleksandr Beznosikov, Yaroslav Kholodov, Alexander Gasnikov, "Activations and Gradients
        Compression for Model-Parallel Training", 2024 (affine, one range a tensor: block=None on whole tensors).
        Differs from the released code: constant blocks are no division by 0, ranges may exceed float32.
        Shaoduo Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021 (bagua, 8 bits, one
        range a chunk). Differs from the released code: 2 to 8 bits; codes are clamped at both ends; blocks whose values
        are nearly equal, |x_i| a >= 2^16, where float32 no longer holds x_i a to a fraction, count steps from lo.
    """

    bits: Literal[1, 2, 3, 4, 5, 6, 7, 8] = 8
    block: int | None = None
    rule: Literal["affine", "bagua"] = "affine"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.rule not in ("affine", "bagua"):
            raise RecipeError(f"MinMax: expected rule 'affine' or 'bagua', got {self.rule!r}")
        least = 1 if self.rule == "affine" else 2  # BAGUA's one bit would send a symmetric block as zeros
        if self.bits not in range(least, 9):
            raise RecipeError(f"MinMax: expected bits from {least} to 8 ({self.rule}), got {self.bits}")
        if self.block is not None and (not 32 <= self.block <= 65536 or self.block % 2):
            raise RecipeError(f"MinMax: expected an even block from 32 to 65536, or None, got {self.block}")
        if self.rounding not in ("nearest", "stochastic"):
            raise RecipeError(f"MinMax: expected rounding 'nearest' or 'stochastic', got {self.rounding!r}")
        if self.rule == "bagua" and self.stochastic:
            raise RecipeError("MinMax: expected the affine rule with stochastic rounding, got rule='bagua'")

    @property
    def levels(self) -> int:
        """N, the largest code."""
        return 2**self.bits - 1

    @property
    def stochastic(self) -> bool:
        """Whether rounding draws random numbers."""
        return self.rounding == "stochastic"

    def layout(self, spec: BlockSpec) -> Layout:
        """Ranges, then codes."""
        width = self.block or max(spec.numel, 1)
        num_blocks, nbytes = -(-spec.numel // width), blocks_nbytes(spec.numel, self.bits, width)
        return Layout.of(ranges=(torch.float32, (num_blocks, 2)), codes=(torch.uint8, (nbytes,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        # The worst block holds the ends of a symmetric range, and else what lies halfway between two levels around 0.
        # Not below 3: the ends still err by the rounding of float32.
        d = max(min(self.block or spec.numel, spec.numel), 3)
        if self.rule == "bagua":
            w = (1 + (1 + BAGUA_EPSILON / _BAGUA_SMALLEST) ** 2) / (4 * self.levels**2)
            return Contractive((1 - 2 * w) / (1 + (d - 2) * w), smallest=_BAGUA_SMALLEST)
        omega = (d - 2) / (2 * self.levels**2)
        if self.stochastic:
            return Unbiased(omega)
        if omega < 1:
            return Contractive(1 - omega, smallest=SMALLEST_NORMAL)
        return Additive(1 / (2 * self.levels), self.block)

    def recipe(self) -> str:
        """`minmax:BITS`, with `bagua`, `stochastic` and `block=N`."""
        extras = ["bagua"] if self.rule == "bagua" else []
        extras += ["stochastic"] if self.stochastic else []
        extras += [f"block={self.block}"] if self.block is not None else []
        return ":".join(["minmax", str(self.bits), *extras])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass to find the ranges, one to quantise and leave the residual."""
        return kernels.serving(jobs).encode_min_max(
            jobs,
            bits=self.bits,
            block=self.block or 0,
            bagua=self.rule == "bagua",
            stochastic=self.stochastic,
            threads=threads,
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Turn codes back into values of their block's range."""
        kernels.serving(jobs).decode_min_max(
            jobs, bits=self.bits, block=self.block or 0, bagua=self.rule == "bagua", threads=threads
        )
