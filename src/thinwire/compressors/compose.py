"""Compose: a sparse compressor whose values are compressed by another one."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Compressor
from thinwire.compressors.contract import Contract, Contractive, NoContract, Unbiased
from thinwire.compressors.random_k import RandomK
from thinwire.compressors.sparse import TopK
from thinwire.errors import RecipeError
from thinwire.kernels import Batch, DecodeBatch, DecodeJob, EncodeBatch, EncodeJob
from thinwire.spec import BlockSpec
from thinwire.wire import Layout, split


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


@functools.lru_cache(maxsize=4096)
def _cut(first: TopK | RandomK, then: Compressor, spec: BlockSpec) -> tuple[BlockSpec, int, int, int]:
    """Return what is kept of a block, and the bytes of that as floats, as `then` sends it, and of what follows."""
    layout = first.layout(spec)
    kept, floats = BlockSpec(shape=layout["values"].shape), layout["values"].nbytes
    return kept, floats, then.nbytes(kept), layout.nbytes - floats


class _Blocks(NamedTuple):
    """Encodings by `first`, one after the other in memory that is kept, and their parts as floats."""

    sparse: Tensor  # (nbytes,) uint8
    starts: list[int]  # of each in there
    values: list[Tensor]
    places: list[Tensor]  # copied as if they were numbers: a cast of float32 to float32 keeps all bits
    kept: list[BlockSpec]  # of the values
    nbytes: list[int]  # of the values as `then` sends them


class _Owed(NamedTuple):
    """What `then` does not send, on its way to the residuals."""

    left: Tensor  # of the values, one after the other
    values: EncodeBatch  # from there to the values in `sparse`
    residuals: DecodeBatch  # and from there to the residuals, by `first`


class _Encode(NamedTuple):
    """The jobs of a batch, step by step."""

    blocks: _Blocks
    first: EncodeBatch  # x to `sparse`
    places: EncodeBatch  # from there to the message
    values: EncodeBatch  # likewise, by `then`
    owed: _Owed | None


class _Decode(NamedTuple):
    """The jobs of a batch, step by step."""

    blocks: _Blocks
    values: DecodeBatch  # from the message to `sparse`, by `then`
    places: DecodeBatch  # likewise
    first: DecodeBatch  # `sparse` to where the values belong


@dataclass(frozen=True, kw_only=True, slots=True)
class Compose(Compressor):
    r"""Sends the k values that `first` selects as `then` compresses them.

    With S(x) the k values that are kept, in order of their indices:

        C(x) = `first` with then(S(x)) in place of S(x).

    `first` errs where nothing is kept and `then` where something is, so the squares add up. With ||S(x)||^2 at least
    d_1 ||x||^2, C is Contractive with delta = d_1 d_2 where `then` is Contractive with d_2, and d_1 (1 - omega) on
    average where it is Unbiased with an omega below 1 (over the k values); NoContract otherwise. For a larger omega use
    `Scaled(inner=then)`.

    Wire: the k values as `then` encodes a block of k, then what follows the values in `first`'s encoding: indices.

    Args:
        first: `TopK` or `RandomK`, with float32 values; not one that is `scaled`.
        then: any compressor that has a scale of its own; one that draws no numbers behind `RandomK`, whose key all
            ranks share.

    Raises:
        RecipeError: others than these.

    Example:
        >>> from thinwire import BlockQuant
        >>> q = Compose(first=TopK(k=2, value_dtype=torch.float32), then=BlockQuant(bits=8))
        >>> spec = BlockSpec(shape=(5,))
        >>> q.decode(q.encode(torch.tensor([0.1, 127.0, 0.2, -63.7, 0.3])), spec)
        tensor([  0., 127.,   0., -64.,   0.])
        >>> q.nbytes(spec)  # a scale, two codes, a bitmap, and padding
        12

    References:
        Samuel Horvath, Chen-Yu Ho, Ludovit Horvath, Atal Narayan Sahu, Marco Canini, Peter Richtarik, "Natural
        Compression for Distributed Deep Learning", 2022 (composition). Jue Wang et al., "CocktailSGD: Fine-tuning
        Foundation Models over 500Mbps Networks", 2023 (top-k, then few bits).
    """

    first: TopK | RandomK
    then: Compressor

    def __post_init__(self) -> None:
        if self.first.value_dtype != torch.float32:
            raise RecipeError(f"Compose: expected TopK or RandomK with float32 values first, got {self.first}")
        if isinstance(self.first, RandomK) and self.first.scaled:
            # Neither unbiased nor a contraction: feedback would be asked for, and diverge under it.
            raise RecipeError(f"Compose: expected values that are not scaled, got {self.first.recipe()}")
        if self.then.statistic_reduction is not None:
            raise RecipeError(f"Compose: expected a compressor with scales of its own, got {self.then.recipe()}")
        if self.then.shared_key or (self.first.shared_key and self.then.stochastic):
            raise RecipeError(
                f"Compose: expected a compressor that draws no numbers behind a shared key, got {self.then.recipe()}"
            )

    @property
    def stochastic(self) -> bool:
        """Where one of both is."""
        return self.first.stochastic or self.then.stochastic

    @property
    def shared_key(self) -> bool:
        """As `first`."""
        return self.first.shared_key

    def holds_back(self, spec: BlockSpec) -> bool:
        """As `first`."""
        return self.first.holds_back(spec)

    def _cut(self, spec: BlockSpec) -> tuple[BlockSpec, int, int, int]:
        return _cut(self.first, self.then, spec)

    def layout(self, spec: BlockSpec) -> Layout:
        """The encoding by `then`, then the places, each padded to a multiple of 4 bytes."""
        _, _, values, places = self._cut(spec)
        return Layout.of(values=(torch.uint8, (values,)), places=(torch.uint8, (places,)))

    def contract(self, spec: BlockSpec) -> Contract:
        """See the class."""
        match self.first.contract(spec), self.then.contract(self._cut(spec)[0]):
            case Contractive() as first, Contractive() as then:
                smallest, largest = max(first.smallest, then.smallest), min(first.largest, then.largest)
                return Contractive(first.delta * then.delta, smallest, largest)
            case Contractive() as first, Unbiased(omega) if omega < 1:
                return Contractive(first.delta * (1 - omega), first.smallest, first.largest)
            case first, then:
                return NoContract(f"neither two contractions nor one with an omega below 1: {first}, {then}")

    def recipe(self) -> str:
        """`FIRST~THEN`, the float32 values of the first understood."""
        first = [word for word in self.first.recipe().split(":") if word != "fp32"]
        return f"{':'.join(first)}~{self.then.recipe()}"

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Encode by `first`, its values by `then`, and add what that did not send to the residual at its places."""
        if isinstance(jobs, EncodeBatch) and jobs.any_residual == jobs.every_residual:
            return self._encode_batch(jobs, specs, threads)
        jobs, cuts = list(jobs), [self._cut(spec) for spec in specs]
        sparse = [job.out.new_empty(floats + places) for job, (_, floats, _, places) in zip(jobs, cuts, strict=True)]
        finite = self.first.encode_jobs(
            [job._replace(out=data) for job, data in zip(jobs, sparse, strict=True)], specs, threads=threads
        )
        values: list[EncodeJob] = []
        for job, data, (_, floats, nbytes, _) in zip(jobs, sparse, cuts, strict=True):
            kept = data[:floats].view(torch.float32)
            left = None if job.residual is None else torch.full_like(kept, -0.0)  # adding it changes nothing
            values.append(EncodeJob(kept, job.out[:nbytes], left, key=job.key))
            job.out[nbytes:].copy_(data[floats:])
        sent = self.then.encode_jobs(values, [kept for kept, *_ in cuts], threads=threads)
        finite = [a and b for a, b in zip(finite, sent, strict=True)]
        owed: list[tuple[DecodeJob, BlockSpec]] = []
        for job, data, value, spec, ok in zip(jobs, sparse, values, specs, finite, strict=True):
            if ok and job.residual is not None and value.residual is not None:
                value.x.copy_(value.residual)
                owed.append((DecodeJob(data, job.residual, 1.0, job.key), spec))
        if owed:  # `first` left 0 there: float32 values are exact
            self.first.decode_jobs([job for job, _ in owed], [spec for _, spec in owed], threads=threads)
        return finite

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Decode the values into an encoding by `first`, and that. Indices are checked before anything is written."""
        if isinstance(jobs, DecodeBatch):
            self._decode_batch(jobs, specs, threads)
            return
        jobs, cuts = list(jobs), [self._cut(spec) for spec in specs]
        sparse: list[Tensor] = []
        values: list[DecodeJob] = []
        for job, (_, floats, nbytes, places) in zip(jobs, cuts, strict=True):
            data = job.data.new_empty(floats + places)
            data[floats:] = job.data[nbytes : nbytes + places]
            sparse.append(data)
            values.append(DecodeJob(job.data[:nbytes], data[:floats].view(torch.float32), key=job.key))
        self.then.decode_jobs(values, [kept for kept, *_ in cuts], threads=threads)
        self.first.decode_jobs(
            [job._replace(data=data) for job, data in zip(jobs, sparse, strict=True)], specs, threads=threads
        )

    # --- batches: the same of all jobs at once, in memory that is kept ------------------------------------------------

    def _blocks(self, jobs: Batch, specs: Sequence[BlockSpec]) -> _Blocks:
        cuts = [self._cut(spec) for spec in specs]
        starts = list(itertools.accumulate((floats + places for _, floats, _, places in cuts), initial=0))
        sparse = jobs.buffer.new_empty(starts.pop())
        values = [sparse[at : at + cut[1]].view(torch.float32) for at, cut in zip(starts, cuts, strict=True)]
        places = [
            sparse[at + floats : at + floats + size].view(torch.float32)
            for at, (_, floats, _, size) in zip(starts, cuts, strict=True)
        ]
        return _Blocks(sparse, starts, values, places, [cut[0] for cut in cuts], [cut[2] for cut in cuts])

    def _encode_batch(self, jobs: EncodeBatch, specs: Sequence[BlockSpec], threads: int) -> list[bool]:
        if self not in jobs.kept:
            jobs.kept[self] = self._prepare_encode(jobs, specs)
        batches: _Encode = jobs.kept[self]
        blocks, first, places, values, owed = batches
        copy = functools.partial(kernels.serving(jobs).encode_cast, dtype=torch.float32, threads=threads)
        ones = [1.0] * len(jobs)
        first.at(blocks.sparse, step=jobs.step, residual_scales=jobs.residual_scales)
        finite = self.first.encode_jobs(first, specs, threads=threads)
        places.at(jobs.buffer, step=0, residual_scales=ones)
        copy(places)
        if owed is not None:
            owed.left.fill_(-0.0)  # adding it changes nothing
        values.at(jobs.buffer, step=jobs.step, residual_scales=ones)
        sent = self.then.encode_jobs(values, blocks.kept, threads=threads)
        if owed is not None:  # `first` left 0 there: float32 values are exact
            owed.values.at(blocks.sparse, step=0, residual_scales=ones)
            copy(owed.values)
            owed.residuals.at(blocks.sparse, step=jobs.step, alpha=1.0)
            self.first.decode_jobs(owed.residuals, specs, threads=threads)
        return [a and b for a, b in zip(finite, sent, strict=True)]

    def _prepare_encode(self, jobs: EncodeBatch, specs: Sequence[BlockSpec]) -> _Encode:
        blocks = self._blocks(jobs, specs)
        none, starts, keys = [None] * len(jobs), jobs.starts.tolist(), jobs.keys
        floats, tails = [_nbytes(value) for value in blocks.values], [_nbytes(place) for place in blocks.places]
        ends = [at + nbytes for at, nbytes in zip(starts, blocks.nbytes, strict=True)]
        sizes = [a + b for a, b in zip(floats, tails, strict=True)]
        first = EncodeBatch(jobs.xs, jobs.residuals, keys, blocks.starts, sizes)
        places = EncodeBatch(blocks.places, none, keys, ends, tails)
        if not jobs.any_residual:
            return _Encode(blocks, first, places, EncodeBatch(blocks.values, none, keys, starts, blocks.nbytes), None)
        left = blocks.sparse.new_empty(sum(floats)).view(torch.float32)
        parts = split(left, [value.numel() for value in blocks.values])
        residuals = [residual for residual in jobs.residuals if residual is not None]
        owed = _Owed(
            left,
            EncodeBatch(parts, none, keys, blocks.starts, floats),
            DecodeBatch(residuals, blocks.starts, sizes, keys),
        )
        return _Encode(blocks, first, places, EncodeBatch(blocks.values, parts, keys, starts, blocks.nbytes), owed)

    def _decode_batch(self, jobs: DecodeBatch, specs: Sequence[BlockSpec], threads: int) -> None:
        if self not in jobs.kept:
            blocks, starts = self._blocks(jobs, specs), jobs.starts.tolist()
            tails = [_nbytes(place) for place in blocks.places]
            ends = [at + nbytes for at, nbytes in zip(starts, blocks.nbytes, strict=True)]
            sizes = [_nbytes(value) + tail for value, tail in zip(blocks.values, tails, strict=True)]
            jobs.kept[self] = _Decode(
                blocks,
                DecodeBatch(blocks.values, starts, blocks.nbytes, jobs.base_keys),
                DecodeBatch(blocks.places, ends, tails),
                DecodeBatch(jobs.outs, blocks.starts, sizes, jobs.base_keys),
            )
        batches: _Decode = jobs.kept[self]
        blocks, values, places, first = batches
        values.at(jobs.buffer, step=jobs.step)
        self.then.decode_jobs(values, blocks.kept, threads=threads)
        places.at(jobs.buffer)
        kernels.serving(jobs).decode_cast(places, dtype=torch.float32, threads=threads)
        first.at(blocks.sparse, step=jobs.step, alpha=jobs.alpha)
        self.first.decode_jobs(first, specs, threads=threads)
