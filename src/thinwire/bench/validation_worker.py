"""One rank of one cell: ``python -m thinwire.bench.validation_worker CELL.json``; rank 0 prints one JSON line.

All methods live side by side, each with a model of its own, and take one step in turn, so that whatever drifts hits all
alike. The order turns by one with every round.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.advisor.probe import profile
from thinwire.bench import measure, methods
from thinwire.bench.settings import Settings
from thinwire.bench.validation import AGAIN, DENSE_RECIPES, TWICE, Cell
from thinwire.bench.worker import GROUP_TIMEOUT, wrap
from thinwire.bench.workloads import Workload, make_workload
from thinwire.lab.units import parse_rate

PROFILE_STEPS = 5
TARGET_S = 0.3
WARM_UP_STEPS = 2  # DDP rebuilds its buckets after the first
FEWEST_STEPS = 2


class Method:
    """One method at work, with a model of its own.

    Attributes:
        step_s: seconds of its steps on this rank.
    """

    def __init__(self, name: str, workload: Workload, rate_bps: float | None) -> None:
        plain = TWICE if name == AGAIN else name
        self.bucket_cap_mb = methods.bucket_cap_mb(plain, None, rate_bps)
        self._workload = workload
        self._model = wrap(workload, 0, self.bucket_cap_mb)
        self._optimizer = workload.optimizer(self._model.parameters())
        self._attached = methods.attach(plain, self._model, self._optimizer, 0)  # keeps the link
        self.step_s: list[float] = []

    def step(self) -> None:
        """Take a step, once all ranks are there."""
        dist.barrier()
        start = time.perf_counter()
        measure.timed_step(self._model, self._workload, self._optimizer)
        self.step_s.append(time.perf_counter() - start)


def _profile(workload: Workload, cell: Cell) -> dict[str, Any]:
    """Measure what predictions are made from, with a model that is thrown away."""
    model = wrap(workload, 0, 25.0)
    optimizer = workload.optimizer(model.parameters())

    def step() -> None:
        model.zero_grad(set_to_none=True)
        workload.loss(model).backward()
        if optimizer is not None:
            optimizer.step()

    recipes = tuple(DENSE_RECIPES.get(name, name) for name in cell.methods)
    timeout = GROUP_TIMEOUT.total_seconds()
    found = profile(model, step, recipes=recipes, steps=PROFILE_STEPS, timeout=timeout, target=TARGET_S)
    return {name: value for name, value in found.as_dict().items() if name != "schema"}


def _latest(seconds: float) -> float:
    """Return what is most on any rank, so that all decide alike."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def main(path: str) -> None:
    """Measure one cell."""
    torch.set_num_threads(1)
    cell = Cell.load(Path(path))
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    settings = Settings(workload=cell.workload, nodes=cell.nodes, rate=cell.rate)
    workload = make_workload(settings, dist.get_rank(), dist.get_world_size())
    workload.start(0)
    found = _profile(workload, cell)
    running = {name: Method(name, workload, parse_rate(cell.rate)) for name in (*cell.methods, AGAIN)}
    order = list(running.values())
    began = time.perf_counter()
    for number in range(WARM_UP_STEPS + cell.steps):
        if number >= WARM_UP_STEPS + FEWEST_STEPS and _latest(time.perf_counter() - began) > cell.steps_s:
            break
        for method in order:
            method.step()
        order = [*order[1:], order[0]]
    step_s: dict[str, list[float]] = {}
    for name, method in running.items():
        seconds = torch.tensor(method.step_s[WARM_UP_STEPS:], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # a step is over when the last rank is
        step_s[name] = seconds.tolist()
    if dist.get_rank() == 0:
        caps = {name: method.bucket_cap_mb for name, method in running.items()}
        print(json.dumps({"profile": found, "step_s": step_s, "bucket_cap_mb": caps}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
