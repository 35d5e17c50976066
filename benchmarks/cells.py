"""Cells of a grid: benchmarks whose documents are kept in a folder, so that a grid can be ended and taken up again."""

import dataclasses as dc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.bench.engine import run_benchmark
from thinwire.bench.settings import Settings


def kept(folder: Path, name: str, settings: Settings) -> dict[str, Any] | None:
    """Return the document of a cell that has been measured; None of one that has not.

    Raises:
        SystemExit: it was measured with other settings.
    """
    file = _file(folder, name)
    if not file.exists():
        return None
    cell = json.loads(file.read_text())
    there = Settings(**{**cell["settings"], "methods": tuple(cell["settings"]["methods"])})
    if there != settings:
        raise SystemExit(f"{file} was measured with {there}, now asked for is {settings}; take another --folder")
    return cell["document"]


def is_kept(folder: Path, name: str) -> bool:
    """Whether a cell has been measured."""
    return _file(folder, name).exists()


def measured(folder: Path, name: str, settings: Settings) -> dict[str, Any]:
    """Return the document of a cell, measured now unless it is there already."""
    document = kept(folder, name, settings)
    if document is not None:
        return document
    print(f"{name}: measuring", file=sys.stderr, flush=True)
    document = _compact(run_benchmark(settings, lambda event: None))
    differing = [run["method"] for run in document["runs"] if not run["bit_identical"]]
    if differing:
        raise SystemExit(f"{name}: replicas differ after {', '.join(differing)}")
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, name)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"settings": dc.asdict(settings), "document": document}))
    os.replace(part, file)  # whole or not at all
    return document


def _compact(document: dict[str, Any]) -> dict[str, Any]:
    """Cut what a curve has per step to the digits that mean something, nine of a float32: grids are kept for long."""
    for run in document["runs"]:
        curve = run["curve"]
        curve["step_s"] = [round(step_s, 4) for step_s in curve["step_s"]]
        curve["sent_nbytes"] = [round(nbytes) for nbytes in curve["sent_nbytes"]]
        curve["loss"] = [None if loss is None else float(f"{loss:.9g}") for loss in curve["loss"]]
    return document


def conditions(document: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same for all cells of a grid."""
    names = ("model", "data", "data_nbytes", "optimizer", "num_parameters", "nodes", "cores", "processor", "python")
    names = (*names, "system", "torch", "kernels", "congestion_control", "emulated")
    return {name: document["conditions"][name] for name in names if name in document["conditions"]}


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '+').replace(':', '=')}.json"  # some file systems know neither
