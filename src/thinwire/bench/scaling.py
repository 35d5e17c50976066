"""How training scales with hosts: what a step's time is made of, and how efficient it is beside the ideal.

With t(n) a step's seconds on n hosts, and T_FP, T_BP those of forward and backward on one, where nothing is exchanged
and t(1) = T_FP + T_BP, the rows' figures are those of the CLAN paper (see References):

    communication    = t(n) - t(1)                     compression counts as communication
    efficiency       = t(1) / t(n)
    ideal efficiency = (T_FP + T_BP) / (T_FP + max(T_BP, T_COMM))
    T_COMM           = payload that leaves a host in a step / measured rate

References:
    Zhong, Xie, Zheng, Lin: Compressed Communication for Distributed Training: Adaptive Methods and System, 2021,
    https://arxiv.org/abs/2105.07829. Differs from the paper: T_COMM is each method's own, from counted bytes and the
    rate that hosts reach when all send at once, where the paper has one ideal, of uncompressed gradients.
"""

import dataclasses as dc
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.engine import run_benchmark
from thinwire.bench.results import machine
from thinwire.bench.servers import split_method
from thinwire.bench.settings import Settings, split_replay
from thinwire.bench.table import bound
from thinwire.errors import LabError
from thinwire.shapes import model_layers, num_parameters

SCHEMA = 1
BASE = "ddp"  # what others are compared with
METHODS = (BASE, "fp16", "onebit", "topk:0.001", "servers:2/onebit")
WORKLOADS = ("replay:vgg16", "replay:resnet50", "replay:bert-large")
HOSTS = (1, 2, 4, 8)

Event = Mapping[str, Any]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What is measured.

    Attributes:
        workloads: replays.
        hosts: numbers of emulated hosts; one host is always measured.
        methods: on more than one host; `BASE` among them or not.
        rate, latency: of each host's link.
        steps: of each method that count, after some that do not.
        compute_s: of forward plus backward; None takes the model's own.
    """

    workloads: tuple[str, ...] = WORKLOADS
    hosts: tuple[int, ...] = HOSTS
    methods: tuple[str, ...] = METHODS
    rate: str | None = "1gbit"
    latency: str | None = None
    steps: int = 8
    compute_s: float | None = None

    def settings(self, workload: str, hosts: int, methods: Sequence[str]) -> Settings:
        """Return the benchmark that measures some methods on so many hosts."""
        from thinwire.bench.measure import WARM_UP_STEPS

        return Settings(
            workload=workload,
            methods=tuple(methods),
            nodes=hosts,
            rate=self.rate,
            latency=self.latency,
            steps=WARM_UP_STEPS + self.steps,
            compute_s=self.compute_s,
        )


def run_grid(
    grid: Grid,
    on_event: Callable[[str, int, Event], None],
    on_row: Callable[[Mapping[str, Any]], None],
    *,
    available_nbytes: int | None = None,
) -> dict[str, Any]:
    """Measure every workload on one host and on more; what fails or has no room is in the document, the others go on.

    Args:
        grid: what to measure.
        on_event: called with workload, hosts and every event of rank 0.
        on_row: called with every row as soon as it is there.
        available_nbytes: memory that may be used; None takes what this machine has free.

    Raises:
        LabError: no network can be emulated, or nothing could be measured.
    """
    room = available_memory() if available_nbytes is None else available_nbytes
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    left_out: dict[str, str] = {}
    network: dict[str, Any] = {}
    several = sorted({hosts for hosts in grid.hosts if hosts > 1})
    for workload in grid.workloads:
        alone: Mapping[str, Any] = {}  # `BASE` on one host, which comes first
        for hosts in (1, *several):
            cell = f"{workload} on {hosts} host{'s' if hosts > 1 else ''}"
            methods = [BASE] if hosts == 1 else [m for m in grid.methods if _fits(workload, hosts, m, room)]
            for method in [] if hosts == 1 else sorted(set(grid.methods) - set(methods)):
                needed = needed_nbytes(workload, hosts, method)
                left_out[f"{cell}, {method}"] = f"about {needed / 1e9:.0f} GB of memory, {room / 1e9:.0f} GB are free"
            if not methods:
                continue
            try:
                document = run_benchmark(
                    grid.settings(workload, hosts, methods),
                    lambda event, workload=workload, hosts=hosts: on_event(workload, hosts, event),
                )
            except LabError as error:
                failed[cell] = str(error)
                if hosts == 1:
                    break  # nothing to compare with
                continue
            if not document["conditions"]["emulated"]:
                reason = document["conditions"]["reason"]
                raise LabError(f"scaling over loopback says nothing; no network can be emulated: {reason}")
            network = {name: document["conditions"][name] for name in _NETWORK}
            if not alone:
                alone = document["runs"][0]
            for run in document["runs"]:
                rows.append(row_of(document["conditions"], run, alone))
                on_row(rows[-1])
    if not rows:
        raise LabError("nothing could be measured: " + next(iter({**failed, **left_out}.values()), "there is nothing"))
    conditions = {**network, "steps": grid.steps, **machine()}
    return {"schema": SCHEMA, "conditions": conditions, "rows": rows, "left_out": left_out, "failed": failed}


_NETWORK = ("rate_bps", "latency_s", "congestion_control")


def row_of(conditions: Mapping[str, Any], run: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row, from a run on some hosts and that of `BASE` on one, both as `thinwire bench --json` has them."""
    one_host_s = alone["forward_s"] + alone["backward_s"]
    step_s = run["step_s"] if run["nodes"] > 1 else one_host_s
    planned, rate_bps = run["planned_nbytes_per_step"], conditions["measured_rate_bps"]
    wire_s = 8 * planned / rate_bps if planned else 0.0
    return {
        "workload": run["workload"],
        "nodes": run["nodes"],
        "method": run["method"],
        "step_s": step_s,
        "one_host_s": one_host_s,
        "communication_s": step_s - one_host_s,
        "forward_s": alone["forward_s"],
        "backward_s": alone["backward_s"],
        # On several hosts without exchange: above that of one where they share this machine's cores.
        "compute_s": run["compute_s"],
        "codec_s": run["codec_s"],
        "wire_s": wire_s,
        "efficiency": one_host_s / step_s,
        "ideal_efficiency": one_host_s / (alone["forward_s"] + max(alone["backward_s"], wire_s)),
        "bound": bound(conditions, run) if run["nodes"] > 1 else "computing",
        "planned_nbytes_per_step": planned,
        "sent_nbytes_per_step": run["sent_nbytes_per_step"],
        "measured_rate_bps": rate_bps,
        "bit_identical": run["bit_identical"],
    }


