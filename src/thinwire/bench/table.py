"""The table at the end of a benchmark, as rows of text: for the terminal and for the report."""

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from thinwire.bench.settings import BASELINES

Run = Mapping[str, Any]


@dc.dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, a longer explanation, and how a run fills it."""

    heading: str
    meaning: str
    cell: Callable[[Run], str]
    needs_network: bool = False


def _number(name: str, digits: int, factor: float = 1.0) -> Callable[[Run], str]:
    def cell(run: Run) -> str:
        value = run[name]
        return "–" if value is None else f"{value * factor:,.{digits}f}"

    return cell


def _mb(name: str) -> Callable[[Run], str]:
    return _number(name, 2, 1e-6)


def _bucket(run: Run) -> str:
    if run["bucket_cap_mb"] is None:
        return "–"
    return "one" if run["bucket_cap_mb"] >= 1e5 else f"{run['bucket_cap_mb']:g}"


def _replicas(run: Run) -> str:
    return "equal" if run["bit_identical"] else "DIFFER"


COLUMNS = (
    Column("method", "PyTorch's own (DDP, PowerSGD) and thinwire's recipes", lambda run: label(run)),
    Column("seed", "of parameters and batches", lambda run: str(run["seed"])),
    Column("bucket MB", "DDP's bucket size", _bucket),
    Column("steps", "trained in the time given", lambda run: str(run["steps"])),
    Column("step s", "median seconds of a step", _number("step_s", 3), True),
    Column("compute s", "the same step without exchange, all hosts running", _number("compute_s", 3)),
    Column("exposed s", "step less compute: what the exchange costs", _number("exposed_comm_s", 3), True),
    Column("ideal s", "step whose exchange hides as far as wire and cores allow", _number("ideal_s", 3), True),
    Column("sent MB", "per step and host, at the network interface", _mb("sent_nbytes_per_step"), True),
    Column("plan MB", "payload per step and host, by arithmetic", _mb("planned_nbytes_per_step")),
    Column("ratio", "float32 payload of DDP, or FSDP2 / this payload", _number("compression_ratio", 1)),
    Column("loss, equal steps", "training loss after the same steps for all", _number("loss_at_equal_steps", 3)),
    Column("loss, equal time", "training loss after the same seconds for all", _number("loss_at_equal_s", 3), True),
    Column("val. loss", "on held-out data at the end of the run", _number("val_loss", 3)),
    Column("accuracy", "on held-out data at the end of the run", _number("accuracy", 3)),
    Column("replicas", "parameters of all ranks, bit for bit, at the end", _replicas),
)


def label(run: Run) -> str:
    """A run's name in tables and plots."""
    name = {"ddp": "DDP fp32", "ddp-fp16": "DDP fp16 hook", "fsdp": "FSDP2 fp32"}.get(run["method"])
    if name is None:
        kind, _, setting = run["method"].partition(":")
        name = f"PowerSGD r{setting}" if kind == "ddp-powersgd" else f"thinwire {run['method']}"
    return name


def is_baseline(run: Run) -> bool:
    """Whether the run is one of PyTorch's own methods."""
    return run["method"] in (*BASELINES, "fsdp") or run["method"].startswith("ddp-powersgd:")


def columns(document: Mapping[str, Any]) -> list[Column]:
    """Columns that say something about this document.

    Without an emulated network nothing that depends on a wire is shown: loopback says nothing about speed.
    """
    runs = document["runs"]
    shown = []
    for column in COLUMNS:
        if column.heading == "seed" and len({run["seed"] for run in runs}) < 2:
            continue
        if column.needs_network and not document["conditions"]["emulated"]:
            continue
        if all(column.cell(run) == "–" for run in runs):
            continue
        shown.append(column)
    return shown


def rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Cells of every run."""
    return [[column.cell(run) for column in columns(document)] for run in document["runs"]]


def network_line(conditions: Mapping[str, Any]) -> str:
    """One sentence about the network that the numbers come from."""
    if not conditions["emulated"]:
        num_ranks = conditions["nodes"] * conditions.get("ranks_per_node", 1)  # older documents have one a node
        return (
            f"Plain loopback, no network emulated ({conditions['reason']}): {num_ranks} processes on one machine. "
            "Bytes and losses hold; nothing here says anything about speed."
        )
    wire = f"{conditions['nodes']} emulated hosts"
    if conditions.get("ranks_per_node", 1) > 1:
        wire += f" of {conditions['ranks_per_node']} ranks each"
    if conditions["rate_bps"] is not None:
        wire += f", {rate_text(conditions['rate_bps'])} each way"
    if conditions["latency_s"]:
        wire += f", {conditions['latency_s'] * 1e3:g} ms one way"
    if conditions["congestion_control"]:
        wire += f", TCP with {conditions['congestion_control']}"
    return f"{wire} (measured {rate_text(conditions['measured_rate_bps'])} of payload with all hosts sending at once)."


def notes(document: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the table."""
    conditions, runs = document["conditions"], document["runs"]
    lines = [f"{label(run)}: {run['note']}." for run in runs if run["note"] and run["seed"] == runs[0]["seed"]]
    emulated_backward_s = conditions.get("emulated_backward_s")
    if emulated_backward_s is not None:
        lines.append(f"Compute time is slept, not computed: {conditions['emulated_compute_source']}.")
        lines += _core_limits(conditions, runs, emulated_backward_s)
    lines += [f"{label(run)}, seed {run['seed']}: replicas DIFFER." for run in runs if not run["bit_identical"]]
    return lines


def _core_limits(conditions: Mapping[str, Any], runs: Sequence[Run], emulated_backward_s: float) -> list[str]:
    """Say where this machine's cores, not the wire, decided a replay's step time."""
    lines = []
    backward_s = runs[0]["backward_s"] if runs else 0.0
    if backward_s > 1.1 * emulated_backward_s:
        lines.append(
            f"Making up gradients alone takes this machine {backward_s:.3f} s where an accelerator would take "
            f"{emulated_backward_s:.3f} s: {conditions['nodes']} hosts share {conditions['cores']} cores."
        )
    for run in runs:
        if run["codec_s"] is None or not conditions["emulated"]:
            continue
        if bound(conditions, run) == "cores":
            window_s, wire_s = _window_s(run), _wire_s(conditions, run)
            lines.append(
                f"{label(run)}: limited by this machine's cores, not by the wire. From the start of backward to the "
                f"last gradient {window_s:.3f} s pass, of which the wire needs {wire_s:.3f} s; the codec alone takes "
                f"{run['codec_s']:.3f} s, for {conditions['nodes']} hosts on {conditions['cores']} cores."
            )
    return lines


def bound(conditions: Mapping[str, Any], run: Run) -> Literal["computing", "wire", "cores"]:
    """What decides a replay's step on an emulated network: computing, which hides the exchange; the wire; the cores."""
    window_s = _window_s(run)
    if window_s <= 1.2 * run["backward_s"]:
        return "computing"
    return "cores" if window_s > 2 * _wire_s(conditions, run) else "wire"


def _window_s(run: Run) -> float:
    """Seconds from the start of backward to the last gradient."""
    return run["step_s"] - run["forward_s"] - run["optimizer_s"]


def _wire_s(conditions: Mapping[str, Any], run: Run) -> float:
    return run["planned_nbytes_per_step"] * 8 / conditions["measured_rate_bps"]


def rate_text(bits_per_s: float) -> str:
    """A rate with its unit, such as ``100 Mbit/s``."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s:.3g} bit/s"


def plain_text(document: Mapping[str, Any]) -> str:
    """The table with spaces, for terminals and logs without rich."""
    cells = [[column.heading for column in columns(document)], *rows(document)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))]
    lines = []
    for row in cells:
        first, rest = row[0].ljust(widths[0]), zip(row[1:], widths[1:], strict=True)
        lines.append("  ".join([first, *(cell.rjust(width) for cell, width in rest)]))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", network_line(document["conditions"]), *notes(document)])
