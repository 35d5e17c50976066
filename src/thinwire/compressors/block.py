"""Block quantisation: one scale for every few hundred values, then 2 to 8 bits a value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, Unbiased, dither_omega
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.codes import blocks_nbytes
from thinwire.spec import BlockSpec
from thinwire.wire import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockQuant(Compressor):
    r"""Symmetric b-bit quantisation with one float32 scale per block.

    With L = 2^(bits-1) - 1 levels a side, per block of B = `block` values:

        s = max_i |x_i| / L,   c_i = round(x_i / s) in [-L, L],   C(x)_i = c_i s.

    `nearest` rounds to nearest even: Contractive with delta = 1 / (1 + (B - 1) / (4 L^2)), 0.992 for 8 bits, 0.277 for
    4 and 0.008 for 2 at B = 512 (the maximum is sent exactly, and no value errs by more than itself or s/2).
    `stochastic` rounds up with the probability of the fraction: Unbiased with
    omega = (sqrt(1 + (B - 1) / L^2) - 1) / 2, 0.008 for 8 bits, 1.2 for 4 and 11 for 2.

    With `rotation` R, groups of R values are first multiplied by the R x R Hadamard matrix, and back after decoding, so
    that an outlier is spread over its group and the others of it keep their bits; what is left after the last whole
    group is not rotated. The matrix is a multiple of an orthonormal one, so the contract is the same, for |x_i| of at
    least 2^-100, but for rounding: 1 - delta and omega become (sqrt(1 - delta) + 2^-18)^2 and (sqrt(omega) + 2^-18)^2.

    Wire: ceil(n/B) float32 scales, then the codes in two's complement, packed per block in limbs of 8, 4, 2 and 1 bits
    (at 4 bits byte j holds code j in its low half and code j + ceil(m/2) in its high half). `bits` + 32/B bits a value.

    Args:
        bits: 2 to 8.
        block: values that share a scale, 32 to 65,536, even; smaller is more accurate and costs 32/block bits a value.
        rounding: "nearest" or "stochastic".
        rotation: 32 or 128, a divisor of `block`, or None; costs time, none on the wire.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> q = BlockQuant(bits=8)
        >>> q.decode(q.encode(torch.tensor([127.0, 1.0, -3.0])), BlockSpec(shape=(3,)))
        tensor([127.,   1.,  -3.])

    References:
        The symmetric rule with L / max, which does not clip the maximum: Jinda Jia et al., "SDP4Bit: Toward 4-bit
        Communication Quantization in Sharded Data Parallelism for LLM Training", 2024. Differs from the paper: a
        scale whose L s would fall below the maximum by rounding is moved up one ulp; the rotation (there of 32 values)
        is undone by every decoder, also between two hops.
    """

    bits: Literal[2, 3, 4, 5, 6, 7, 8] = 8
    block: int = 512
    rounding: Literal["nearest", "stochastic"] = "nearest"
    rotation: Literal[32, 128] | None = None

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise RecipeError(f"BlockQuant: expected bits from 2 to 8, got {self.bits}")
        if not 32 <= self.block <= 65536 or self.block % 2:
            raise RecipeError(f"BlockQuant: expected an even block from 32 to 65536, got {self.block}")
        if self.rounding not in ("nearest", "stochastic"):
            raise RecipeError(f"BlockQuant: expected rounding 'nearest' or 'stochastic', got {self.rounding!r}")
        if self.rotation is not None and (self.rotation not in (32, 128) or self.block % self.rotation):
            raise RecipeError(
                f"BlockQuant: expected a rotation of 32 or 128 that divides the block, or None, got {self.rotation} "
                f"for block {self.block}"
            )

    @property
    def levels(self) -> int:
        """L, the largest code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def stochastic(self) -> bool:
        """Whether rounding draws random numbers."""
        return self.rounding == "stochastic"

    def layout(self, spec: BlockSpec) -> Layout:
        """Scales, then codes."""
        num_blocks = -(-spec.numel // self.block)
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        nbytes = blocks_nbytes(spec.numel, self.bits, self.block)
        return Layout.of(scales=(torch.float32, (num_blocks,)), codes=(dtype, (nbytes,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        # Not below 2: a value alone still errs by its scale's rounding, and delta = 1 would mean exact.
        b = min(self.block, max(spec.numel, 2))
        if self.stochastic:
            return Unbiased(self._after_rotation(dither_omega(b, 1 / self.levels, "max")))
        delta = 1 / (1 + (b - 1) / (4 * self.levels**2))
        smallest = SMALLEST_NORMAL if self.rotation is None else 2.0**-100
        return Contractive(1 - self._after_rotation(1 - delta), smallest=smallest)

    def _after_rotation(self, error: float) -> float:
        """Return the squared error relative to ||x||^2 that is left where rotating there and back rounds too."""
        return error if self.rotation is None else (math.sqrt(error) + 2.0**-18) ** 2

    def recipe(self) -> str:
        """`int8`, `int4`, ..., with what differs from the defaults."""
        extras = [f"block={self.block}"] if self.block != 512 else []
        extras += ["stochastic"] if self.stochastic else []
        extras += [f"rotation={self.rotation}"] if self.rotation is not None else []
        return ":".join([f"int{self.bits}", *extras])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass to find the scales, one to quantise and leave the residual."""
        return kernels.serving(jobs).encode_block_quant(
            jobs,
            bits=self.bits,
            block=self.block,
            stochastic=self.stochastic,
            rotation=self.rotation or 0,
            threads=threads,
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply codes by their scales."""
        kernels.serving(jobs).decode_block_quant(
            jobs, bits=self.bits, block=self.block, rotation=self.rotation or 0, threads=threads
        )
