"""Casts: the values themselves, in their own dtype (`Identity`) or in 16 bits (`Cast`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.spec import COMPRESSIBLE_DTYPES, BlockSpec
from thinwire.wire import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity(Compressor):
    r"""Sends every value in the dtype of the parameter.

    C(x) = x. For float16 and bfloat16 parameters the mean that comes back is rounded to their dtype once.

    Wire: n values of the parameter's dtype.

    Example:
        >>> x = torch.tensor([1.0, -2.0])
        >>> Identity().decode(Identity().encode(x), BlockSpec(shape=(2,)))
        tensor([ 1., -2.])
    """

    def layout(self, spec: BlockSpec) -> Layout:
        """N values of the parameter's dtype."""
        if spec.dtype not in COMPRESSIBLE_DTYPES:
            raise RecipeError(f"Identity: expected one of {COMPRESSIBLE_DTYPES}, got {spec.dtype}")
        return Layout.of(values=(spec.dtype, (spec.numel,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """Exact."""
        return Contractive(1.0)

    def recipe(self) -> str:
        """The name."""
        return "identity"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Copy. Blocks of one dtype, as a message has them, are one kernel call, and a batch stays whole."""
        encode = kernels.serving(jobs).encode_cast
        dtypes = {spec.dtype for spec in specs}
        if len(dtypes) == 1:
            return encode(jobs, dtype=dtypes.pop(), threads=threads)
        pairs = zip(jobs, specs, strict=True)
        return [finite for job, spec in pairs for finite in encode([job], dtype=spec.dtype, threads=threads)]

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Copy, likewise."""
        decode = kernels.serving(jobs).decode_cast
        dtypes = {spec.dtype for spec in specs}
        if len(dtypes) == 1:
            decode(jobs, dtype=dtypes.pop(), threads=threads)
            return
        for job, spec in zip(jobs, specs, strict=True):
            decode([job], dtype=spec.dtype, threads=threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast(Compressor):
    r"""Sends every value rounded to 16 bits; sums are still formed in float32.

    C(x) = round(x), to nearest even, in `dtype`. For |x| in the normal range the error is at most 2^-11 |x| (float16)
    or 2^-8 |x| (bfloat16). float16 overflows above 65504, which counts as a non-finite step, and flushes below 2^-25.

    Wire: n values of 16 bits.

    Args:
        dtype: torch.float16 (10 bits of fraction, range 6e-8 to 65504) or torch.bfloat16 (7 bits, float32's range).

    Raises:
        RecipeError: another dtype.

    Example:
        >>> Cast(dtype=torch.bfloat16).nbytes(BlockSpec(shape=(1000,)))
        2000
    """

    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise RecipeError(f"Cast: expected dtype torch.float16 or torch.bfloat16, got {self.dtype}")

    def layout(self, spec: BlockSpec) -> Layout:
        """N values of 16 bits."""
        return Layout.of(values=(self.dtype, (spec.numel,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """bfloat16 shares float32's exponents; float16 has a range of its own."""
        if self.dtype == torch.float16:
            return Contractive(1 - 2.0**-22, smallest=2.0**-14, largest=65504.0)
        return Contractive(1 - 2.0**-16, smallest=SMALLEST_NORMAL, largest=3.38e38)

    def recipe(self) -> str:
        """`fp16` or `bf16`."""
        return "fp16" if self.dtype == torch.float16 else "bf16"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Round to 16 bits."""
        return kernels.serving(jobs).encode_cast(jobs, dtype=self.dtype, threads=threads)

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Widen to float32."""
        kernels.serving(jobs).decode_cast(jobs, dtype=self.dtype, threads=threads)
