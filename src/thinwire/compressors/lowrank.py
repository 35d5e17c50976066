"""Low rank: two thin factors in place of a matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, NoContract
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.low_rank import effective_rank, matrix_shape
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_PRODUCTS = 2.0**-22  # what rounding in float32 products may add to the squared error, relative to ||M||^2


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank(Compressor):
    r"""Sends each matrix as the product of two thin factors, found by power iteration.

    A tensor is seen as the matrix M (m x n) of its first dimension by all the others, dimensions of 1 left out; a
    vector is one row. With r = min(m, n, `rank`) and a Q (n x r) of normal values, drawn anew every step,
    `num_iterations` times:

        P = orthonormal columns of M Q,   Q = M^T P;   then   C(M) = P Q^T = P P^T M.

    This is a projection, so it never adds error, and ||M - C(M)||^2 = ||M||^2 - ||Q||^2. No delta holds for every draw.
    On average over the draws C is Contractive with delta = r / min(m, n), which matrices whose singular values are
    equal reach; where they fall off, it keeps more, the more so the more iterations. Rounding takes
    2 u sqrt(r delta) + 9 r u^2 off it, u the unit roundoff of `value_dtype`; where that leaves nothing: NoContract.

    It needs whole matrices (`unit`). The plan sends one-dimensional parameters dense, and those that it would not at
    least halve.

    Wire: a float32 scale s, a power of two; then r m values of P and r n of Q, for M / s. So float16 neither overflows
    nor runs out of exponents. At rank 4 with float16, 0.5 bits a value of a 256 x 256 matrix, 0.052 of 768 x 3072.

    Args:
        rank: r, at least 1; higher sends more. Matrices that have fewer rows or columns are sent exactly, but for
            rounding.
        num_iterations: power iterations, at least 1; more keep more of a matrix whose singular values fall off, and
            read it twice each.
        value_dtype: torch.float32, torch.float16 or torch.bfloat16: of both factors.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> from thinwire.random import Key
        >>> q, x = LowRank(rank=1, value_dtype=torch.float32), torch.outer(torch.tensor([1.0, 2.0]), torch.ones(50))
        >>> spec = BlockSpec(shape=(2, 50))
        >>> torch.allclose(q.decode(q.encode(x, Key(1)), spec), x), q.nbytes(spec)
        (True, 212)

    References:
        Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization", 2019. Differs from the paper: each sender's matrix has factors of its own, so that
        they travel through any aggregator, where PowerSGD sums P and then Q over ranks; what is owed is what the
        sender's own factors left out; and Q starts anew every step instead of from the last one, since a compressor
        keeps no state. Two iterations make up for the missing warm start in part.
    """

    rank: int
    num_iterations: int = 2
    value_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RecipeError(f"LowRank: expected a rank of at least 1, got {self.rank}")
        if self.num_iterations < 1:
            raise RecipeError(f"LowRank: expected at least 1 iteration, got {self.num_iterations}")
        if self.value_dtype not in _NAMES:
            raise RecipeError(
                f"LowRank: expected value_dtype torch.float32, torch.float16 or torch.bfloat16, got {self.value_dtype}"
            )

    @property
    def unit(self) -> Literal["slice", "matrix"]:
        """Whole matrices."""
        return "matrix"

    @property
    def stochastic(self) -> bool:
        """Encoding draws the first Q."""
        return True

    def layout(self, spec: BlockSpec) -> Layout:
        """The scale, then both factors."""
        (m, n), r = matrix_shape(spec.shape), effective_rank(spec.shape, self.rank)
        return Layout.of(scale=(torch.float32, (1,)), p=(self.value_dtype, (r, m)), q=(self.value_dtype, (r, n)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class.

        With M = U S V^T, P spans what U S^(2 `num_iterations` - 1) Z does, Z = V^T Q normal whatever V is. Let w_i be
        the mean share of u_i in that span: the w_i sum to r, and exchanging z_i with z_j shows that w_i >= w_j where
        s_i >= s_j. So ||P^T M||^2 = sum_i w_i s_i^2 >= r / min(m, n) ||M||^2 on average (Chebyshev's sum inequality).
        """
        shape = spec.shape if spec.numel else (1,)
        m, n = matrix_shape(shape)
        r, u = effective_rank(shape, self.rank), _UNIT_ROUNDOFF[self.value_dtype]
        share = r / min(m, n)
        delta = share - 2 * u * math.sqrt(r * share) - 9 * r * u**2 - _PRODUCTS
        if delta <= 0:
            return NoContract("rounding of the factors may outweigh what they hold")
        # No entry of a projection exceeds the norm of its column.
        return Contractive(delta, smallest=SMALLEST_NORMAL, largest=2.0**127 / math.sqrt(m))

    def recipe(self) -> str:
        """`lowrank:RANK`, with what differs from the defaults."""
        extras = [f"num_iterations={self.num_iterations}"] if self.num_iterations != 2 else []
        extras += [_NAMES[self.value_dtype]] if self.value_dtype != torch.float16 else []
        return ":".join(["lowrank", str(self.rank), *extras])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Iterate, and leave what lies outside the span of P."""
        return kernels.serving(jobs).encode_low_rank(
            jobs,
            shapes=[spec.shape for spec in specs],
            rank=self.rank,
            num_iterations=self.num_iterations,
            dtype=self.value_dtype,
            threads=threads,
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Multiply."""
        kernels.serving(jobs).decode_low_rank(
            jobs, shapes=[spec.shape for spec in specs], rank=self.rank, dtype=self.value_dtype, threads=threads
        )