def less_communication(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float | None:
    """Return by which share a row's communication is below that of `BASE` on as many hosts; None without that."""
    key = (row["workload"], row["nodes"], BASE)
    base = next((one for one in rows if (one["workload"], one["nodes"], one["method"]) == key), None)
    if base is None or row["method"] == BASE or base["communication_s"] <= 0:
        return None
    return 1 - row["communication_s"] / base["communication_s"]


def remarks(document: Mapping[str, Any]) -> list[str]:
    """Say where this machine's cores were the limit, what was left out, and what failed."""
    lines: list[str] = []
    cores = document["conditions"]["cores"]
    for workload, rows in itertools.groupby(document["rows"], lambda row: row["workload"]):
        rows = list(rows)
        for hosts, some in itertools.groupby(rows, lambda row: row["nodes"]):
            bound_rows = [row for row in some if row["bound"] == "cores"]
            if not bound_rows:
                continue
            each = ", ".join(
                f"{row['method']} ({row['step_s']:.2f} s, of which the wire needs {row['wire_s']:.2f} s)"
                for row in bound_rows
            )
            lines.append(f"{workload} on {hosts} hosts: {cores} cores are the limit, not the wire, of {each}.")
        most = max(rows, key=lambda row: row["compute_s"])
        if most["compute_s"] > 1.1 * most["one_host_s"]:
            lines.append(
                f"{workload}: on {most['nodes']} hosts the step without exchange takes {most['compute_s']:.2f} s, on "
                f"one {most['one_host_s']:.2f} s, since gradients are made up on {cores} cores; the difference counts "
                "as communication here."
            )
    lines += [f"{cell}: left out, {why}." for cell, why in document["left_out"].items()]
    lines += [f"{cell}: failed: {why}" for cell, why in document["failed"].items()]
    return lines


def available_memory() -> int:
    """Return the bytes that this machine can give to new processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise LabError("no MemAvailable in /proc/meminfo: expected Linux")


def needed_nbytes(workload: str, hosts: int, method: str) -> int:
    """Return about how much memory all ranks of a replay take together, with their servers."""
    name, scale = split_replay(workload)
    layers = model_layers(name, scale)
    gradient, longest = 4 * num_parameters(layers), 4 * max(layer.numel for layer in layers)
    per_host, recipe = split_method(method)
    kind = recipe.partition(":")[0]
    # Gradients are made in one layer's memory from another's.
    of_a_rank = _RANK_NBYTES + 2 * longest + _COPIES.get(kind, 8.2) * gradient
    of_servers = (hosts * per_host * _SERVER_NBYTES + _COPIES_OF_SERVERS * gradient) if per_host else 0.0
    return round(hosts * of_a_rank + of_servers)


_RANK_NBYTES = 350e6
_SERVER_NBYTES = 300e6
_COPIES_OF_SERVERS = 4.0  # of all together: residuals, sums in buffers of powers of two, and what has arrived
# How many times a rank holds its gradient at most. Peaks that were seen with vgg16 and bert-large/2 on two hosts;
# 8.2 is top-k's.
_COPIES = {BASE: 1.3, "fp16": 4.4, "onebit": 6.0}


def _fits(workload: str, hosts: int, method: str, room: int) -> bool:
    return needed_nbytes(workload, hosts, method) < 0.95 * room
