"""Top-k by chunks that all senders agree on, so that values add up on the wire and no index travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import Contract, Contractive
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

_NAMES = {torch.float32: "fp32", torch.float16: "fp16"}
MAX_CHUNK = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKC(Compressor):
    r"""Sends the k chunks of each partition that are largest over all senders together.

    A chunk is `chunk` consecutive elements, the last one shorter; there are c = ceil(d / chunk) of them, and
    k = max(1, floor(density * c)) (0 for an empty partition). The statistic of a sender are the squared L2 norms of its
    chunks, float32; their sum over senders is what all choose by: the k largest, ties to the lowest. C(x)_j = x_j for
    the elements of those, rounded to `value_dtype`, 0 elsewhere. A sent element's residual is its rounding error.

    Contractive with delta = k/c over all n senders together: sum_i ||C(x_i) - x_i||^2 <= (1 - delta) sum_i ||x_i||^2.
    Of one sender nothing is promised: what the others do not have is not sent. Needs feedback, as top-k does.

    Squared norms below 2^-126 count as that, and those beyond float32 are an overflow, as float16 values beyond 65504
    are, each or their sum.

    Wire: k * chunk values, by index; zeros where the last chunk is shorter. All-reduces add them up as they are. At
    density 0.01 with float16, 0.16 bits a value, and 32 / chunk bits a value in the vector of norms.

    Args:
        density: k/c, in (0, 1]; lower sends less.
        chunk: elements a chunk, 8 to 65,536; more make a shorter vector of norms, and coarser choices.
        value_dtype: torch.float16 or torch.float32.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> q, spec = TopKC(density=0.5, chunk=8), BlockSpec(shape=(16,))
        >>> a, b = torch.arange(16.0) / 16, torch.arange(16.0, 0.0, -1.0)
        >>> shared = q.statistic(a) + q.statistic(b)
        >>> q.decode(q.encode(b, shared=shared), spec, shared=shared).nonzero().view(-1).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]

    References:
        Wenchen Han, Shay Vargaftik, Michael Mitzenmacher, Brad Karp, Ran Ben Basat, "Beyond Throughput and Compression
        Ratios: Towards High End-to-end Utility of Gradient Compression", 2024 (TopK-Chunked). Differs from the paper:
        exactly k chunks of each partition, not of the whole gradient.
    """

    density: float = 0.01
    chunk: int = 64
    value_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise RecipeError(f"TopKC: expected a density in (0, 1], got {self.density}")
        if not 8 <= self.chunk <= MAX_CHUNK:
            raise RecipeError(f"TopKC: expected a chunk from 8 to {MAX_CHUNK}, got {self.chunk}")
        if self.value_dtype not in _NAMES:
            raise RecipeError(f"TopKC: expected value_dtype torch.float16 or torch.float32, got {self.value_dtype}")

    @property
    def statistic_reduction(self) -> Literal["sum"]:
        """Squared norms add up."""
        return "sum"

    @property
    def linear(self) -> torch.dtype:
        """Values of the same chunks add up as they are."""
        return self.value_dtype

    def num_statistics(self, spec: BlockSpec) -> int:
        """C, one number a chunk."""
        return -(-spec.numel // self.chunk)

    def num_kept(self, numel: int) -> int:
        """Return k, the chunks that are sent of `numel` elements."""
        c = -(-numel // self.chunk)
        return min(c, max(1, int(self.density * c)))

    def holds_back(self, spec: BlockSpec) -> bool:
        """Below density 1."""
        return self.num_kept(spec.numel) < self.num_statistics(spec)

    def layout(self, spec: BlockSpec) -> Layout:
        """The values."""
        return Layout.of(values=(self.value_dtype, (self.num_kept(spec.numel) * self.chunk,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        delta = self.num_kept(spec.numel) / max(self.num_statistics(spec), 1)
        if self.value_dtype == torch.float16:
            return Contractive(delta * (1 - 2.0**-22), smallest=2.0**-14, largest=65504.0)
        return Contractive(delta, smallest=2.0**-60, largest=2.0**50)  # whose squares float32 holds, and sums of them

    def recipe(self) -> str:
        """`topkc:DENSITY`, with what differs from the defaults."""
        extras = [f"chunk={self.chunk}"] if self.chunk != 64 else []
        extras += ["fp32"] if self.value_dtype == torch.float32 else []
        return ":".join(["topkc", repr(float(self.density)).removesuffix(".0"), *extras])

    def statistic_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """One pass, without a write."""
        kernels.serving(jobs).shared_norms(jobs, block=self.chunk, l2=True, squared=True, threads=threads)

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Copy chunks; the residual is q with the sent part taken out."""
        k = [self.num_kept(spec.numel) for spec in specs]
        return kernels.serving(jobs).encode_top_chunks(
            jobs, k=k, dtype=self.value_dtype, chunk=self.chunk, threads=threads
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Put chunks back."""
        k = [self.num_kept(spec.numel) for spec in specs]
        kernels.serving(jobs).decode_top_chunks(jobs, k=k, dtype=self.value_dtype, chunk=self.chunk, threads=threads)
