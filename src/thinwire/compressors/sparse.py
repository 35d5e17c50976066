"""Sparse kinds: a few values and where they belong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, NoContract
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.top_k_layout import MAX_NUMEL, NATURAL, top_k_layout
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

ValueDtype = torch.dtype | Literal["natural"]

DEFAULT_DENSITY = 0.01
# What rounding leaves of the squared norm, and the magnitudes for which that holds.
_ROUNDING: dict[ValueDtype, tuple[float, float, float]] = {
    torch.float32: (1.0, 0.0, float("inf")),
    torch.float16: (1 - 2.0**-22, 2.0**-14, 65504.0),
    torch.bfloat16: (1 - 2.0**-16, SMALLEST_NORMAL, 3.38e38),
    "natural": (8 / 9, 2.0**-90, 2.0**36),
}
_NAMES: dict[ValueDtype, str] = {torch.float32: "fp32", torch.bfloat16: "bf16", "natural": "natural"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(Compressor):
    r"""Sends exactly k values of each partition, those of the largest magnitude.

    k = `k`, or max(1, floor(density * n)); at most n. C(x)_i = round(x_i) for the k selected i, 0 elsewhere. A sent
    element's residual is its rounding error.

    `selection` decides which k, always the same ones on every backend:

        "exact"    the k largest |x_i|, ties to the lowest index. Contractive with delta = k/n.
        "bisect"   the k-th largest magnitude is searched by halving until 8 bits of its fraction are known; what lies
                   in the last interval is as good as equal, and taken evenly spread over the partition. Contractive
                   with delta = k/n / (1 + 2^-8)^2.
        "sampled"  a sample that holds about 64 of the k gives two bounds, two standard deviations apart on either
                   side; all above both are taken, and those between them evenly spread. NoContract: a sample may miss
                   what is large.

    `value_dtype` multiplies delta by what rounding to nearest leaves: float32 1, float16 1 - 2^-22 (a value above
    65504 counts as a non-finite step), bfloat16 1 - 2^-16, "natural" 8/9. A natural value is one byte, a sign and a
    7-bit exponent: +-2^e with e from -90 to 36, the nearest power of two, half-way away from zero; smaller values are
    sent as 0, larger ones count as a non-finite step.

    Wire: k values and their indices, both by ascending index; wider numbers first. Indices have 16 bits, or 12 where
    n <= 4096, or are a bitmap of n bits: whichever makes the block smallest, 16 bits where equal. With `chunked` they
    are a 16-bit count per 4096 elements, and 12 bits each. At density 0.01 of 65,536 float16 values, 0.32 bits a
    value, or 0.28 chunked.

    Args:
        density: k/n, in (0, 1]; lower sends less. 0.01 where k is not given either.
        k: values to send of each partition, at least 1; instead of density.
        value_dtype: torch.float32, torch.float16, torch.bfloat16 or "natural".
        selection: "exact", "bisect" or "sampled".
        chunked: whether indices count from the start of their 4096 elements.

    Raises:
        RecipeError: a field out of range, density and k both given, or a block of more than 65,536 elements.

    Example:
        >>> q = TopK(density=0.5)
        >>> q.decode(q.encode(torch.tensor([1.0, -3.0, 2.0, 3.0])), BlockSpec(shape=(4,)))
        tensor([ 0., -3.,  0.,  3.])
        >>> TopK(k=1, value_dtype="natural").nbytes(BlockSpec(shape=(24,)))  # the value, 12 bits, padding
        4

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021. Differs from the paper: 16-bit indices and float16 values (4 bytes a kept value where
        the released code sends 8); ties and order are defined.
        Samuel Horvath, Chen-Yu Ho, Ludovit Horvath, Atal Narayan Sahu, Marco Canini, Peter Richtarik, "Natural
        Compression for Distributed Deep Learning", 2022 (natural values). Differs from the paper: rounded to nearest,
        not stochastically, since top-k is biased anyway and runs under error feedback.
        Shaohuai Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", 2021
        (bisect). Differs from the paper: halves the bits of the magnitude instead of the range from mean to maximum,
        and fills up evenly instead of from a random run.
        Yujun Lin, Song Han, Huizi Mao, Yu Wang, William J. Dally, "Deep Gradient Compression: Reducing the
        Communication Bandwidth for Distributed Training", 2018 (sampled). Differs from the paper: sends exactly k,
        without trying other thresholds.
    """

    density: float | None = None
    k: int | None = None
    value_dtype: ValueDtype = torch.float16
    selection: Literal["exact", "sampled", "bisect"] = "exact"
    chunked: bool = False

    def __post_init__(self) -> None:
        if self.k is None:
            if self.density is None:
                object.__setattr__(self, "density", DEFAULT_DENSITY)
            elif not 0.0 < self.density <= 1.0:
                raise RecipeError(f"TopK: expected a density in (0, 1], got {self.density}")
        elif self.density is not None:
            raise RecipeError(f"TopK: expected a density or k, got density {self.density} and k {self.k}")
        elif self.k < 1:
            raise RecipeError(f"TopK: expected k of at least 1, got {self.k}")
        if self.value_dtype not in _ROUNDING:
            raise RecipeError(
                "TopK: expected value_dtype torch.float32, torch.float16, torch.bfloat16 or 'natural', got "
                f"{self.value_dtype!r}"
            )
        if self.selection not in ("exact", "sampled", "bisect"):
            raise RecipeError(f"TopK: expected selection 'exact', 'sampled' or 'bisect', got {self.selection!r}")

    def num_kept(self, numel: int) -> int:
        """Return how many of `numel` values are sent."""
        if self.k is not None:
            return min(numel, self.k)
        assert self.density is not None
        return min(numel, max(1, int(self.density * numel)))

    @property
    def _wire_dtype(self) -> torch.dtype:
        return NATURAL if isinstance(self.value_dtype, str) else self.value_dtype

    def holds_back(self, spec: BlockSpec) -> bool:
        """Below density 1."""
        return self.num_kept(spec.numel) < spec.numel

    def layout(self, spec: BlockSpec) -> Layout:
        """Values and indices, in the smallest form."""
        if spec.numel > MAX_NUMEL:
            raise RecipeError(
                f"TopK: expected at most {MAX_NUMEL} elements a block (16-bit indices), got {spec.numel}; "
                "lower partition_numel; where the other hop needs whole matrices, choose another kind for one of them"
            )
        return top_k_layout(spec.numel, self.num_kept(spec.numel), self._wire_dtype, self.chunked)

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        delta = self.num_kept(spec.numel) / max(spec.numel, 1)
        kept, smallest, largest = _ROUNDING[self.value_dtype]
        if self.selection == "sampled" and delta < 1.0:
            return NoContract("a sample may miss the largest values")
        if self.selection == "bisect" and delta < 1.0:
            delta, smallest = delta / (1 + 2.0**-8) ** 2, max(smallest, SMALLEST_NORMAL)
        return Contractive(delta * kept, smallest=smallest, largest=largest)

    def recipe(self) -> str:
        """`topk:DENSITY` or `topk:k=K`, with what differs from the defaults."""
        kept = f"k={self.k}" if self.density is None else repr(float(self.density)).removesuffix(".0")
        extras = [_NAMES[self.value_dtype]] if self.value_dtype in _NAMES else []
        extras += [self.selection] if self.selection != "exact" else []
        extras += ["chunked"] if self.chunked else []
        return ":".join(["topk", kept, *extras])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Select by magnitude; the residual is q with the sent part taken out."""
        return kernels.serving(jobs).encode_top_k(
            jobs,
            k=[self.num_kept(spec.numel) for spec in specs],
            dtype=self._wire_dtype,
            selection=self.selection,
            chunked=self.chunked,
            threads=threads,
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Scatter."""
        kernels.serving(jobs).decode_top_k(
            jobs,
            k=[self.num_kept(spec.numel) for spec in specs],
            dtype=self._wire_dtype,
            chunked=self.chunked,
            threads=threads,
        )
