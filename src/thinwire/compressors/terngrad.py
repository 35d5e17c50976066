"""TernGrad: every value becomes -s, 0 or +s, by chance."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import Contract, NoContract, Unbiased, dither_omega
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.ternary import ternary_nbytes
from thinwire.spec import BlockSpec
from thinwire.wire import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class TernGrad(Compressor):
    r"""Sends -1, 0 or 1 for every value, five of them in a byte, and one scale.

    Over the d values that share a scale s = max_i |x_i|:

        C(x)_i = sign(x_i) s with probability |x_i| / s, else 0.

    Unbiased, with omega = (sqrt(d) - 1) / 2, reached by one value of 1 and d - 1 of 1 / (sqrt(d) + 1); of a given x it
    is s ||x||_1 / ||x||_2^2 - 1. With `block`, d is at most that.

    With `clip` = c the scale is s = min(max_i |x_i|, c sigma), sigma = ||x||_2 / sqrt(d), and values beyond s count as
    s: less noise for a bias, which feedback must make up for. No contract: one value among zeros is cut to c / sqrt(d)
    of itself. Of Gaussian values the error is 0.27 ||x||^2 at c = 1, and 1.0 ||x||^2, no contraction, at c = 2.5.

    With `shared` the scale is s = max_{k,i} |x_{k,i}| over the blocks x_k of all n = `summands` senders, agreed on
    beforehand: codes of all senders count in one unit, so that their sum is that of whole numbers from -n to n. Then
    omega is over all of them together, with n d in the place of d: sum_k E ||C(x_k) - x_k||^2 <=
    omega sum_k ||x_k||^2. Packed codes do not add up on the wire; those of `GlobalLinear` with few levels do.

    Wire: float32 scales s, one per block, unless `shared`; then per block of m codes ceil(m/5) bytes in base 3: byte j
    holds codes j, j + ceil(m/5), ..., each modulo 3, the first worth 1, the fifth 81. Bytes above 242 are refused. 1.6
    bits a value, and 32/block, with `shared` in the vector of scales that is reduced.

    Args:
        block: values that share a scale, 32 to 65,536, even; None: all of the partition.
        clip: c, at least 1, or None: values are not clipped. None with `shared`.
        shared: whether all senders use one scale.
        summands: n, with `shared`; a plan sets it to the world size. At most 65,536.

    Raises:
        RecipeError: a field out of range, `clip` together with `shared`, or `summands` without.

    Example:
        >>> from thinwire.random import Key
        >>> q = TernGrad()
        >>> q.decode(q.encode(torch.tensor([3.0, 0.0, -3.0]), Key(1)), BlockSpec(shape=(3,)))
        tensor([ 3.,  0., -3.])
        >>> q, a, b = TernGrad(shared=True), torch.tensor([4.0, -4.0, 0.0]), torch.zeros(3)
        >>> shared = torch.maximum(q.statistic(a), q.statistic(b))
        >>> q.decode(q.encode(a, Key(1), shared=shared), BlockSpec(shape=(3,)), shared=shared)
        tensor([ 4., -4.,  0.])

    References:
        Wei Wen, Cong Xu, Feng Yan, Chunpeng Wu, Yandan Wang, Yiran Chen, Hai Li, "TernGrad: Ternary Gradients to Reduce
        Communication in Distributed Deep Learning", 2017. Differs from the paper: a scale for every partition or block,
        not for every layer; each rank's own unless `shared`, where the paper has scalers shared by all; sigma is about
        0, not about the mean; the paper clips at 2.5 without feedback, also a shared scale.
    """

    block: int | None = None
    clip: float | None = None
    shared: bool = False
    summands: int = 1

    def __post_init__(self) -> None:
        if self.block is not None and (not 32 <= self.block <= 65536 or self.block % 2):
            raise RecipeError(f"TernGrad: expected an even block from 32 to 65536, or None, got {self.block}")
        if self.clip is not None and not 1.0 <= self.clip < float("inf"):
            raise RecipeError(f"TernGrad: expected a finite clip of at least 1, or None, got {self.clip}")
        if self.shared and self.clip is not None:
            raise RecipeError(f"TernGrad: expected no clip with a shared scale, got {self.clip}")
        if not 1 <= self.summands <= (self.max_summands or 1):
            raise RecipeError(f"TernGrad: expected 1 to 65536 summands, 1 unless shared, got {self.summands}")

    @property
    def stochastic(self) -> bool:
        """Always."""
        return True

    @property
    def statistic_reduction(self) -> Literal["max"] | None:
        """The largest magnitude, where the scale is shared."""
        return "max" if self.shared else None

    @property
    def max_summands(self) -> int | None:
        """As of other kinds with a shared scale."""
        return 2**16 if self.shared else None

    def with_summands(self, count: int) -> Self:
        """Return the settings for `count` senders."""
        return dataclasses.replace(self, summands=count) if self.shared else self

    def num_statistics(self, spec: BlockSpec) -> int:
        """One magnitude a block, where the scale is shared."""
        if not self.shared:
            return 0
        return -(-spec.numel // self.block) if self.block else 1

    def statistic_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """One pass, without a write."""
        if not self.shared:
            raise NotImplementedError(f"{self.recipe()} has no statistic")
        kernels.serving(jobs).shared_norms(jobs, block=self.block or 0, l2=False, squared=False, threads=threads)

    def layout(self, spec: BlockSpec) -> Layout:
        """Scales, unless they are shared, then codes."""
        width = self.block or max(spec.numel, 1)
        codes = (torch.uint8, (ternary_nbytes(spec.numel, width),))
        if self.shared:
            return Layout.of(codes=codes)
        return Layout.of(scales=(torch.float32, (-(-spec.numel // width),)), codes=codes)

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        if self.clip is not None:
            return NoContract("clipping is biased")
        return Unbiased(dither_omega(self.summands * min(self.block or spec.numel, spec.numel), 1.0, "max"))

    def recipe(self) -> str:
        """`terngrad`, with `shared`, `block=N` and `clip=C`."""
        extras = ["shared"] if self.shared else []
        extras += [f"block={self.block}"] if self.block else []
        extras += [f"clip={repr(float(self.clip)).removesuffix('.0')}"] if self.clip is not None else []
        return ":".join(["terngrad", *extras])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass to find the scales, unless they are shared, one to round and leave the residual."""
        return kernels.serving(jobs).encode_ternary(
            jobs, block=self.block or 0, clip=float(self.clip or 0.0), shared=self.shared, threads=threads
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply codes by their scales. Raises `WireError` on bytes above 242, before anything is written."""
        kernels.serving(jobs).decode_ternary(jobs, block=self.block or 0, shared=self.shared, threads=threads)
