"""Sparse kinds: a few values and where they belong."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import Contract, Contractive
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

MAX_NUMEL = 65536  # what a 16-bit index can address


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(Compressor):
    r"""Sends exactly the k values of largest magnitude of each partition.

    k = max(1, floor(density * n)) (0 for an empty block). C(x)_i = x_i for the k largest |x_i|, ties to the lowest
    index, 0 elsewhere. Contractive with delta = k/n; with float16 values each is rounded once more, and a value above
    65504 counts as a non-finite step. A sent element's residual is its rounding error.

    Wire: k values, then k 16-bit indices, both by ascending index: 4 bytes a kept value with float16 values, 6 with
    float32. At density 0.01 with float16, 0.32 bits a value.

    Args:
        density: k/n, in (0, 1]; lower sends less.
        value_dtype: torch.float16 or torch.float32.

    Raises:
        RecipeError: a field out of range, or a block of more than 65,536 elements.

    Example:
        >>> q = TopK(density=0.5)
        >>> q.decode(q.encode(torch.tensor([1.0, -3.0, 2.0, 3.0])), BlockSpec(shape=(4,)))
        tensor([ 0., -3.,  0.,  3.])

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021. Differs from the paper: 16-bit indices and float16 values (4 bytes a kept value where
        the released code sends 8); ties and order are defined.
    """

    density: float = 0.01
    value_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise RecipeError(f"TopK: expected a density in (0, 1], got {self.density}")
        if self.value_dtype not in (torch.float16, torch.float32):
            raise RecipeError(f"TopK: expected value_dtype torch.float16 or torch.float32, got {self.value_dtype}")

    def k(self, numel: int) -> int:
        """Return how many of `numel` values are sent."""
        return min(numel, max(1, int(self.density * numel)))

    def layout(self, spec: BlockSpec) -> Layout:
        """Values, then indices."""
        if spec.numel > MAX_NUMEL:
            raise RecipeError(
                f"TopK: expected at most {MAX_NUMEL} elements a block (16-bit indices), got {spec.numel}; "
                f"lower partition_numel"
            )
        k = self.k(spec.numel)
        return Layout.of(values=(self.value_dtype, (k,)), indices=(torch.int16, (k,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        delta = self.k(spec.numel) / max(spec.numel, 1)
        if self.value_dtype == torch.float16:
            return Contractive(delta * (1 - 2.0**-22), smallest=2.0**-14, largest=65504.0)
        return Contractive(delta)

    def recipe(self) -> str:
        """`topk:DENSITY`, with `fp32` when values are float32."""
        return f"topk:{repr(float(self.density)).removesuffix('.0')}" + (
            ":fp32" if self.value_dtype == torch.float32 else ""
        )

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Select by magnitude; the residual is q with the sent part taken out."""
        return kernels.serving(jobs).encode_top_k(
            jobs, k=[self.k(spec.numel) for spec in specs], dtype=self.value_dtype, threads=threads
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Scatter."""
        kernels.serving(jobs).decode_top_k(
            jobs, k=[self.k(spec.numel) for spec in specs], dtype=self.value_dtype, threads=threads
        )
