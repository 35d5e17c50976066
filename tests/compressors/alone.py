"""A kind whose scale is agreed over senders, as it is with a single one: the statistic travels before the codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import BlockSpec, Compressor
from thinwire.compressors import Contract
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.wire import Layout, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone(Compressor):
    inner: Compressor

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # not there yet while it is unpickled
        return getattr(self.inner, name)

    @property
    def statistic_of_squares(self) -> bool:
        return self.inner.statistic_reduction == "sum"

    @property
    def stochastic(self) -> bool:
        return self.inner.stochastic

    def recipe(self) -> str:
        return self.inner.recipe()

    def contract(self, spec: BlockSpec) -> Contract:
        return self.inner.contract(spec)

    def layout(self, spec: BlockSpec) -> Layout:
        head = Part("statistic", torch.float32, (self.inner.num_statistics(spec),), 0)
        inner = self.inner.layout(spec)
        moved = [Part(part.name, part.dtype, part.shape, part.offset + head.nbytes) for part in inner.parts]
        return Layout((head, *moved), head.nbytes + inner.nbytes)

    def _split(self, data: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor]:
        nbytes = 4 * self.inner.num_statistics(spec)
        return data[:nbytes].view(torch.float32), data[nbytes:]

    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        parts = [self._split(job.out, spec) for job, spec in zip(jobs, specs, strict=True)]
        inner = [job._replace(shared=shared, out=out) for job, (shared, out) in zip(jobs, parts, strict=True)]
        self.inner.statistic_jobs(inner, specs, threads=threads)
        return self.inner.encode_jobs(inner, specs, threads=threads)

    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        parts = [self._split(job.data, spec) for job, spec in zip(jobs, specs, strict=True)]
        inner = [job._replace(shared=shared, data=data) for job, (shared, data) in zip(jobs, parts, strict=True)]
        self.inner.decode_jobs(inner, specs, threads=threads)
