"""The JSON document of a benchmark, made from the events of its ranks. The schema is the project's public format."""

import dataclasses as dc
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.arithmetic import dense_nbytes, ideal_step_s, with_headers
from thinwire.bench.settings import AUTO, AUTO_START, Settings

SCHEMA = 1
_SMOOTHING_STEPS = 5


@dc.dataclass(slots=True)
class Events:
    """What the ranks have reported so far."""

    ready: dict[str, Any] = dc.field(default_factory=dict)
    records: list[dict[str, Any]] = dc.field(default_factory=list)

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep one event of a rank."""
        match event["event"]:
            case "ready":
                self.ready = dict(event)
            case "run":
                self.records.append(event["record"])


def make_document(
    settings: Settings, network: Mapping[str, Any], events: Events, *, rate_bps: float | None, latency_s: float | None
) -> dict[str, Any]:
    """Build the document.

    Args:
        settings: of the benchmark.
        network: ``emulated`` (bool), ``reason`` (why not, or empty) and ``congestion_control`` (TCP's, or None).
        events: of all its ranks.
        rate_bps: of each host's link as asked for, in bits per second.
        latency_s: one way, in seconds.
    """
    emulated = bool(network["emulated"])
    rate = events.ready["rate_nbytes_per_s"]
    numel = events.ready["facts"]["num_parameters"]
    conditions = {
        **events.ready["facts"],
        "emulated": emulated,
        "reason": network["reason"],
        "nodes": settings.nodes,
        "ranks_per_node": settings.ranks_per_node,
        "wrap": settings.wrap,
        "rate_bps": rate_bps if emulated else None,
        "latency_s": latency_s if emulated else None,
        "congestion_control": network["congestion_control"],
        "measured_rate_bps": rate * 8 if emulated else None,
        "learning_rate_decay": settings.decay,
        "seconds_per_method": None if settings.steps is not None else settings.seconds,
        "threads_per_rank": 1,
        **_host(),
        "torch": events.ready["torch"],
        "kernels": events.ready["kernels"],
    }
    runs = []
    for record in events.records:
        planned = record["planned_nbytes_per_step"]
        dense = record.get("dense_nbytes_per_step") or dense_nbytes(numel, settings.world_size)
        phases = {name: record[name] for name in ("forward_s", "backward_s", "optimizer_s")}
        compute_s = sum(phases.values())
        ideal_s = None
        if record["codec_s"] is not None and emulated:
            ideal_s = ideal_step_s(**phases, codec_s=record["codec_s"], sent_nbytes=planned, rate_nbytes_per_s=rate)
        runs.append(
            {
                "workload": settings.workload,
                "nodes": settings.nodes,
                "rate_bps": conditions["rate_bps"],
                "latency_s": conditions["latency_s"],
                **record,
                "compute_s": compute_s,
                "ideal_s": ideal_s,
                "exposed_comm_s": record["step_s"] - compute_s,
                # Every host receives as much as it sends, on average over hosts.
                "planned_with_headers_nbytes_per_step": with_headers(planned, planned),
                "compression_ratio": dense / planned if planned else None,
                "train_loss": _tail_mean(record["curve"]["loss"]),
                "note": _note(record),
            }
        )
    _add_equal_losses(runs)
    return _finite({"schema": SCHEMA, "conditions": conditions, "runs": runs})


def machine() -> dict[str, Any]:
    """What this process runs on and with, for the conditions of measurements made in it."""
    import torch

    from thinwire.kernels import backend

    return {**_host(), "torch": torch.__version__, "kernels": backend()}


def _host() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def loss_at_step(run: Mapping[str, Any], step: int) -> float | None:
    """Training loss, mean of the last few steps up to ``step``."""
    return _tail_mean(run["curve"]["loss"][:step])


def loss_at_seconds(run: Mapping[str, Any], seconds: float) -> float | None:
    """Training loss, mean of the last few steps that were finished after ``seconds`` of training."""
    elapsed, steps = 0.0, 0
    for step_s in run["curve"]["step_s"]:
        elapsed += step_s
        if elapsed > seconds * (1 + 1e-9):
            break
        steps += 1
    return loss_at_step(run, steps)


def _add_equal_losses(runs: list[dict[str, Any]]) -> None:
    """Add each run's loss after as many steps, and after as many seconds, as every run has trained."""
    if not runs:
        return
    steps = min(run["steps"] for run in runs)
    seconds = min(sum(run["curve"]["step_s"]) for run in runs)
    for run in runs:
        run["equal_steps"], run["equal_s"] = steps, seconds
        run["loss_at_equal_steps"] = loss_at_step(run, steps)
        run["loss_at_equal_s"] = loss_at_seconds(run, seconds)


def _note(record: Mapping[str, Any]) -> str:
    """What a reader of the table must know about a method's set-up; empty if nothing."""
    if record["method"].startswith("ddp-powersgd"):
        return "one bucket: on gloo PyTorch's PowerSGD hook hangs with more, so nothing overlaps with backward"
    if record["method"] == AUTO and record["steps"] < (enough := record["start_after"] + AUTO_START + 2):
        return (
            f"its first trial may take {AUTO_START} steps, so that figures are of those after it; expected at least "
            f"{enough}, got {record['steps']}: its step is the last one, perhaps one of the trial"
        )
    return ""


def _tail_mean(losses: Sequence[float]) -> float | None:
    tail = losses[-_SMOOTHING_STEPS:]
    return _mean(tail) if tail else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _processor() -> str:
    """The processor's name as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _finite(value: Any) -> Any:
    """The same document with null for inf and nan, which JSON has not: a diverged loss."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
