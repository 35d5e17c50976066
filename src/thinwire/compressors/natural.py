"""Natural compression: every value becomes one of the two powers of two beside it, by chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import Contract, Unbiased
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.codes import packed_nbytes
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

_RANGES = {8: (2.0**-108, 2.0**18), 9: (2.0**-126, 2.0**127)}


@dataclass(frozen=True, kw_only=True, slots=True)
class NaturalCompression(Compressor):
    r"""Sends a sign and a power of two for every value, without any scale.

    With 2^k <= |x_i| <= 2^(k+1):

        C(x)_i = sign(x_i) 2^(k+1) with probability |x_i| / 2^k - 1, else sign(x_i) 2^k.

    Unbiased, with omega = 1/8, for non-zero |x_i| from 2^-108 to 2^18 (8 bits) or 2^-126 to 2^127 (9 bits: all normal
    numbers but those above). A smaller x_i becomes the smallest power of two with probability |x_i| / that, else 0:
    unbiased as well, but noisier. A larger one overflows, which counts as a non-finite step.

    Wire: codes whose highest bit is the sign and whose other 7 or 8 bits say the exponent, 0 for the value 0. 8 bits:
    one byte each. 9 bits, float32's whole exponent: n bytes of it, then ceil(n/8) bytes of signs.

    Args:
        bits: 8 or 9.

    Raises:
        RecipeError: another number of bits.

    Example:
        >>> from thinwire.random import Key
        >>> q = NaturalCompression(bits=8)
        >>> q.decode(q.encode(torch.tensor([4.0, -0.5, 0.0]), Key(1)), BlockSpec(shape=(3,)))
        tensor([ 4.0000, -0.5000,  0.0000])

    References:
        Samuel Horvath, Chen-Yu Ho, Ludovit Horvath, Atal Narayan Sahu, Marco Canini, Peter Richtarik, "Natural
        Compression for Distributed Deep Learning", 2022. Differs from the paper: denormal values, and with 8 bits those
        out of range, are treated as said above.
    """

    bits: Literal[8, 9] = 8

    def __post_init__(self) -> None:
        if self.bits not in _RANGES:
            raise RecipeError(f"NaturalCompression: expected bits 8 or 9, got {self.bits}")

    @property
    def smallest(self) -> float:
        """The smallest power of two that is sent."""
        return _RANGES[self.bits][0]

    @property
    def largest(self) -> float:
        """The largest magnitude that fits."""
        return _RANGES[self.bits][1]

    @property
    def stochastic(self) -> bool:
        """Always."""
        return True

    def layout(self, spec: BlockSpec) -> Layout:
        """Codes alone."""
        return Layout.of(codes=(torch.uint8, (packed_nbytes(spec.numel, self.bits),)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        return Unbiased(1 / 8, smallest=self.smallest, largest=self.largest)

    def recipe(self) -> str:
        """`cnat:BITS`."""
        return f"cnat:{self.bits}"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Round to powers of two and leave the residual, in one pass."""
        return kernels.serving(jobs).encode_natural(jobs, bits=self.bits, threads=threads)

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Set exponent and sign."""
        kernels.serving(jobs).decode_natural(jobs, bits=self.bits, threads=threads)
