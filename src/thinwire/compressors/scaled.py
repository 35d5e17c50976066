"""Scaled: what an unbiased compressor sends, taken for a little less, so that error feedback may run over it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import SMALLEST_NORMAL, Contract, Contractive, Unbiased
from thinwire.errors import RecipeError
from thinwire.kernels import DecodeBatch, DecodeJob, EncodeBatch, EncodeJob
from thinwire.spec import BlockSpec
from thinwire.wire import Layout


@functools.lru_cache(maxsize=4096)
def _delta(inner: Compressor, spec: BlockSpec) -> float:
    contract = inner.contract(spec)
    assert isinstance(contract, Unbiased)
    return 1 / (1 + contract.omega)


class _Batches(NamedTuple):
    """The jobs of a batch once more, on what lies where the residuals were: first q, in the end what was not sent."""

    plain: EncodeBatch  # encodes q
    sent: DecodeBatch  # takes what was sent out of q
    left: EncodeBatch  # tells whether what is left is finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled(Compressor):
    r"""Makes a contraction of an unbiased compressor.

    With C = `inner` and its omega on the block:

        C'(x) = C(x) / (1 + omega).

    Contractive on average, with delta = 1 / (1 + omega): E ||C'(x) - x||^2 = (E ||C(x)||^2 - ||x||^2) / (1 + omega)^2 +
    (omega / (1 + omega))^2 ||x||^2, which is at most omega / (1 + omega) ||x||^2. Unscaled, an unbiased kind of omega
    above 1 diverges under feedback.

    Wire: that of `inner`. The factor, a float32, is applied by who decodes.

    Args:
        inner: an unbiased compressor that rounds, by a scale of its own; `RandomK` is a contraction where it is not
            `scaled`.

    Raises:
        RecipeError: `inner` is not unbiased, shares its key, or waits for a scale that all senders agree on.

    Example:
        >>> from thinwire import LinearDithering
        >>> from thinwire.random import Key
        >>> q, spec = Scaled(inner=LinearDithering(bits=2)), BlockSpec(shape=(4,))
        >>> q.contract(spec).delta
        0.6666666666666666
        >>> q.decode(q.encode(torch.tensor([3.0, 0.0, -3.0, 3.0]), Key(1)), spec)
        tensor([ 2.,  0., -2.,  2.])

    References:
        Jinda Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM
        Training", 2024 (the remark that scaling makes unbiased compressors contractive).
    """

    inner: Compressor

    def __post_init__(self) -> None:
        contract = self.inner.contract(BlockSpec(shape=(65536,)))
        if not isinstance(contract, Unbiased):
            raise RecipeError(f"Scaled: expected an unbiased compressor, got {self.inner.recipe()}: {contract}")
        if self.inner.shared_key:
            raise RecipeError(
                f"Scaled: expected a compressor without a shared key, got {self.inner.recipe()}; leave out its "
                "`scaled`, and it is a contraction"
            )
        if self.inner.statistic_reduction is not None:
            raise RecipeError(f"Scaled: expected a compressor with scales of its own, got {self.inner.recipe()}")

    @property
    def stochastic(self) -> bool:
        """As `inner`."""
        return self.inner.stochastic

    def layout(self, spec: BlockSpec) -> Layout:
        """That of `inner`."""
        return self.inner.layout(spec)

    def _delta(self, spec: BlockSpec) -> float:
        return _delta(self.inner, spec)

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        return Contractive(self._delta(spec), smallest=SMALLEST_NORMAL)

    def recipe(self) -> str:
        """`scaled:` and the recipe of `inner`."""
        return f"scaled:{self.inner.recipe()}"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Form q where the residual was, encode it, and take out of it what was sent."""
        if isinstance(jobs, EncodeBatch) and not jobs.any_residual:
            return self.inner.encode_jobs(jobs, specs, threads=threads)
        if isinstance(jobs, EncodeBatch) and jobs.every_residual and jobs.buffer.is_cpu:
            return self._encode_batch(jobs, specs, threads)
        plain: list[EncodeJob] = []
        sent: list[DecodeJob] = []
        for job, spec in zip(jobs, specs, strict=True):
            if job.residual is None:
                plain.append(job)
                continue
            q = job.residual.mul_(job.residual_scale).add_(job.x)
            plain.append(EncodeJob(q, job.out, key=job.key))
            sent.append(DecodeJob(job.out, q, -self._delta(spec)))
        finite = self.inner.encode_jobs(plain, specs, threads=threads)
        if sent:
            # Of blocks that are not finite the bytes and the residual mean nothing; they still decode.
            kept = [spec for job, spec in zip(jobs, specs, strict=True) if job.residual is not None]
            self.inner.decode_jobs(sent, kept, threads=threads)
            # Of huge values what is left may have no room in float32, though all that was sent has.
            left = iter(kernels.serving(sent).all_finite([job.out for job in sent], threads=threads))
            room = [job.residual is None or next(left) for job in jobs]
            finite = [a and b for a, b in zip(finite, room, strict=True)]
        return finite

    def _encode_batch(self, jobs: EncodeBatch, specs: Sequence[BlockSpec], threads: int) -> list[bool]:
        """The same of all jobs at once, in batches that are kept."""
        if self not in jobs.kept:
            residuals = [residual for residual in jobs.residuals if residual is not None]
            none, starts, nbytes = [None] * len(jobs), jobs.starts.tolist(), [self.nbytes(spec) for spec in specs]
            deltas = [self._delta(spec) for spec in specs]
            jobs.kept[self] = _Batches(
                EncodeBatch(residuals, none, jobs.keys, starts, nbytes),
                DecodeBatch(residuals, starts, nbytes, factors=deltas),
                EncodeBatch(residuals, none, jobs.keys, starts, nbytes),
            )
        batches: _Batches = jobs.kept[self]
        plain, sent, left = batches
        for batch in (plain, left):
            batch.at(jobs.buffer, step=jobs.step, residual_scales=jobs.residual_scales)
        sent.at(jobs.buffer, alpha=-1.0)
        serving = kernels.serving(jobs)
        serving.add_residual(jobs, threads=threads)
        finite = self.inner.encode_jobs(plain, specs, threads=threads)
        self.inner.decode_jobs(sent, specs, threads=threads)
        return [a and b for a, b in zip(finite, serving.add_residual(left, threads=threads), strict=True)]

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Decode, then multiply, then multiply by alpha: each is a rounding. With alpha 1 one pass does it."""
        inner: list[DecodeJob] = []
        for job, spec in zip(jobs, specs, strict=True):
            if job.alpha == 1.0:
                inner.append(job._replace(alpha=self._delta(spec)))
            else:
                inner.append(job._replace(out=job.out if job.alpha is None else torch.empty_like(job.out), alpha=None))
        self.inner.decode_jobs(inner, specs, threads=threads)
        for job, plain, spec in zip(jobs, inner, specs, strict=True):
            if plain.alpha is None:
                plain.out.mul_(self._delta(spec))
                if job.alpha is not None:
                    job.out.add_(plain.out.mul_(job.alpha))
