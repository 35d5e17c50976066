"""Run a benchmark: open the network, start a worker for every rank, follow its events, return the document."""

import json
import queue
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.bench.results import Events, make_document
from thinwire.bench.settings import Settings
from thinwire.comm.tracing import merge_traces
from thinwire.errors import LabError
from thinwire.lab import open_network, parse_duration, parse_rate

_KEPT_LINES = 30
_START_S = 120.0  # for interpreters to start and data to load on a busy machine
_SLOWEST_STEP_S = 120.0


def run_benchmark(
    settings: Settings,
    on_event: Callable[[Mapping[str, Any]], None],
    *,
    traces: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Measure every method of ``settings`` and return the document described in ``docs/benchmarks.md``.

    Args:
        settings: what to run.
        on_event: called on a reader thread with every event of rank 0, and first with ``network``.
        traces: where to write a trace of one step of all ranks, by method; needs ``settings.trace``.

    Raises:
        LabError: a rank failed; the message ends with its last lines.
    """
    events = Events()
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def on_line(rank: int, line: str) -> None:
        event = _parse(line)
        if event is None:
            lines.append(f"[{rank}] {line.rstrip()}")
            return
        try:
            events.add(event)
            on_event(event)
        except Exception as error:  # must not die with the reader thread: raised below, on the caller's
            errors.put(error)

    with (
        tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder,
        open_network(
            nodes=settings.nodes,
            rate=settings.rate,
            latency=settings.latency,
            nproc_per_node=settings.ranks_per_node,
        ) as network,
    ):
        status = {
            "emulated": network.emulated,
            "reason": network.reason or "",
            "congestion_control": network.congestion_control,
        }
        on_event({"event": "network", **status})
        path = Path(folder) / "settings.json"
        settings.save(path)
        # -W: a warning of torch on every rank would drown the output.
        argv = [sys.executable, "-W", "ignore", "-m", "thinwire.bench.worker", str(path)]
        result = network.start(argv, env={}, on_line=on_line).wait(timeout=_timeout_s(settings))
        if result.ok and traces:
            for number, method in enumerate(settings.methods):
                ranks = [Path(folder) / f"trace-{number}-{rank}.json" for rank in range(settings.world_size)]
                merge_traces(ranks, traces[method])
    if not errors.empty():
        raise errors.get()
    if not result.ok:
        raise LabError("\n".join([f"the benchmark failed: {result.message}", *lines]))
    return make_document(
        settings,
        status,
        events,
        rate_bps=parse_rate(settings.rate),
        latency_s=parse_duration(settings.latency),
    )


def _parse(line: str) -> dict[str, Any] | None:
    """An event, or None for any other line of output."""
    if not line.startswith('{"event"'):
        return None
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _timeout_s(settings: Settings) -> float:
    """Longer than any healthy run."""
    num_runs = len(settings.methods) * settings.seeds
    per_run_s = settings.seconds * 2 if settings.steps is None else settings.steps * _SLOWEST_STEP_S
    return _START_S + num_runs * (per_run_s + 10 * _SLOWEST_STEP_S)
