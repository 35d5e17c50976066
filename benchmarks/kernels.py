"""How fast the kernels are, beside a copy of the same bytes in the same run.

Every row encodes or decodes the same partitions of 65,536 float32 in one call, with a residual where one is used.
`GB/s` counts the float32 bytes of the input, read once. `floor` is the time in which one thread copies those bytes,
divided by the kernel's time: 1 is as fast as copying. Each time is the best of `--repeats`, since the machine's other
work only ever adds.

    python benchmarks/kernels.py --threads 1 2 --json kernels.json
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import DecodeJob, EncodeJob, reference
from thinwire.kernels.float_formats import FORMATS
from thinwire.kernels.top_k_layout import NATURAL, top_k_layout
from thinwire.random import Key
from thinwire.wire import align

N = 65536


@dataclass(frozen=True)
class Case:
    compressor: str
    kernel: str
    nbytes: int
    settings: dict[str, Any]
    decode_settings: dict[str, Any]


def cases() -> list[Case]:
    """Every kernel at the settings of the recipes."""
    found: list[Case] = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found.append(Case(f"cast-{name}", "cast", N * dtype.itemsize, {"dtype": dtype}, {"dtype": dtype}))
    for bits in (8, 7, 4, 3, 2):
        for stochastic in (False, True):
            settings = {"bits": bits, "block": 512}
            label = f"int{bits}{'-stochastic' if stochastic else ''}"
            nbytes = 4 * (N // 512) + N * bits // 8
            found.append(Case(label, "block_quant", nbytes, {**settings, "stochastic": stochastic}, settings))
    for name, to in FORMATS.items():
        settings = {"format": name, "block": 512}
        found.append(Case(name, "block_cast", 4 * (N // 512) + N * to.bits // 8, settings, settings))
    for natural, bits in ((False, 5), (False, 8), (True, 3), (True, 8)):
        for l2 in (False, True):
            settings = {"bits": bits, "block": 0, "natural": natural}
            label = f"{'natural' if natural else 'linear'}{bits}-{'l2' if l2 else 'max'}"
            found.append(Case(label, "dither", 4 + N * bits // 8, {**settings, "l2": l2}, settings))
    for rms in (False, True):
        found.append(Case(f"one_bit-{'rms' if rms else 'l1'}", "one_bit", 4 + N // 8, {"rms": rms}, {}))
    found.append(Case("sign", "sign", N // 8, {}, {}))
    for dtype in (torch.float32, torch.float16, NATURAL):
        for density in (0.001, 0.01, 0.1):
            label = "natural" if dtype is NATURAL else str(dtype).removeprefix("torch.")
            found.append(_top_k(f"top_k-{density:g}-{label}", dtype, density))
    for selection in ("bisect", "sampled"):
        found.append(_top_k(f"top_k-0.01-{selection}", torch.float16, 0.01, selection))
    found.append(_top_k("top_k-0.01-chunked", torch.float16, 0.01, chunked=True))
    for density, block, period in ((0.01, 1, 0), (0.1, 1, 0), (0.1, 64, 0), (0.1, 1, 10)):
        k = -(-N // block // period) if period else round(density * N / block)
        label = f"random_k-{density:g}" + (f"-{block}" if block > 1 else "") + ("-rotating" if period else "")
        settings = {"dtype": torch.float16, "k": k, "block": block, "period": period}
        found.append(Case(label, "random_k", align(2 * k * block), settings, settings))
    return found


def _top_k(label: str, dtype: torch.dtype, density: float, selection: str = "exact", chunked: bool = False) -> Case:
    k = round(density * N)
    settings = {"dtype": dtype, "k": k, "chunked": chunked}
    return Case(
        label, "top_k", top_k_layout(N, k, dtype, chunked).nbytes, {**settings, "selection": selection}, settings
    )


def best_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


class Bench:
    """The partitions of one call, and the rows measured on them."""

    def __init__(self, num_jobs: int, repeats: int) -> None:
        self.num_jobs, self.repeats = num_jobs, repeats
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_jobs * N, generator=generator)
        self.residual = torch.randn(num_jobs * N, generator=generator) * 0.1
        self.out = torch.empty_like(self.x)
        self.nbytes = 4 * num_jobs * N
        self._floor_s = float("inf")
        self.rows: list[dict[str, str | int | float]] = []

    def floor_s(self) -> float:
        """Seconds of one thread's copy of the input: the best seen in this run."""
        self._floor_s = min(self._floor_s, best_s(lambda: self.out.copy_(self.x), self.repeats))
        return self._floor_s

    def _parts(self, x: Tensor, width: int = N, count: int | None = None) -> list[Tensor]:
        return [x[i * width : (i + 1) * width] for i in range(self.num_jobs if count is None else count)]

    def _runs(self, case: Case, module: ModuleType, threads: int, count: int) -> dict[str, Callable[[], object]]:
        buffer = torch.empty(self.num_jobs * case.nbytes, dtype=torch.uint8)
        data = self._parts(buffer, case.nbytes, count)
        xs, outs = self._parts(self.x, count=count), self._parts(self.out, count=count)
        residuals = self._parts(self.residual.clone(), count=count)
        keys = [Key(1, offset=i * N) for i in range(count)]
        plain = [EncodeJob(x, out, None, 1.0, key) for x, out, key in zip(xs, data, keys, strict=True)]
        kept = [job._replace(residual=residual) for job, residual in zip(plain, residuals, strict=True)]
        replace = [DecodeJob(part, out, None, key) for part, out, key in zip(data, outs, keys, strict=True)]
        add = [job._replace(alpha=0.5) for job in replace]

        def call(verb: str, settings: dict[str, Any]) -> Callable[[Any], object]:
            spread = {**settings, "k": [settings["k"]] * count} if "k" in settings else settings
            function = getattr(module, f"{verb}_{case.kernel}")
            return lambda jobs: function(jobs, **spread, threads=threads)

        encode, decode = call("encode", case.settings), call("decode", case.decode_settings)
        return {
            "encode": lambda: encode(plain),
            "encode+residual": lambda: encode(kept),
            "decode": lambda: decode(replace),
            "accumulate": lambda: decode(add),
        }

    def measure(self, case: Case, threads: int, reference_s: dict[str, float]) -> None:
        floor_s = self.floor_s()
        for op, run in self._runs(case, kernels.active(), threads, self.num_jobs).items():
            seconds = best_s(run, self.repeats)
            row: dict[str, str | int | float] = {
                "compressor": case.compressor,
                "op": op,
                "threads": threads,
                "nbytes": self.nbytes,
                "gb_per_s": self.nbytes / seconds / 1e9,
                "floor_ratio": floor_s / seconds,
            }
            self.rows.append(row)
            us = seconds / self.num_jobs * 1e6
            ratio = f"{reference_s[op] / seconds * self.num_jobs:8.1f}" if reference_s else "       -"
            print(
                f"{case.compressor:22} {op:16} {threads:7} {us:9.1f} {row['gb_per_s']:8.2f} {row['floor_ratio']:7.2f} "
                f"{ratio}",
                flush=True,
            )

    def reference_s(self, case: Case) -> dict[str, float]:
        """Seconds the reference takes for one partition, by operation."""
        return {op: best_s(run, 2) for op, run in self._runs(case, reference, 1, 1).items()}


def write_rows(rows: Sequence[Mapping[str, object]], path: str) -> None:
    """Write rows as JSON to a file, or to standard output for '-'."""
    text = json.dumps({"rows": rows}, indent=1)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of threads to measure")
    parser.add_argument("--jobs", type=int, default=64, help="partitions of 65,536 elements in one call")
    parser.add_argument("--repeats", type=int, default=7, help="timings per row; the best counts")
    parser.add_argument("--only", default="", help="only compressors whose name holds this")
    parser.add_argument("--no-reference", action="store_true", help="leave the slow comparison out")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; '-' for standard output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args.jobs, args.repeats)
    print(f"kernels: {kernels.backend()}; {args.jobs} partitions of {N} float32; torch {torch.__version__}")
    print(f"memcpy of the same bytes, one thread: {bench.nbytes / bench.floor_s() / 1e9:.2f} GB/s\n")
    print(f"{'compressor':22} {'op':16} threads   us/part     GB/s   floor  x reference")
    for case in cases():
        if args.only in case.compressor:
            slow = {} if args.no_reference else bench.reference_s(case)
            for threads in args.threads:
                bench.measure(case, threads, slow)
    if args.json:
        write_rows(bench.rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
