"""How near what a recipe delivers comes to recorded gradients, and what it costs.

Only parameters that the default plan compresses count: matrices of at least 64 KiB. With x a rank's gradients of those,
g their mean over ranks, and m what the recipe delivers for it:

    one encode:  |C(x) - x|^2 / |x|^2, without feedback; mean over ranks and steps
    mean:        |m - g|^2 / |g|^2 (vNMSE); mean over steps. With feedback m holds what earlier steps owe.
    sum:         |sum m - sum g|^2 / |sum g|^2 over the recorded steps, which is what training gets
    cosine:      of m and g; mean over steps
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.advisor.blocks import best_s
from thinwire.aggregators import Aggregator, Dense
from thinwire.bench.lock_step import LockStep
from thinwire.bench.recording import Recording
from thinwire.bench.results import machine
from thinwire.kernels import DecodeBatch, EncodeBatch
from thinwire.plan import Plan, build_plan
from thinwire.policy import PlanOptions
from thinwire.random import SHARED_STREAM, Key
from thinwire.wire import split

_ONE_A_NODE = PlanOptions(node_sizes=1)  # for hier recipes: of recorded ranks nobody knows better


class Fidelity:
    """Measures recipes on one recording, which it holds in memory.

    Args:
        recording: of gradients.
        threads: native threads per kernel call.
    """

    def __init__(self, recording: Recording, *, threads: int = 1) -> None:
        self.recording, self._threads = recording, threads
        all_params = {name: torch.empty(shape) for name, shape in recording.shapes.items()}
        plan = build_plan(all_params.items(), "identity", recording.num_ranks)
        compressed = [param.info.name for param in plan.params if not param.reason]
        # Where nothing is large enough, everything counts.
        self.shapes = {name: recording.shapes[name] for name in compressed or all_params}
        self.numel = sum(math.prod(shape) for shape in self.shapes.values())
        # Per step and rank, flat: one parameter after the other.
        self._gradients: list[Tensor] = []
        for step in recording.steps:
            parts = [recording.read(step, name).reshape(recording.num_ranks, -1) for name in self.shapes]
            self._gradients.append(torch.cat(parts, dim=1))

    def measure(self, aggregator: Aggregator, on_step: Callable[[str], None] = lambda doing: None) -> dict[str, Any]:
        """Return one row; see ``docs/gradients.md``. Says before every recorded step what it is doing."""
        params = {name: torch.empty(shape) for name, shape in self.shapes.items()}
        plan = build_plan(params.items(), lambda _: aggregator, self.recording.num_ranks, _ONE_A_NODE)
        sent = sum(p.aggregator.sent_once_nbytes(p.spec) for param in plan.params for p in param.partitions)
        compressor = aggregator.up
        return {
            "recipe": aggregator.recipe(),
            "family": type(compressor).__module__.rpartition(".")[2],
            "feedback": aggregator.feedback is not None,
            "bits_per_element": 8 * sent / self.numel,
            **self._one_encode(plan, aggregator, on_step),
            **self._mean(plan, on_step),
        }

    def _one_encode(self, plan: Plan, aggregator: Aggregator, on_step: Callable[[str], None]) -> dict[str, Any]:
        """Encode and decode every rank's gradients of every step, without feedback."""
        if isinstance(aggregator, Dense):
            return {"encode_error": None, "encode_s": None, "decode_s": None}
        partitions = [p for param in plan.params for p in param.partitions]
        compressor = partitions[0].aggregator.up
        specs, sizes = [p.spec for p in partitions], [p.numel for p in partitions]
        nbytes = [compressor.nbytes(spec) for spec in specs]
        starts = list(itertools.accumulate(nbytes, initial=0))[:-1]
        x, out = torch.empty(self.numel), torch.empty(self.numel)
        data = torch.empty(sum(nbytes), dtype=torch.uint8)
        statistics = torch.zeros(sum(compressor.num_statistics(spec) for spec in specs))
        shared = split(statistics, [compressor.num_statistics(spec) for spec in specs])
        batches: list[tuple[EncodeBatch, DecodeBatch]] = []
        for rank in range(plan.world_size):
            stream = SHARED_STREAM if compressor.shared_key else rank
            keys = [Key(p.key, 0, stream, p.offset) for p in partitions]
            encode = EncodeBatch(split(x, sizes), [None] * len(sizes), keys, starts, nbytes, shared)
            batches.append((encode, DecodeBatch(split(out, sizes), starts, nbytes, keys, shared)))
        errors: list[float] = []
        times: dict[str, float] = {"encode": math.inf, "decode": math.inf}
        for step, gradients in enumerate(self._gradients):
            on_step(f"encoding step {step + 1} of {len(self._gradients)}")
            if compressor.statistic_reduction is not None:
                found: list[Tensor] = []
                for (encode, _), given in zip(batches, gradients, strict=True):
                    x.copy_(given)
                    encode.at(data, step=step, residual_scales=[1.0] * len(sizes))
                    compressor.statistic_jobs(encode, specs, threads=self._threads)
                    found.append(statistics.clone())
                together = torch.stack(found)
                statistics.copy_(together.amax(0) if compressor.statistic_reduction == "max" else together.sum(0))
            for (encode, decode), given in zip(batches, gradients, strict=True):
                x.copy_(given)
                encode.at(data, step=step, residual_scales=[1.0] * len(sizes))
                decode.at(data, step=step)
                once = best_s(
                    {
                        "encode": lambda batch=encode: compressor.encode_jobs(batch, specs, threads=self._threads),
                        "decode": lambda batch=decode: compressor.decode_jobs(batch, specs, threads=self._threads),
                    },
                    repeats=1,
                )
                times = {op: min(times[op], once[op]) for op in times}
                errors.append(_relative_error(out, x))
        return {"encode_error": _mean(errors), "encode_s": times["encode"], "decode_s": times["decode"]}

    def _mean(self, plan: Plan, on_step: Callable[[str], None]) -> dict[str, Any]:
        """Run the exchange of all recorded steps, with feedback where the recipe has it."""
        lock_step = LockStep(plan, self.shapes, self._threads)
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        errors: list[float] = []
        cosines: list[float] = []
        owed, total = torch.zeros(self.numel, dtype=torch.float64), torch.zeros(self.numel, dtype=torch.float64)
        for step, gradients in enumerate(self._gradients):
            on_step(f"exchanging step {step + 1} of {len(self._gradients)}")
            ranks = [dict(zip(self.shapes, given.split(sizes), strict=True)) for given in gradients]
            values = lock_step.run(ranks)
            delivered = torch.cat([values[name] for name in self.shapes]).double()
            exact = gradients.mean(dim=0, dtype=torch.float64)
            errors.append(_relative_error(delivered, exact))
            cosines.append(float(torch.nn.functional.cosine_similarity(delivered, exact, dim=0)))
            owed += exact - delivered
            total += exact
        return {
            "mean_error": _mean(errors),
            "sum_error": float(owed.square().sum() / total.square().sum()),
            "cosine": _mean(cosines),
        }

    def document(self, rows: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]) -> dict[str, Any]:
        """Return the JSON document of all that was measured, and why what was not."""
        conditions = {
            **machine(),
            "threads": self._threads,
            "numel": self.numel,
            "steps": self.recording.steps,
            "num_ranks": self.recording.num_ranks,
            "recorded": self.recording.conditions,
        }
        return {"schema": 1, "conditions": conditions, "rows": list(rows), "left_out": dict(left_out)}


def _relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).square().sum() / exact.double().square().sum())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
