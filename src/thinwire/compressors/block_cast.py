"""Block casts: one scale for every few hundred values, then a float of 8 or 4 bits for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, nearest_delta
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.codes import blocks_nbytes
from thinwire.kernels.float_formats import FORMATS, FloatFormat
from thinwire.spec import BlockSpec
from thinwire.wire import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCast(Compressor):
    r"""Sends every value as a float of 8 or 4 bits, with one float32 scale per block.

    With F the largest number of the format, per block of B = `block` values:

        s = max_i |x_i| / F,   C(x)_i = s round(x_i / s), to the nearest number of the format, ties to the even code.

    So the maximum is sent exactly and nothing saturates. A value whose |x_i| / s is a normal number of the format errs
    by at most |x_i| / (2^(m+1) + 1), m the bits of the mantissa; a smaller one by half the lowest level t s, and below
    that half it is sent as 0:

        format   F       m   normal from   t       relative error   delta at B = 512
        "e4m3"   448     3   2^-6          2^-9    1/17             0.9966
        "e5m2"   57344   2   2^-14         2^-16   1/9              0.9878
        "e3m0"   1       0   2^-6          2^-6    1/3              0.889

    Contractive, with delta = 1 - max (B - 1) (h - l)^2 / 4 / (F^2 + (B - 1) (h + l)^2 / 4) over neighbours l < h.
    "e3m0" has the levels 0 and F times 1, 1/2, ..., 1/64. `NaturalDithering(bits=4, block=512)` rounds to the same by
    chance, and writes the same codes.

    Wire: ceil(n/B) float32 scales, then the codes: sign, exponent, mantissa from the highest bit; one a byte, or two,
    packed as `BlockQuant`'s of 4 bits are. 8 or 4 bits a value, and 32/B. No encoder writes the codes of infinity and
    nan; they decode to that.

    Args:
        format: "e4m3" (torch.float8_e4m3fn), "e5m2" (torch.float8_e5m2) or "e3m0" (a sign and 3 bits of exponent).
        block: values that share a scale, 32 to 65,536, even; smaller is more accurate and costs 32/block bits a value.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> q = BlockCast(format="e4m3")
        >>> q.decode(q.encode(torch.tensor([448.0, 17.0, -0.001])), BlockSpec(shape=(3,)))
        tensor([ 4.4800e+02,  1.6000e+01, -1.9531e-03])

    References:
        Paulius Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (e4m3, e5m2). Differs from the paper: a scale
        per block instead of per tensor.
        Arthur Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
        2025 (e3m0 for outer gradients). Differs from the paper, which does not say how it scales: a scale per block
        that is sent, and error feedback, since delta is below 0.9.
    """

    format: FloatFormat = "e4m3"
    block: int = 512

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise RecipeError(f"BlockCast: expected format 'e4m3', 'e5m2' or 'e3m0', got {self.format!r}")
        if not 32 <= self.block <= 65536 or self.block % 2:
            raise RecipeError(f"BlockCast: expected an even block from 32 to 65536, got {self.block}")

    def layout(self, spec: BlockSpec) -> Layout:
        """Scales, then codes."""
        to = FORMATS[self.format]
        nbytes = blocks_nbytes(spec.numel, to.bits, self.block)
        return Layout.of(scales=(torch.float32, (-(-spec.numel // self.block),)), codes=(to.dtype, (nbytes,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        # Not below 2: a value alone still errs by its scale's rounding, and delta = 1 would mean exact.
        values = min(self.block, max(spec.numel, 2))
        return Contractive(nearest_delta(FORMATS[self.format].levels(), values), smallest=SMALLEST_NORMAL)

    def recipe(self) -> str:
        """The format, with `block=N` where it is not 512."""
        return self.format if self.block == 512 else f"{self.format}:block={self.block}"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass to find the scales, one to round and leave the residual."""
        return kernels.serving(jobs).encode_block_cast(jobs, format=self.format, block=self.block, threads=threads)

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply the floats by their scales."""
        kernels.serving(jobs).decode_block_cast(jobs, format=self.format, block=self.block, threads=threads)
