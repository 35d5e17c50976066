"""Random-k: values at random places that all ranks draw alike, so that no index travels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, NoContract, Unbiased
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
MAX_BLOCK = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomK(Compressor):
    r"""Sends k of the d units of each partition, the same ones on every rank and on both hops, new ones every step.

    A unit is `block` consecutive elements, the last one shorter: d = ceil(n / block), k = max(1, floor(density * d))
    (0 for an empty partition). The k units are drawn without replacement from the shared key, every subset equally
    likely. C(x)_i = x_i for the elements of those, 0 elsewhere: Contractive with delta = k/d, on average over the keys;
    float16 or bfloat16 values are rounded once more, and overflow of float16 counts as a non-finite step. A sent
    element's residual is its rounding error.

    `scaled` multiplies by d/k: Unbiased with omega = d/k - 1, to be used without feedback and in one hop only, since
    both hops share the mask.

    `rotating` takes turns instead: with P = round(1/density), at step t the units u with u % P = t % P, so that every
    coordinate is sent once in P steps; k = ceil(d / P). NoContract: what a step leaves out may be all there is.

    Wire: k * block values, by index; zeros where the last unit, or the last turn, is shorter. At density 0.01 with
    float16, 0.16 bits a value.

    Args:
        density: k/d, in (0, 1]; lower sends less.
        block: elements a unit, 1 to 65,536; more make longer runs of memory, and coarser masks.
        rotating: whether units take turns.
        scaled: whether values are multiplied by d/k; with float32 values only, since rounding would add bias.
        value_dtype: torch.float32, torch.float16 or torch.bfloat16; None: float32 where scaled, else float16.

    Raises:
        RecipeError: a field out of range, or scaled with rotating or with 16-bit values.

    Example:
        >>> from thinwire.random import Key
        >>> q, x, spec = RandomK(density=0.5), torch.tensor([1.0, -3.0, 2.0, 3.0]), BlockSpec(shape=(4,))
        >>> sent = q.decode(q.encode(x, Key(1, step=2)), spec, Key(1, step=2))
        >>> int((sent == x).sum()), int((sent == 0).sum()), q.nbytes(spec)
        (2, 2, 4)

    References:
        Sebastian U. Stich, Jean-Baptiste Cordonnier, Martin Jaggi, "Sparsified SGD with Memory", 2018 (random-k).
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021 (a seed shared by workers and servers). Differs from the paper: without replacement.
        Jue Wang et al., "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks", 2023 (rotating).
    """

    density: float = 0.01
    block: int = 1
    rotating: bool = False
    scaled: bool = False
    value_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.value_dtype is None:
            object.__setattr__(self, "value_dtype", torch.float32 if self.scaled else torch.float16)
        if not 0.0 < self.density <= 1.0:
            raise RecipeError(f"RandomK: expected a density in (0, 1], got {self.density}")
        if not 1 <= self.block <= MAX_BLOCK:
            raise RecipeError(f"RandomK: expected a block from 1 to {MAX_BLOCK}, got {self.block}")
        if self.value_dtype not in _NAMES:
            raise RecipeError(
                f"RandomK: expected value_dtype torch.float32, torch.float16 or torch.bfloat16, got {self.value_dtype}"
            )
        if self.scaled and (self.rotating or self.value_dtype != torch.float32):
            raise RecipeError(
                "RandomK: expected scaled with random masks and float32 values, got "
                f"rotating={self.rotating} and {self.value_dtype}"
            )

    @property
    def stochastic(self) -> bool:
        """Whether encoding needs a key: always, be it for the step alone."""
        return True

    @property
    def shared_key(self) -> bool:
        """Decoders draw the places again."""
        return True

    @property
    def period(self) -> int:
        """P, the steps in which every coordinate is sent once; 0 where masks are random."""
        return max(1, round(1 / self.density)) if self.rotating else 0

    @property
    def _dtype(self) -> torch.dtype:
        assert self.value_dtype is not None
        return self.value_dtype

    def num_units(self, numel: int) -> int:
        """Return d."""
        return -(-numel // self.block)

    def num_kept(self, numel: int) -> int:
        """Return k, the units that are sent of `numel` elements."""
        d = self.num_units(numel)
        return -(-d // self.period) if self.rotating else min(d, max(1, int(self.density * d)))

    def holds_back(self, spec: BlockSpec) -> bool:
        """Below density 1."""
        return self.num_kept(spec.numel) < self.num_units(spec.numel)

    def layout(self, spec: BlockSpec) -> Layout:
        """The values."""
        return Layout.of(values=(self._dtype, (self.num_kept(spec.numel) * self.block,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        delta = self.num_kept(spec.numel) / max(self.num_units(spec.numel), 1)
        if self.scaled and self.density < 1.0:
            # Also where a short block is sent whole: the feedback that goes with the kind must not hang on the length.
            return Unbiased(1 / max(delta, 2.0**-60) - 1)
        if self.rotating and self.period > 1:
            return NoContract("a coordinate waits for its turn")
        match self.value_dtype:
            case torch.float16:
                return Contractive(delta * (1 - 2.0**-22), smallest=2.0**-14, largest=65504.0)
            case torch.bfloat16:
                return Contractive(delta * (1 - 2.0**-16), smallest=SMALLEST_NORMAL, largest=3.38e38)
            case _:
                return Contractive(delta)

    def recipe(self) -> str:
        """`randomk:DENSITY`, with what differs from the defaults."""
        extras = [f"block={self.block}"] if self.block != 1 else []
        extras += ["rotating"] if self.rotating else []
        extras += ["scaled"] if self.scaled else []
        default = torch.float32 if self.scaled else torch.float16
        extras += [_NAMES[self._dtype]] if self.value_dtype != default else []
        return ":".join(["randomk", repr(float(self.density)).removesuffix(".0"), *extras])

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Gather; the residual is q with the sent part taken out."""
        return kernels.serving(jobs).encode_random_k(
            jobs,
            k=[self.num_kept(spec.numel) for spec in specs],
            dtype=self._dtype,
            block=self.block,
            period=self.period,
            scaled=self.scaled,
            threads=threads,
        )

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Scatter."""
        kernels.serving(jobs).decode_random_k(
            jobs,
            k=[self.num_kept(spec.numel) for spec in specs],
            dtype=self._dtype,
            block=self.block,
            period=self.period,
            threads=threads,
        )
