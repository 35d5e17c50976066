"""Global-QSGD: dithering by one norm that all senders agree on, so that their bytes can be summed or reduced."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from thinwire import kernels
from thinwire.compressors.base import MAX_SUMMANDS, Compressor
from thinwire.compressors.contract import Contract, Unbiased, dither_omega
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob, ReduceJob
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

Norm = Literal["max", "l2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _GlobalNorm(Compressor):
    """What both kinds share: M = ||X||_{q,p}, with q = `norm` inside a block and p = `across` over senders."""

    norm: Norm = "max"
    across: Norm = "max"
    summands: int = 1

    def __post_init__(self) -> None:
        for name, value in (("norm", self.norm), ("across", self.across)):
            if value not in ("max", "l2"):
                raise RecipeError(f"{type(self).__name__}: expected {name} 'max' or 'l2', got {value!r}")
        if not 1 <= self.summands <= self.max_summands:
            raise RecipeError(
                f"{type(self).__name__}: expected 1 to {self.max_summands} summands, got {self.summands}{self._instead}"
            )

    @property
    def stochastic(self) -> bool:
        """Always."""
        return True

    @property
    def statistic_reduction(self) -> Literal["max", "sum"]:
        """The largest norm, or the sum of squared ones."""
        return "max" if self.across == "max" else "sum"

    @property
    def max_summands(self) -> int:
        """What counts of merged blocks have room for."""
        return MAX_SUMMANDS

    @property
    def _instead(self) -> str:
        """What to do about too many summands."""
        return ""

    def with_summands(self, count: int) -> Self:
        """Return the settings for `count` senders."""
        return dataclasses.replace(self, summands=count)

    def num_statistics(self, spec: BlockSpec) -> int:
        """One norm a partition."""
        return 1

    def statistic_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """One pass, without a write."""
        kernels.serving(jobs).shared_norms(jobs, block=0, l2=self.norm == "l2", squared=self._squared, threads=threads)

    @property
    def _squared(self) -> bool:
        return self.across == "l2"

    @property
    def _bound(self) -> Norm:
        """Whose omega holds: no such norm is above the L2 norm of all senders' values together."""
        return "max" if self.norm == "max" and (self.across == "max" or self.summands == 1) else "l2"

    def _words(self) -> list[str]:
        return (["l2"] if self.norm == "l2" else []) + (["across-l2"] if self.across == "l2" else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalLinear(_GlobalNorm):
    r"""Rounds by chance to evenly spaced levels of a norm that all senders share; codes add up on the wire.

    With n = `summands` senders, M = ||X||_{q,p} the norm over all of them (q = `norm` inside a block, p = `across` over
    senders) and L levels a side:

        s = M / L,   C(x)_j = floor(x_j / s + u_j) s   with u_j uniform in (0, 1), private to the sender.

    Plain: L = floor((2^(bits-1) - 1) / n), so that n codes add up without overflow, by any integer sum, and the decoded
    sum is the sum of what would be decoded. `halving`: L = 2^(bits-1) - 1 whatever n, and blocks are merged pairwise
    (`reduce_`), a code becoming the mean of two weighted by their counts, rounded by chance; the result stands for the
    mean.

    Unbiased. With d the values of a partition, omega holds for all n blocks together, sum_i E ||C(x_i) - x_i||^2 <=
    omega sum_i ||x_i||^2, so that the mean errs by at most theta / n sum_i ||x_i||^2 with theta = omega / n: that of
    `LinearDithering` for n d values (of its L2 norm, unless q and p are both "max"). With halving, where merges form a
    balanced tree, omega grows by n^2 min(d, L sqrt(n d)) / (2 L^2).

    Wire: codes in two's complement, one a byte; of 4 bits, byte j of h = ceil(d / 2) is the number code_j + 16
    code_{j+h}, whose sums are read in the same way. `bits` a value, and one float32 a partition in the vector of norms.

    Args:
        bits: 8 or 4, the sign included.
        halving: merge pairs instead of adding codes up.
        norm: "max" or "l2".
        across: "max", or "l2", for which squared norms are summed; those below 2^-126 count as that, and those beyond
            float32 are an overflow.
        summands: n; a plan sets it to the world size. At most 127 for 8 bits and 7 for 4 unless halving.

    Raises:
        RecipeError: a field out of range, or more summands than codes have room for.

    Example:
        >>> from thinwire.random import Key
        >>> q, spec = GlobalLinear(bits=8, summands=2), BlockSpec(shape=(2,))
        >>> a, b = torch.tensor([63.0, 1.0]), torch.tensor([-3.0, 2.0])
        >>> shared = torch.maximum(q.statistic(a), q.statistic(b))
        >>> encoded = [q.encode(x, Key(1, stream=rank), shared=shared) for rank, x in enumerate((a, b))]
        >>> q.decode(encoded[0] + encoded[1], spec, shared=shared)
        tensor([60.,  3.])

    References:
        Jihao Xin, Marco Canini, Peter Richtarik, Samuel Horvath, "Global-QSGD: Practical Floatless Quantization for
        Distributed Learning with Theoretical Guarantees", 2023. Differs from the paper's code: L is a whole number, so
        that no sum wraps around; one norm a partition, not one a bucket, in which small layers would drown; the sum is
        divided by n after decoding.
    """

    bits: Literal[8, 4] = 8
    halving: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise RecipeError(f"GlobalLinear: expected 8 or 4 bits, got {self.bits}")
        _GlobalNorm.__post_init__(self)

    @property
    def _largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def max_summands(self) -> int:
        """As many as one level each has room for, unless halved."""
        return MAX_SUMMANDS if self.halving else self._largest

    @property
    def _instead(self) -> str:
        return "; use halving" + (", or 8 bits" if self.bits == 4 else "") if not self.halving else ""

    @property
    def levels(self) -> int:
        """L, the largest code of one sender."""
        return self._largest if self.halving else self._largest // self.summands

    @property
    def linear(self) -> torch.dtype | None:
        """Codes add up as int8, unless they are halved."""
        return None if self.halving else torch.int8

    @property
    def reducible(self) -> Literal["sum", "mean"] | None:
        """The mean, with halving."""
        return "mean" if self.halving else None

    def layout(self, spec: BlockSpec) -> Layout:
        """Codes."""
        return Layout.of(codes=(torch.int8, (-(-spec.numel * self.bits // 8),)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        n, d = self.summands, spec.numel
        omega = dither_omega(n * d, 1 / self.levels, self._bound)
        if self.halving and n > 1:
            omega += n**2 * min(d, self.levels * (n * d) ** 0.5) / (2 * self.levels**2)
        return Unbiased(omega)

    def recipe(self) -> str:
        """`global:BITS`, with `halving`, `l2` and `across-l2`."""
        return ":".join(["global", str(self.bits), *(["halving"] if self.halving else []), *self._words()])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass."""
        return kernels.serving(jobs).encode_global_linear(
            jobs, bits=self.bits, levels=self.levels, squared=self._squared, threads=threads
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply codes by the step."""
        kernels.serving(jobs).decode_global_linear(
            jobs, bits=self.bits, levels=self.levels, squared=self._squared, threads=threads
        )

    def reduce_jobs(self, jobs: Sequence[ReduceJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Weighted means of codes, rounded by chance."""
        if not self.halving:
            raise NotImplementedError(f"{self.recipe()}: its codes are added; settings with halving are reduced")
        kernels.serving(jobs).reduce_global_linear(jobs, bits=self.bits, threads=threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalExponential(_GlobalNorm):
    r"""Rounds by chance to powers of two of a norm that all senders share: a sign and an exponent, reduced pairwise.

    With n = `summands` senders, M = ||X||_{q,p} the norm over all of them, H = ceil(log2 n) and L = 127 - H, |x_j| / M
    lies between two neighbours l and h of 0, 2^(1-L), ..., 1/2, 1:

        C(x)_j = sign(x_j) M h with probability (|x_j| / M - l) / (h - l), else sign(x_j) M l.

    `reduce_` adds two blocks without decoding: with exponents a >= b, d = a - b, the sum of equal signs has exponent
    a + 1 with probability 2^-d, else a; of different signs it is 0 where d = 0, else a - 1 with probability 2^(1-d),
    else a. The result stands for the sum. The H codes above L are head-room for it: a tree no deeper than H never runs
    out of them (a deeper one stops at the highest). Each rounding has 16 random bits: operands more than 2^16 apart
    leave the larger one as it is.

    Unbiased. With N = 2^H, for blocks merged in a balanced tree, the mean errs by at most theta / n sum_i ||x_i||^2,
    theta = omega / n = (N / n) / 8 sum_{k=0..H} (9/16)^k: 1/8 for one block, and never above 2/7 N / n. It does not
    shrink with n: the result is one power of two a value.

    Wire: one byte a value: bit 7 the sign, the others c: 2^(c - L) M, or 0 where c = 0, whatever the sign. 8 bits a
    value, and one float32 a partition in the vector of norms.

    Args:
        norm: "max" or "l2".
        across: as for `GlobalLinear`.
        summands: n; a plan sets it to the world size.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> from thinwire.random import Key
        >>> q, spec = GlobalExponential(summands=2), BlockSpec(shape=(3,))
        >>> a, b = torch.tensor([4.0, -1.0, 2.0]), torch.tensor([4.0, 0.0, -1.0])
        >>> shared = torch.maximum(q.statistic(a), q.statistic(b))
        >>> encoded = [q.encode(x, Key(1, stream=rank), shared=shared) for rank, x in enumerate((a, b))]
        >>> q.decode(q.reduce_(*encoded, spec, Key(1, stream=2)), spec, shared=shared)
        tensor([ 8., -1.,  1.])

    References:
        Jihao Xin, Marco Canini, Peter Richtarik, Samuel Horvath, "Global-QSGD: Practical Floatless Quantization for
        Distributed Learning with Theoretical Guarantees", 2023. Differs from the paper's code: head-room for any
        number of senders; values below the lowest level are rounded by chance, not up; the bound on theta is ours.
    """

    def __post_init__(self) -> None:
        _GlobalNorm.__post_init__(self)

    @property
    def _depth(self) -> int:
        """H, how often a sum may double."""
        return (self.summands - 1).bit_length()

    @property
    def levels(self) -> int:
        """L, the code of M."""
        return 127 - self._depth

    @property
    def reducible(self) -> Literal["sum", "mean"]:
        """The sum."""
        return "sum"

    def layout(self, spec: BlockSpec) -> Layout:
        """Codes."""
        return Layout.of(codes=(torch.uint8, (spec.numel,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        roundings = sum((9 / 16) ** k for k in range(self._depth + 1))
        lowest = dither_omega(self.summands * spec.numel, 2.0 ** (1 - self.levels), self._bound, base=1 / 8)
        return Unbiased(max(lowest, 2**self._depth * roundings / 8))

    def recipe(self) -> str:
        """`globalexp`, with `l2` and `across-l2`."""
        return ":".join(["globalexp", *self._words()])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass."""
        return kernels.serving(jobs).encode_global_exponential(
            jobs, levels=self.levels, squared=self._squared, threads=threads
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply levels by M."""
        kernels.serving(jobs).decode_global_exponential(
            jobs, levels=self.levels, squared=self._squared, threads=threads
        )

    def reduce_jobs(self, jobs: Sequence[ReduceJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Sums of powers of two, rounded by chance."""
        kernels.serving(jobs).reduce_global_exponential(jobs, threads=threads)
