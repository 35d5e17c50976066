"""Sign kinds: one bit a value and one scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, NoContract
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
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
