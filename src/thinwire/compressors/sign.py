"""Sign kinds: one bit a value, and one scale or none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, NoContract
from thinwire.errors import RecipeError, WireError
from thinwire.kernels import DecodeJob, EncodeJob, VoteJob
from thinwire.random import Key
from thinwire.spec import BlockSpec
from thinwire.wire import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBit(Compressor):
    r"""Signs and one scale per partition.

    C(x)_i = +a if x_i >= 0 else -a, with a = ||x||_1 / n (`scale="l1"`, CLAN) or a = ||x||_2 / sqrt(n) (`"rms"`, 1-bit
    Adam). sign(0) = sign(-0) = +1.

    `l1` is the scale with the least error and is Contractive with delta = ||x||_1^2 / (n ||x||_2^2) >= 1/n (2/pi for
    Gaussian values). `rms` keeps the norm instead; its error may exceed ||x||^2 for sparse x: NoContract.

    Wire: one float32 scale, then ceil(n/8) bytes; bit i % 8, from the least significant, of byte i // 8 is 1 iff
    x_i < 0. About 1 bit a value.

    Args:
        scale: "l1" or "rms".

    Raises:
        RecipeError: another scale.

    Example:
        >>> q = OneBit()
        >>> q.decode(q.encode(torch.tensor([3.0, -1.0])), BlockSpec(shape=(2,)))
        tensor([ 2., -2.])

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021 (l1). Hanlin Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training
        with Adam's Convergence Speed", 2021 (rms). Differs from both: scales are summed in float64, in a fixed order,
        over the true length, never over padding.
    """

    scale: Literal["l1", "rms"] = "l1"

    def __post_init__(self) -> None:
        if self.scale not in ("l1", "rms"):
            raise RecipeError(f"OneBit: expected scale 'l1' or 'rms', got {self.scale!r}")

    def layout(self, spec: BlockSpec) -> Layout:
        """The scale, then the signs."""
        return Layout.of(scale=(torch.float32, (1,)), signs=(torch.uint8, (-(-spec.numel // 8),)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        if self.scale == "rms":
            return NoContract("the RMS scale overshoots sparse x")
        return Contractive(1 / max(spec.numel, 1), smallest=SMALLEST_NORMAL)

    def recipe(self) -> str:
        """`onebit` or `onebit:rms`."""
        return "onebit" if self.scale == "l1" else "onebit:rms"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass for the scale, one for the signs and the residual."""
        return kernels.serving(jobs).encode_one_bit(jobs, rms=self.scale == "rms", threads=threads)

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Spread the scale over the signs."""
        kernels.serving(jobs).decode_one_bit(jobs, threads=threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign(Compressor):
    r"""Signs alone, for majority votes: what is sent of a value is which side of 0 it is on.

    C(x)_i = +1 if x_i >= 0 else -1, with sign(0) = sign(-0) = +1. NoContract: nothing is kept of how large x is, and a
    block of zeros arrives as ones. `vote` forms, from what n voters sent, the bytes of

        v_i = +1 if sum_j C(x_j)_i > 0, -1 if it is < 0, and where an even n ties: +1 (`ties="plus"`), or (`"random"`)
        -1 with probability 1/2, drawn from a key that all who count must share.

    Wire: ceil(n/8) bytes; bit i % 8, from the least significant, of byte i // 8 is 1 iff x_i < 0, or v_i < 0. 1 bit a
    value.

    Args:
        ties: "plus" or "random".

    Raises:
        RecipeError: another rule for ties.

    Example:
        >>> q, spec = Sign(), BlockSpec(shape=(3,))
        >>> voters = [torch.tensor([3.0, -1.0, 0.0]), torch.tensor([-0.1, -2.0, 5.0]), torch.tensor([-7.0, 1.0, -4.0])]
        >>> q.decode(q.vote([q.encode(x) for x in voters], spec), spec)
        tensor([-1., -1.,  1.])

    References:
        Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Animashree Anandkumar, "signSGD: Compressed
        Optimisation for Non-Convex Problems", 2018. Differs from the paper: sign(0), and ties, which would be a third
        symbol, are +1 or drawn.
    """

    ties: Literal["plus", "random"] = "plus"

    def __post_init__(self) -> None:
        if self.ties not in ("plus", "random"):
            raise RecipeError(f"Sign: expected ties 'plus' or 'random', got {self.ties!r}")

    def layout(self, spec: BlockSpec) -> Layout:
        """The signs."""
        return Layout.of(signs=(torch.uint8, (-(-spec.numel // 8),)))

    def contract(self, spec: BlockSpec) -> Contract:
        """None: see the class."""
        return NoContract("a sign says nothing of how large a value is")

    def recipe(self) -> str:
        """`sign` or `sign:random`."""
        return "sign" if self.ties == "plus" else "sign:random"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """One pass."""
        return kernels.serving(jobs).encode_sign(jobs, threads=threads)

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Plus and minus one."""
        kernels.serving(jobs).decode_sign(jobs, threads=threads)

    def vote(
        self, payloads: Sequence[Tensor], spec: BlockSpec, key: Key | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return what most of the payloads say, in the bytes of `encode`.

        Args:
            payloads: what each voter encoded of a block like `spec`; at least one.
            spec: the block.
            key: the stream that ties are drawn from; required where they are, unused otherwise.
            out: (nbytes,) uint8, written in place; allocated when None.

        Returns:
            `out`, (nbytes,) uint8.

        Raises:
            WireError: a payload is not an encoding of such a block, or there is none.
            RecipeError: ties are drawn and there is no key.
        """
        if self.ties == "random" and key is None:
            raise RecipeError(f"{self.recipe()} draws ties: pass key=Key(...), the same to all who count")
        if not payloads:
            raise WireError(f"{self.recipe()} vote: expected at least one voter, got none")
        layout = self.layout(spec)
        for payload in payloads:
            layout.check(payload, f"{self.recipe()} vote")
        if out is None:
            out = torch.empty(layout.nbytes, dtype=torch.uint8, device=payloads[0].device)
        layout.check(out, f"{self.recipe()} vote, out")
        jobs = [VoteJob(payloads, out, spec.numel, key if self.ties == "random" else None)]
        kernels.serving(jobs).majority_vote(jobs)
        return out
