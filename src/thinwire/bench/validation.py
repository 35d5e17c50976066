"""Predicted against measured: cells of (workload, hosts, rate), each with several methods in turn, step by step."""

import dataclasses as dc
import itertools
import json
import queue
import re
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.advisor import document as documents
from thinwire.advisor.profile import Profile
from thinwire.advisor.simulate import ONE_STREAM, THINWIRE, Exchanged, simulate
from thinwire.bench.measure import median
from thinwire.bench.validation_figures import make_document
from thinwire.errors import LabError, ProfileError
from thinwire.lab import open_network, parse_rate

TWICE = "ddp"  # the method that runs twice
AGAIN = "ddp (again)"
METHODS = ("ddp", "ddp-fp16", "int8", "int4", "topk:0.01")
DENSE_RECIPES = {"ddp": "dense", AGAIN: "dense", "ddp-fp16": "dense:fp16"}
_KEPT_LINES = 30


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One set-up.

    Attributes:
        workload: as `thinwire bench` takes it.
        nodes: emulated hosts.
        rate: of each host's link.
        methods: to measure, one step each in turn.
        steps: of each method that count, after some that do not, at most.
        steps_s: seconds after which no further step is begun, if two have counted; long steps need fewer.
    """

    workload: str
    nodes: int
    rate: str
    methods: tuple[str, ...] = METHODS
    steps: int = 8
    steps_s: float = 40.0

    def save(self, path: Path) -> None:
        """Write it as JSON, for the ranks."""
        path.write_text(json.dumps(dc.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Cell":
        """Read what `save` wrote."""
        values = json.loads(path.read_text())
        return cls(**{**values, "methods": tuple(values["methods"])})

    @property
    def name(self) -> str:
        """In a file's name, and for messages."""
        return re.sub(r"[^\w.]+", "-", f"{self.workload} {self.nodes} {self.rate}")


def grid(workloads: Sequence[str], rates: Sequence[str], nodes: Sequence[int], **settings: Any) -> Iterator[Cell]:
    """Yield the cells, but no large model on links of less than 50 Mbit/s: a step would take minutes."""
    for workload, rate, num in itertools.product(workloads, rates, nodes):
        if workload == "gpt" or (parse_rate(rate) or 1e12) >= 50e6:
            yield Cell(workload=workload, nodes=num, rate=rate, **settings)


def predict(profile: Profile, method: str, bucket_cap_mb: float) -> float:
    """Return the predicted seconds of a step with one method of the bench.

    Raises:
        ProfileError: the method has no plan, or its kernels were not measured.
    """
    from thinwire.advisor.probe import plan_for

    plan = plan_for(profile.computation, profile.cluster, DENSE_RECIPES.get(method, method))
    if plan is None:
        raise ProfileError(f"{method}: no room for the contributions of {profile.cluster.world_size} ranks")
    exchanged = Exchanged.of(plan, profile, bucket_cap_nbytes=bucket_cap_mb * 2**20)
    return simulate(exchanged, profile, driving=ONE_STREAM if plan.is_dense else THINWIRE).step_s


def measure_cell(cell: Cell, timeout_s: float) -> dict[str, Any]:
    """Measure a profile and steps in the lab; return what `rows_of` takes.

    Raises:
        LabError: no emulated network can be had, a rank failed, or time ran out.
    """
    found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def on_line(rank: int, line: str) -> None:
        if line.startswith('{"profile"'):
            found.put(json.loads(line))
        else:
            lines.append(f"[{rank}] {line.rstrip()}")

    with (
        tempfile.TemporaryDirectory(prefix="thinwire-validate-") as folder,
        open_network(nodes=cell.nodes, rate=cell.rate, allow_loopback=False) as network,
    ):
        path = Path(folder) / "cell.json"
        cell.save(path)
        argv = [sys.executable, "-W", "ignore", "-m", "thinwire.bench.validation_worker", str(path)]
        result = network.start(argv, env={}, on_line=on_line).wait(timeout=timeout_s)
    if not result.ok or found.empty():
        raise LabError("\n".join([f"{cell.workload} at {cell.rate} on {cell.nodes} hosts: {result.message}", *lines]))
    return found.get()


def kept_or_measured(cell: Cell, timeout_s: float, folder: Path | None) -> dict[str, Any]:
    """Return what was measured of a cell: now, or before, if `folder` keeps it. It is kept there.

    Predictions are not kept: they are made anew from the profile that is.

    Raises:
        LabError: as `measure_cell`, or the file is of other methods.
    """
    if folder is None:
        return measure_cell(cell, timeout_s)
    path = folder / f"{cell.name}.json"
    if path.exists():
        kept = documents.read(path)
        if kept.get("methods") != list(cell.methods):
            raise LabError(f"{path}: expected methods {list(cell.methods)}, got {kept.get('methods')}: keep them apart")
        return kept
    told = {"methods": list(cell.methods), **measure_cell(cell, timeout_s)}
    documents.write(told, path)
    return told


def rows_of(cell: Cell, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per method, from what rank 0 told: the profile, and seconds and bucket sizes by method."""
    profile = documents.parse(Profile, told["profile"], "profile")
    measured: Mapping[str, float] = {method: median(seconds) for method, seconds in told["step_s"].items()}
    floor = abs(measured[TWICE] / measured[AGAIN] - 1)
    return [
        {
            "workload": cell.workload,
            "nodes": cell.nodes,
            "rate_bps": parse_rate(cell.rate),
            "recipe": method,
            "predicted_s": predict(profile, method, told["bucket_cap_mb"][method]),
            "measured_s": measured[method],
            "floor": floor,
            "steps": len(told["step_s"][method]),
        }
        for method in cell.methods
    ]


def run_grid(
    cells: Sequence[Cell],
    on_rows: Callable[[Sequence[Mapping[str, Any]]], None],
    *,
    timeout_s: float,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run cell after cell but those that `folder` keeps; what fails is in the document, and the others go on.

    Raises:
        LabError: every cell failed.
    """
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for cell in cells:
        try:
            found = rows_of(cell, kept_or_measured(cell, timeout_s, folder))
        except (LabError, ProfileError) as error:
            failed[f"{cell.workload}, {cell.nodes} hosts, {cell.rate}"] = str(error)
            continue
        rows += found
        on_rows(found)
    if not rows:
        raise LabError("no cell could be measured: " + next(iter(failed.values()), "there is none"))
    return make_document(rows, failed)
