"""Dithering: every value is rounded by chance to one of the two levels beside it, so that the mean is the value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import Contract, Unbiased, dither_omega
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.codes import blocks_nbytes
from thinwire.spec import BlockSpec
from thinwire.wire import Layout


def _check(kind: str, bits: int, norm: str, block: int | None) -> None:
    if bits not in range(2, 9):
        raise RecipeError(f"{kind}: expected bits from 2 to 8, got {bits}")
    if norm not in ("max", "l2"):
        raise RecipeError(f"{kind}: expected norm 'max' or 'l2', got {norm!r}")
    if block is not None and (not 32 <= block <= 65536 or block % 2):
        raise RecipeError(f"{kind}: expected an even block from 32 to 65536, or None, got {block}")


def _layout(spec: BlockSpec, bits: int, block: int | None) -> Layout:
    width = block or max(spec.numel, 1)
    num_scales, nbytes = -(-spec.numel // width), blocks_nbytes(spec.numel, bits, width)
    return Layout.of(scales=(torch.float32, (num_scales,)), codes=(torch.uint8, (nbytes,)))


def _recipe(kind: str, bits: int, norm: str, block: int | None) -> str:
    return ":".join([kind, str(bits), *(["l2"] if norm == "l2" else []), *([f"block={block}"] if block else [])])


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearDithering(Compressor):
    r"""Rounds by chance to evenly spaced levels of a norm; with the L2 norm of buckets it is QSGD.

    With L = 2^(bits-1) - 1 levels a side and r = ||x||_max or ||x||_2 (`norm`) over the d values that share a scale:

        s = r / L,   C(x)_i = floor(x_i / s + u_i) s   with u_i uniform in (0, 1), one per element of the parameter.

    Unbiased, with omega = (sqrt(1 + (d - 1) / L^2) - 1) / 2 for the maximum; for the L2 norm, sqrt(d) / L - 1 where
    that is above 1, else d / (4 L^2). With `block`, d is at most that.

    Wire: float32 scales s, one per block, then the codes floor(x_i / s + u_i), packed as `BlockQuant`'s are. `bits` a
    value, and 32/block.

    Args:
        bits: 2 to 8, the sign included.
        norm: "max", or "l2", which sends more zeros and errs more.
        block: values that share a scale, 32 to 65,536, even; None: all of the partition.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> from thinwire.random import Key
        >>> q = LinearDithering(bits=3)
        >>> q.decode(q.encode(torch.tensor([3.0, -1.0, 2.0]), Key(1)), BlockSpec(shape=(3,)))
        tensor([ 3., -1.,  2.])

    References:
        Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic, "QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding", 2017 (l2, buckets of 512: recipe `qsgd:BITS`). Yuchen Zhong, Cong Xie,
        Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive Methods and System", 2021
        (5 and 7 bits). Differs from both: codes of fixed width, not Elias codes or int8.
    """

    bits: Literal[2, 3, 4, 5, 6, 7, 8] = 5
    norm: Literal["max", "l2"] = "max"
    block: int | None = None

    def __post_init__(self) -> None:
        _check("LinearDithering", self.bits, self.norm, self.block)

    @property
    def levels(self) -> int:
        """L, the largest code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def stochastic(self) -> bool:
        """Always."""
        return True

    def layout(self, spec: BlockSpec) -> Layout:
        """Scales, then codes."""
        return _layout(spec, self.bits, self.block)

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        return Unbiased(dither_omega(min(self.block or spec.numel, spec.numel), 1 / self.levels, self.norm))

    def recipe(self) -> str:
        """`linear:BITS`, with `l2` and `block=N`; `qsgd:BITS` for the L2 norm of blocks."""
        if self.norm == "l2" and self.block is not None:
            return _recipe("qsgd", self.bits, "max", None if self.block == 512 else self.block)
        return _recipe("linear", self.bits, self.norm, self.block)

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass to find the scales, one to round and leave the residual."""
        return kernels.serving(jobs).encode_dither(
            jobs, bits=self.bits, block=self.block or 0, natural=False, l2=self.norm == "l2", threads=threads
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply codes by their scales."""
        kernels.serving(jobs).decode_dither(jobs, bits=self.bits, block=self.block or 0, natural=False, threads=threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class NaturalDithering(Compressor):
    r"""Rounds by chance to the norm times 0, 2^(1-L), ..., 1/2, 1: few bits span many magnitudes.

    With L = 2^(bits-1) - 1 and r = ||x||_max or ||x||_2 (`norm`) over the d values that share a scale, y_i = |x_i| / r
    lies between two neighbouring levels l <= y_i <= h and

        C(x)_i = sign(x_i) r h with probability (y_i - l) / (h - l), else sign(x_i) r l.

    Unbiased. With t = 2^(1-L) the lowest level, omega = max(1/8, (sqrt(1 + (d - 1) t^2) - 1) / 2) for the maximum: 1/8
    from 5 bits on for any partition. For the L2 norm, with a = sqrt(d) t, a - 1 where a >= 9/4, else 1/8 + 2 a^2 / 9.

    Wire: float32 scales r, one per block, then codes of `bits` bits packed as `BlockQuant`'s are: the highest bit is
    the sign, the others k: 2^(k - L), or 0 where k = 0. `bits` a value, and 32/block.

    Args:
        bits: 2 to 8, the sign included; 3 has the levels 0, 1/4, 1/2, 1.
        norm: "max" or "l2".
        block: values that share a scale, 32 to 65,536, even; None: all of the partition.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> from thinwire.random import Key
        >>> q = NaturalDithering(bits=3)
        >>> q.decode(q.encode(torch.tensor([4.0, -1.0, 2.0, 0.0]), Key(1)), BlockSpec(shape=(4,)))
        tensor([ 4., -1.,  2.,  0.])

    References:
        Samuel Horvath, Chen-Yu Ho, Ludovit Horvath, Atal Narayan Sahu, Marco Canini, Peter Richtarik, "Natural
        Compression for Distributed Deep Learning", 2022. Differs from the paper: the scale is not compressed; omega is
        the least that holds for the maximum, and for the L2 norm below the paper's 1/8 + a min(1, a).
    """

    bits: Literal[2, 3, 4, 5, 6, 7, 8] = 3
    norm: Literal["max", "l2"] = "max"
    block: int | None = None

    def __post_init__(self) -> None:
        _check("NaturalDithering", self.bits, self.norm, self.block)

    @property
    def levels(self) -> int:
        """L, the number of levels above 0."""
        return 2 ** (self.bits - 1) - 1

    @property
    def stochastic(self) -> bool:
        """Always."""
        return True

    def layout(self, spec: BlockSpec) -> Layout:
        """Scales, then codes."""
        return _layout(spec, self.bits, self.block)

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        d, lowest = min(self.block or spec.numel, spec.numel), 2.0 ** (1 - self.levels)
        return Unbiased(dither_omega(d, lowest, self.norm, base=1 / 8 if self.levels > 1 else 0.0))

    def recipe(self) -> str:
        """`natural:BITS`, with `l2` and `block=N`."""
        return _recipe("natural", self.bits, self.norm, self.block)

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass to find the scales, one to round and leave the residual."""
        return kernels.serving(jobs).encode_dither(
            jobs, bits=self.bits, block=self.block or 0, natural=True, l2=self.norm == "l2", threads=threads
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply levels by their scales."""
        kernels.serving(jobs).decode_dither(jobs, bits=self.bits, block=self.block or 0, natural=True, threads=threads)
