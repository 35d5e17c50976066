"""Plots of a benchmark as PNG bytes: loss against time, loss against bytes, where the step's time goes."""

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.bench.table import Run, is_baseline, label
from thinwire.errors import ThinwireError

LOOPBACK_MARK = "plain loopback, no network emulated: says nothing about speed"

# Greys for PyTorch's own methods, colours that colour-blind readers can tell apart for thinwire's.
_GREYS = ("#1f2328", "#7d8590", "#b08800", "#57606a")
_COLOURS = ("#0969da", "#1a9f77", "#d1495b", "#8250df", "#e0812b", "#17a2b8")
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8c959f",
    "axes.labelcolor": "#1f2328",
    "axes.grid": True,
    "grid.color": "#e6e9ec",
    "axes.axisbelow": True,
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "legend.frameon": False,
}


def require_matplotlib() -> Any:
    """Import matplotlib or say how to get it."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ThinwireError("reports need matplotlib: pip install '.[demo]'") from error
    return matplotlib


def make_plots(document: Mapping[str, Any]) -> dict[str, bytes]:
    """PNG images by name. Plots against time exist only where a network was emulated."""
    matplotlib = require_matplotlib()
    emulated = document["conditions"]["emulated"]
    runs = [run for run in document["runs"] if run["seed"] == document["runs"][0]["seed"]]
    learned = [run for run in runs if run["curve"]["loss"]]
    plots = {}
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        if learned and emulated:
            plots["loss-against-time"] = _loss_plot(learned, "seconds", emulated)
        if learned and not emulated:
            plots["loss-against-steps"] = _loss_plot(learned, "steps", emulated)
        if learned:
            plots["loss-against-bytes"] = _loss_plot(learned, "bytes", emulated)
        if emulated:
            plots["step-time"] = _step_plot(runs)
        else:
            plots["bytes-per-step"] = _bytes_plot(runs)
    return plots


def colours(runs: Sequence[Run]) -> list[str]:
    """A colour per run: greys for baselines, colours for thinwire."""
    greys, bright = itertools.cycle(_GREYS), itertools.cycle(_COLOURS)
    return [next(greys) if is_baseline(run) else next(bright) for run in runs]


def _loss_plot(runs: Sequence[Run], against: str, emulated: bool) -> bytes:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = _figure(6.4, 4.2)
    for run, colour in zip(runs, colours(runs), strict=True):
        curve = run["curve"]
        match against:
            case "seconds":
                x = list(itertools.accumulate(curve["step_s"]))
            case "steps":
                x = list(range(1, run["steps"] + 1))
            case _:
                per_step = curve["sent_nbytes"] or [run["planned_nbytes_per_step"]] * run["steps"]
                x = [nbytes / 1e6 for nbytes in itertools.accumulate(per_step)]
        # Loss is null where a run diverged; the line breaks there.
        y = _smooth([float("nan") if loss is None else loss for loss in curve["loss"]])
        style = "--" if is_baseline(run) else "-"
        axes.plot(x, y, style, color=colour, linewidth=1.8, label=label(run))
        axes.plot(x[-1:], y[-1:], "o", color=colour, markersize=4)
    axes.set_ylabel("training loss (mean over hosts, smoothed)")
    match against:
        case "seconds":
            axes.set_xlabel("seconds of training")
        case "steps":
            axes.set_xlabel("steps")
        case _:
            source = "read at the network interface" if emulated else "payload by arithmetic"
            axes.set_xlabel(f"MB sent per host ({source}), logarithmic")
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="best")
    return _png(figure, emulated)


def _step_plot(runs: Sequence[Run]) -> bytes:
    figure, axes = _figure(11, 1.6 + 0.36 * len(runs))
    names = [label(run) for run in runs]
    forward_s, backward_s = [run["forward_s"] for run in runs], [run["backward_s"] for run in runs]
    optimizer_s = [run["optimizer_s"] for run in runs]
    exposed_s = [max(0.0, run["exposed_comm_s"]) for run in runs]
    left = [0.0] * len(runs)
    for part, widths, colour in (
        ("forward", forward_s, "#9ec5e8"),
        ("backward", backward_s, "#4f93ce"),
        ("optimizer", optimizer_s, "#1f5f99"),
        ("exposed exchange", exposed_s, "#d1495b"),
    ):
        axes.barh(names, widths, left=left, height=0.62, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    ends = [max(end, run["ideal_s"] or 0.0) for end, run in zip(left, runs, strict=True)]
    for index, run in enumerate(runs):
        axes.text(ends[index], index, f"  {run['step_s']:.2f} s", va="center", color="#1f2328", fontsize=9)
    ideal = [(run["ideal_s"], index) for index, run in enumerate(runs) if run["ideal_s"] is not None]
    if ideal:
        axes.plot(*zip(*ideal, strict=True), "|", color="#1f2328", markersize=16, markeredgewidth=2, label="ideal step")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(ends) * 1.12)
    axes.set_xlabel("seconds of a step")
    figure.legend(loc="outside lower center", ncols=5)
    return _png(figure, emulated=True)


def _bytes_plot(runs: Sequence[Run]) -> bytes:
    figure, axes = _figure(11, 1.2 + 0.36 * len(runs))
    megabytes = [run["planned_nbytes_per_step"] / 1e6 for run in runs]
    axes.barh([label(run) for run in runs], megabytes, height=0.62, color=colours(runs))
    for index, value in enumerate(megabytes):
        axes.text(value, index, f"  {value:.2f}", va="center", color="#1f2328", fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(megabytes) * 1.1)
    axes.set_xlabel("MB of payload per step and host")
    return _png(figure, emulated=False)


def _smooth(losses: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average without the start-up bias: short runs must not look better or worse than long ones."""
    smoothed, average, total = [], 0.0, 0.0
    for loss in losses:
        average, total = weight * average + (1 - weight) * loss, weight * total + (1 - weight)
        smoothed.append(average / total)
    return smoothed


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # Figure, not pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _png(figure: Any, emulated: bool) -> bytes:
    if not emulated:
        figure.suptitle(LOOPBACK_MARK, fontsize=9, color="#9a6700")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
