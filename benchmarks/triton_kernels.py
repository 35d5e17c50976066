"""How fast the Triton kernels are on a GPU, beside a device copy of the same float32.

Every row encodes or decodes the same 256 partitions of 65,536 float32 (64 MiB) in one call; feedback is a residual
that is read and rewritten. `us` is the time of the call's kernels on the device, the median of `--repeats` calls over
buffers taken in turn, so that caches do not help. `GB/s` counts the float32 bytes, once. `copy` is the time of `copy_`
on as many float32 divided by the kernels' time: 1 is as fast as copying. `call us` is the wall time of the call with
all the host does: packing the jobs, launching, and waiting for the flags.

    python benchmarks/triton_kernels.py --json triton.json
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import DeviceType

from thinwire.aggregators import Dense
from thinwire.catalogue import catalogue
from thinwire.compressors import Compressor
from thinwire.errors import ThinwireError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.random import Key
from thinwire.recipes import parse_recipe
from thinwire.spec import BlockSpec

N = 65536
SPEC = BlockSpec(shape=(N,))
SETS = 4  # 64 MiB each, several times what a cache holds


def device_s(run: Callable[[], object], repeats: int) -> float:
    """Seconds that the kernels of one call take on the device: the median."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    tables = ("Memset", "Memcpy HtoD", "Memcpy DtoH")  # the jobs' way in and the flags' way out
    on_device = [event for event in profile.events() or () if event.device_type == DeviceType.CUDA]
    kernels = [event.time_range for event in on_device if not event.name.startswith(tables)]
    kernels.sort(key=lambda span: span.start)
    per_call, rest = divmod(len(kernels), repeats)
    assert per_call > 0, "expected kernels in the profile, got none"
    assert rest == 0, f"expected a multiple of {repeats} kernels, got {len(kernels)}"
    calls = [kernels[i : i + per_call] for i in range(0, len(kernels), per_call)]
    return statistics.median(sum(span.elapsed_us() for span in call) for call in calls) / 1e6


def call_s(run: Callable[[], object], repeats: int) -> float:
    """Wall seconds of one call and all it starts: the median."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Bench:
    """The partitions of one call, several times over, and the rows measured on them."""

    def __init__(self, num_jobs: int, repeats: int) -> None:
        self.num_jobs, self.repeats, self.nbytes = num_jobs, repeats, 4 * N * num_jobs
        generator = torch.Generator("cuda").manual_seed(0)
        self.xs, self.residuals, self.outs = (
            [torch.randn(num_jobs * N, device="cuda", generator=generator) for _ in range(SETS)] for _ in range(3)
        )
        turn = itertools.cycle(zip(self.xs, self.outs, strict=True))

        def copy() -> None:
            x, out = next(turn)
            out.copy_(x)

        copy()
        self.copy_s = device_s(copy, repeats)
        self.rows: list[dict[str, str | int | float]] = []

    def _parts(self, x: Tensor, width: int = N) -> list[Tensor]:
        return [x[i * width : (i + 1) * width] for i in range(self.num_jobs)]

    def _runs(self, compressor: Compressor) -> dict[str, Callable[[], object]]:
        nbytes, specs = compressor.nbytes(SPEC), [SPEC] * self.num_jobs
        buffers = [torch.empty(self.num_jobs * nbytes, dtype=torch.uint8, device="cuda") for _ in range(SETS)]
        keys = [Key(1, offset=i * N) for i in range(self.num_jobs)]
        plain = [
            [EncodeJob(*parts) for parts in zip(self._parts(x), self._parts(buffer, nbytes), strict=True)]
            for x, buffer in zip(self.xs, buffers, strict=True)
        ]
        plain = [[job._replace(key=key) for job, key in zip(jobs, keys, strict=True)] for jobs in plain]
        kept = [
            [job._replace(residual=part) for job, part in zip(jobs, self._parts(residual), strict=True)]
            for jobs, residual in zip(plain, self.residuals, strict=True)
        ]
        replace = [
            [DecodeJob(job.out, part, None, job.key) for job, part in zip(jobs, self._parts(out), strict=True)]
            for jobs, out in zip(plain, self.outs, strict=True)
        ]
        add = [[job._replace(alpha=0.5) for job in jobs] for jobs in replace]

        def call(function: Callable[..., object], sets: list[Any]) -> Callable[[], object]:
            turn = itertools.cycle(sets)
            return lambda: function(next(turn), specs)

        return {
            "encode": call(compressor.encode_jobs, plain),
            "encode+feedback": call(compressor.encode_jobs, kept),
            "decode": call(compressor.decode_jobs, replace),
            "accumulate": call(compressor.decode_jobs, add),
        }

    def measure(self, compressor: Compressor) -> None:
        for op, run in self._runs(compressor).items():
            for _ in range(SETS):  # compiles, and leaves bytes in every buffer for the decoders
                run()
            seconds, wall = device_s(run, self.repeats), call_s(run, self.repeats)
            row: dict[str, str | int | float] = {
                "compressor": compressor.recipe(),
                "op": op,
                "nbytes": self.nbytes,
                "device_s": seconds,
                "call_s": wall,
                "gb_per_s": self.nbytes / seconds / 1e9,
                "copy_ratio": self.copy_s / seconds,
            }
            self.rows.append(row)
            print(
                f"{compressor.recipe():26} {op:16} {seconds * 1e6:9.1f} {row['gb_per_s']:8.0f} "
                f"{row['copy_ratio']:7.2f} {wall * 1e6:9.0f}",
                flush=True,
            )


def compressors() -> list[Compressor]:
    """Return what the catalogue's recipes send, each once."""
    parsed = [parse_recipe(entry.recipe) for entry in catalogue()]
    return list(dict.fromkeys(aggregator.up for aggregator in parsed if not isinstance(aggregator, Dense)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=256, help="partitions of 65,536 elements in one call")
    parser.add_argument("--repeats", type=int, default=12, help="timings per row; the median counts")
    parser.add_argument("--only", default="", help="only compressors whose name holds this")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; '-' for standard output")
    args = parser.parse_args()
    bench = Bench(args.jobs, args.repeats)
    print(f"{torch.cuda.get_device_name()}; {args.jobs} partitions of {N} float32; ", end="")
    print(f"torch {torch.__version__}, Triton {triton.__version__}")
    rate = bench.nbytes / bench.copy_s / 1e9
    print(f"device copy of the same float32: {bench.copy_s * 1e6:.1f} us, {rate:.0f} GB/s\n")
    print(f"{'compressor':26} {'op':16} {'us':>9} {'GB/s':>8} {'copy':>7} {'call us':>9}")
    for compressor in compressors():
        if args.only in compressor.recipe():
            try:
                bench.measure(compressor)
            except ThinwireError as error:  # no such kernel in Triton yet
                print(f"{compressor.recipe():26} {error}")
    if args.json:
        text = json.dumps({"rows": bench.rows}, indent=1)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
