"""Partitions of one compressor with memory of their own, and the time that each operation on them takes."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.compressors import Compressor
from thinwire.errors import ThinwireError
from thinwire.kernels import DecodeBatch, EncodeBatch
from thinwire.random import Key, parameter_key
from thinwire.spec import BlockSpec
from thinwire.wire import split

PARTITION_NUMEL = 65536
LINE_NBYTES = 64
# Small, so that residuals of unbiased kinds do not grow from repeat to repeat; the kernels do the same work.
RESIDUAL_SCALE = 1 / 64


class Blocks:
    """Partitions of one compressor with memory of their own, and a function per operation that does them all.

    Args:
        compressor: of all partitions.
        x: (n,) float32, what is encoded.
        numel: elements of a partition; the last may have fewer.
        threads: native threads of each call.

    Raises:
        ThinwireError: what is encoded is not finite.
    """

    def __init__(self, compressor: Compressor, x: Tensor, numel: int, threads: int) -> None:
        sizes = [numel] * (x.numel() // numel) + [x.numel() % numel] * (x.numel() % numel > 0)
        self.compressor, self.threads, self.num = compressor, threads, len(sizes)
        self.specs = [BlockSpec(shape=_shape(size)) for size in sizes]
        nbytes = [compressor.nbytes(spec) for spec in self.specs]
        starts = list(itertools.accumulate(nbytes, initial=0))[:-1]
        keys = [Key(parameter_key(0, "x"), 0, 0, i * numel) for i in range(self.num)]
        self.data = torch.zeros(sum(nbytes), dtype=torch.uint8)
        self.out, self.residual = torch.zeros_like(x), torch.zeros_like(x)
        none = [None] * self.num
        shared = None
        if compressor.statistic_reduction is not None:
            statistics = [compressor.num_statistics(spec) for spec in self.specs]
            shared = split(torch.zeros(sum(statistics)), statistics)
        self._plain = EncodeBatch(split(x, sizes), none, keys, starts, nbytes, shared)
        self._kept = EncodeBatch(split(x, sizes), split(self.residual, sizes), keys, starts, nbytes, shared)
        self._decode = DecodeBatch(split(self.out, sizes), starts, nbytes, keys, shared)
        if shared is not None:
            self._plain.at(self.data, step=0, residual_scales=[0.0] * self.num)
            compressor.statistic_jobs(self._plain, self.specs, threads=threads)
            for numbers in shared:
                numbers.mul_(2)  # room for residuals

    def runs(self) -> dict[str, Callable[[], object]]:
        """Return, per operation, the call to time."""
        return {
            "encode": lambda: self._encode(self._plain),
            "encode_feedback": lambda: self._encode(self._kept),
            "decode": lambda: self._decode_all(None),
            "accumulate": lambda: self._decode_all(0.5),
        }

    def _encode(self, batch: EncodeBatch) -> None:
        batch.at(self.data, step=0, residual_scales=[RESIDUAL_SCALE] * self.num)
        if not all(self.compressor.encode_jobs(batch, self.specs, threads=self.threads)):
            raise ThinwireError(f"{self.compressor.recipe()}: expected finite values, got inf, nan or an overflow")

    def _decode_all(self, alpha: float | None) -> None:
        self._decode.at(self.data, alpha=alpha)
        self.compressor.decode_jobs(self._decode, self.specs, threads=self.threads)

    def floor_nbytes(self) -> dict[str, int]:
        """Return, per operation, the bytes it must move; call after encoding.

        encode reads x and writes the bytes. With feedback it also reads and writes the residual. decode reads the bytes
        and writes all values, accumulate reads and writes those it adds to. Sparse kinds, which send fewer values than
        there are, only add to the lines of those; but each value is read, to tell that all are finite.
        """
        whole, wire = 4 * self.out.numel(), self.data.numel()
        touched = whole
        if self.compressor.holds_back(self.specs[0]):
            self._decode_all(None)
            touched = _lines_nbytes(self.out)
        return {
            "encode": whole + wire,
            "encode_feedback": 3 * whole + wire,
            "decode": wire + whole,
            "accumulate": wire + 2 * touched,
        }


def _shape(numel: int) -> tuple[int, ...]:
    """A square where there is one, for kinds that need a matrix; to the others a shape is but its length."""
    side = math.isqrt(numel)
    return (side, side) if side * side == numel else (numel,)


def _lines_nbytes(out: Tensor) -> int:
    """Bytes of the cache lines that hold a value other than 0."""
    per_line = LINE_NBYTES // out.element_size()
    padded = torch.nn.functional.pad(out, (0, -out.numel() % per_line))
    return LINE_NBYTES * int((padded.view(-1, per_line) != 0).any(dim=1).sum())


def best_s(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least seconds of each call. They take turns, so that other work on the machine disturbs them alike."""
    best = dict.fromkeys(runs, math.inf)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            if repeat:  # the first touches memory, and packs the batch
                best[name] = min(best[name], seconds)
    return best


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let torch use this many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
