"""How fast compressors encode and decode, beside the memory traffic they cannot do without.

Partitions of 65,536 float32 go through one call per operation, with buffers that are kept, as a message keeps them. An
operation's *floor* is the bytes it must move between DRAM and the cores, in whole cache lines, at the speed of a plain
copy in the same run. A copy counts what it reads and what it writes. That a write first fetches its line is left out on
both sides.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.aggregators import PowerSGD
from thinwire.bench.results import machine
from thinwire.compressors import Compressor
from thinwire.errors import ThinwireError
from thinwire.integrations.codec import measure_codec
from thinwire.kernels import DecodeBatch, EncodeBatch
from thinwire.plan import build_plan
from thinwire.random import Key, parameter_key
from thinwire.spec import BlockSpec
from thinwire.wire import split

PARTITION_NUMEL = 65536
SMALL_NUMEL = 256  # 1 KiB
NUM_SMALL = 10_000
REFERENCE_NBYTES = 1 << 20
LINE_NBYTES = 64
OPS = ("encode", "encode_feedback", "decode", "accumulate")
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
        there are, only add to the lines of those; and where both sides draw the places, encoding reads only these.
        """
        whole, wire = 4 * self.out.numel(), self.data.numel()
        touched = read = whole
        if self.compressor.holds_back(self.specs[0]):
            self._decode_all(None)
            touched = _lines_nbytes(self.out)
            read = touched if self.compressor.shared_key else whole
        return {
            "encode": read + wire,
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


class KernelBench:
    """Measures one compressor after another on the same values.

    Args:
        nbytes: of the float32 values that are encoded and decoded, and of the copy.
        repeats: timings per row. The best counts, since the machine's other work only ever adds.
    """

    def __init__(self, nbytes: int = 64 << 20, repeats: int = 7) -> None:
        if nbytes < 4 or repeats < 1:
            raise ThinwireError(f"expected at least 4 bytes and one repeat, got {nbytes} and {repeats}")
        self.nbytes, self.repeats = nbytes // 4 * 4, repeats
        self.x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0)) * 1e-2
        self._copy = torch.zeros_like(self.x)
        self.copy_s: dict[int, float] = {}

    def rows(self, compressor: Compressor, threads: int) -> list[dict[str, Any]]:
        """Return a row per operation, and one for many small partitions; see ``docs/kernels.md``."""
        name = compressor.recipe()
        blocks = Blocks(compressor, self.x, PARTITION_NUMEL, threads)
        with torch_threads(threads):
            best = best_s({**blocks.runs(), "copy": lambda: self._copy.copy_(self.x)}, self.repeats)
        self.copy_s[threads] = min(best["copy"], self.copy_s.get(threads, math.inf))
        reference = self._reference_s(compressor) if threads == 1 else {}
        rows: list[dict[str, Any]] = []
        for op, nbytes in blocks.floor_nbytes().items():
            floor_s = nbytes / (2 * self.nbytes / best["copy"])
            rows.append(
                {
                    "compressor": name,
                    "op": op,
                    "threads": threads,
                    "nbytes": self.nbytes,
                    "partitions": blocks.num,
                    "seconds": best[op],
                    "gb_per_s": self.nbytes / best[op] / 1e9,
                    "floor_ratio": best[op] / floor_s,
                    "floor_nbytes": nbytes,
                    "copy_s": best["copy"],
                    "reference_gb_per_s": reference.get(op),
                }
            )
        # Kinds that must see matrices are never asked for thousands of small vectors: plans send those dense.
        return rows if compressor.unit == "matrix" else [*rows, self._small_row(compressor, threads)]

    def exchange_rows(self, settings: PowerSGD, threads: int) -> list[dict[str, Any]]:
        """Return a row for exchanges whose ranks multiply with their matrices in between; see ``docs/kernels.md``.

        Of one rank alone: what it sums is its own. The values are matrices of 256 x 256.
        """
        numel = self.x.numel() // PARTITION_NUMEL * PARTITION_NUMEL
        if not numel:
            raise ThinwireError(f"expected at least one matrix of {4 * PARTITION_NUMEL} bytes, got {self.nbytes} bytes")
        with torch_threads(threads):
            seconds = _exchange_s(settings, numel, threads, self.repeats)
            copy_s = best_s({"copy": lambda: self._copy.copy_(self.x)}, self.repeats)["copy"]
        self.copy_s[threads] = min(copy_s, self.copy_s.get(threads, math.inf))
        reference = None
        if threads == 1:
            with reference_kernels(), torch_threads(1):
                reference = REFERENCE_NBYTES / _exchange_s(settings, REFERENCE_NBYTES // 4, 1, 1) / 1e9
        floor_nbytes = 4 * 4 * numel  # the gradient and what is owed are read and written
        return [
            {
                "compressor": settings.recipe(),
                "op": "exchange",
                "threads": threads,
                "nbytes": 4 * numel,
                "partitions": numel // PARTITION_NUMEL,
                "seconds": seconds,
                "gb_per_s": 4 * numel / seconds / 1e9,
                "floor_ratio": seconds / (floor_nbytes / (2 * self.nbytes / copy_s)),
                "floor_nbytes": floor_nbytes,
                "copy_s": copy_s,
                "reference_gb_per_s": reference,
            }
        ]

    def _reference_s(self, compressor: Compressor) -> dict[str, float]:
        """GB/s of the kernels in plain torch, on fewer values."""
        x = self.x[: REFERENCE_NBYTES // 4]
        with reference_kernels():
            best = best_s(Blocks(compressor, x, PARTITION_NUMEL, 1).runs(), 1)
        return {op: 4 * x.numel() / seconds / 1e9 for op, seconds in best.items()}

    def _small_row(self, compressor: Compressor, threads: int) -> dict[str, Any]:
        numel = SMALL_NUMEL * NUM_SMALL
        x = self.x[:numel] if self.x.numel() >= numel else self.x.repeat(-(-numel // self.x.numel()))[:numel]
        encode = Blocks(compressor, x, SMALL_NUMEL, threads).runs()["encode"]
        seconds = best_s({"encode": encode}, self.repeats)["encode"]
        return {
            "compressor": compressor.recipe(),
            "op": "encode_small",
            "threads": threads,
            "nbytes": 4 * numel,
            "partitions": NUM_SMALL,
            "seconds": seconds,
            "gb_per_s": 4 * numel / seconds / 1e9,
            "floor_ratio": None,  # fits in caches
        }

    def document(self, rows: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]) -> dict[str, Any]:
        """Return the JSON document of all that was measured, and why what was not."""
        copies = {str(threads): 2 * self.nbytes / seconds / 1e9 for threads, seconds in self.copy_s.items()}
        conditions = {
            **machine(),
            "nbytes": self.nbytes,
            "partition_numel": PARTITION_NUMEL,
            "repeats": self.repeats,
            "copy_gb_per_s": copies,  # read and written, by threads
        }
        return {"schema": 1, "conditions": conditions, "rows": list(rows), "left_out": dict(left_out)}


def _exchange_s(settings: PowerSGD, numel: int, threads: int, repeats: int) -> float:
    side = math.isqrt(PARTITION_NUMEL)
    matrices = [(f"matrix {i}", torch.empty(side, side, device="meta")) for i in range(numel // PARTITION_NUMEL)]
    return measure_codec(build_plan(matrices, settings, 1), 0, threads=threads, repeats=repeats + 1)


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
def reference_kernels() -> Iterator[None]:
    """Use the kernels in plain torch inside."""
    before = os.environ.get("THINWIRE_KERNELS")
    os.environ["THINWIRE_KERNELS"] = "reference"
    kernels.active.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ["THINWIRE_KERNELS"]
        else:
            os.environ["THINWIRE_KERNELS"] = before
        kernels.active.cache_clear()


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let torch use this many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
