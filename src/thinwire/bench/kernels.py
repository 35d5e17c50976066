"""How fast compressors encode and decode, beside the memory traffic they cannot do without.

Partitions of 65,536 float32 go through one call per operation, with buffers that are kept, as a message keeps them. An
operation's *floor* is the bytes it must move between DRAM and the cores, in whole cache lines, at the speed of a plain
copy in the same run. A copy counts what it reads and what it writes. That a write first fetches its line is left out on
both sides.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thinwire import kernels
from thinwire.advisor.blocks import PARTITION_NUMEL, Blocks, best_s, torch_threads
from thinwire.aggregators import PowerSGD
from thinwire.bench.results import machine
from thinwire.codec import measure_codec
from thinwire.compressors import Compressor
from thinwire.errors import ThinwireError
from thinwire.plan import build_plan

SMALL_NUMEL = 256  # 1 KiB
NUM_SMALL = 10_000
REFERENCE_NBYTES = 1 << 20
OPS = ("encode", "encode_feedback", "decode", "accumulate")


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
