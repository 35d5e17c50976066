"""Time and bytes until local methods reach the training loss that DDP has after 500 steps.

    python benchmarks/to_a_loss.py losses times whole table --folder to-a-loss

`losses` trains every method on an emulated network without limits, `times` takes a few steps and exchanges of each on
the shaped ones, `whole` runs one method to the loss on a shaped network, `table` puts together what is there. Cells are
files in the folder: what was ended goes on from the first that is missing.

What a method computes does not depend on the network, to the bit (`whole` compares it). With k the steps to the loss,
of which every H-th ends in an exchange:

    seconds = k * step_s + floor(k / H) * exchange_s

step_s is the median step without an exchange (of DDP and int8 with it, and exchange_s is 0); exchange_s is what a
period of H steps takes beyond H * step_s, in the mean of the periods. `whole` holds this against the clock.

The loss is the mean over hosts and over the last 100 steps, whole periods of every H here; reached is where it first
comes down to what DDP has after 500 steps with the same seed.
"""

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from cells import conditions, is_kept, kept, measured

from thinwire.bench.plots import STYLE, require_matplotlib
from thinwire.bench.settings import LOSS_STEPS, Settings, parse_methods, split_local
from thinwire.bench.table import label, rate_text
from thinwire.lab.units import parse_rate

DDP_STEPS = 500
METHODS = (
    "ddp",
    "int8",
    *(f"diloco:{h}:{recipe}" for h in (10, 50, 100) for recipe in ("dense", "int8", "e3m0")),
    "streaming:50:4:5:e3m0",
    "streaming:100:4:5:e3m0",
)
RATES = ("100mbit", "10mbit")
LATENCY = "20ms"
WHOLE = ("diloco:10:int8", "100mbit")
_WARM_UP = 3  # steps
_SHORT = 4  # steps between exchanges of DiLoCo where only one exchange's time is asked for


def main() -> None:
    """Do what is named, in this order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("losses", "times", "whole", "table"))
    parser.add_argument("--folder", type=Path, default=Path("to-a-loss"), help="of the cells")
    parser.add_argument("--methods", type=parse_methods, default=METHODS, help="comma-separated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=1500, help="a method that needs more has not reached the loss")
    parser.add_argument("--json", type=Path, help="of table: numbers")
    parser.add_argument("--plot", type=Path, help="of table: loss against time of seed 0, as PNG")
    args = parser.parse_args()
    grid = Grid(args.folder, args.seeds, args.max_steps)
    if "losses" in args.what:
        for seed in range(args.seeds):
            for method in args.methods:
                grid.losses(method, seed)
    if "times" in args.what:
        for rate in RATES:
            for method in args.methods:
                grid.times(method, rate)
    if "whole" in args.what:
        print(grid.whole_of(*WHOLE), file=sys.stderr)
    if "table" in args.what:
        document = grid.document(args.methods)
        print("\n".join(markdown(document)))
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
        if args.plot is not None:
            args.plot.write_bytes(draw(document))


class Grid:
    """The cells of this benchmark, and what follows from them.

    Args:
        folder: of the cells.
        num_seeds: 0 to so many.
        max_steps: of a training that does not reach the loss before.
    """

    def __init__(self, folder: Path, num_seeds: int, max_steps: int) -> None:
        self._folder, self._num_seeds, self._max_steps = folder, num_seeds, max_steps

    def losses(self, method: str, seed: int) -> dict[str, Any]:
        """Train a method, and DDP before it."""
        return measured(self._folder, _loss_name(method, seed), self._loss_settings(method, seed))

    def times(self, method: str, rate: str) -> dict[str, Any]:
        """Take a few steps and exchanges on a shaped network."""
        short = _short(method)
        return measured(self._folder, f"times-{short}-{rate}", _time_settings(short, rate))

    def whole_of(self, method: str, rate: str) -> str:
        """Train a method to the loss on a shaped network; say how far time and losses are from what is computed."""
        free = self.losses(method, 0)["runs"][0]
        settings = self._loss_settings(method, 0, rate=rate, latency=LATENCY)
        run = measured(self._folder, f"whole-{method}-{rate}", settings)["runs"][0]
        steps = reached(run["curve"]["loss"], self._target(0))
        if steps is None:
            raise SystemExit(f"{method} does not reach the loss in {self._max_steps} steps")
        clock = sum(run["curve"]["step_s"][:steps])
        computed = seconds(steps, costs(self.times(method, rate)["runs"][0]), _period(method))
        same = run["curve"]["loss"] == free["curve"]["loss"]
        return (
            f"{method} at {rate}: {steps} steps in {clock:.1f} s; computed {computed:.1f} s, "
            f"{100 * (computed / clock - 1):+.1f} %; losses of all steps are {'the same' if same else 'OTHERS'} as "
            "without a limit"
        )

    def document(self, methods: Sequence[str]) -> dict[str, Any]:
        """Return what is known: a row per method, with what was measured so far."""
        rows: list[dict[str, Any]] = []
        facts: dict[str, Any] = {}
        for method in methods:
            seeds = [seed for seed in range(self._num_seeds) if self._kept_losses(method, seed)]
            if not seeds:
                continue
            runs = [self.losses(method, seed)["runs"][0] for seed in seeds]
            steps = [reached(run["curve"]["loss"], self._target(seed)) for seed, run in zip(seeds, runs, strict=True)]
            timed: dict[str, Any] = {}
            for rate in RATES:
                short = _short(method)
                document = kept(self._folder, f"times-{short}-{rate}", _time_settings(short, rate))
                if document is None:
                    continue
                facts = conditions(document)
                step_s, exchange_s = costs(document["runs"][0])
                timed[rate] = {"step_s": step_s, "exchange_s": exchange_s}
                timed[rate]["seconds"] = [
                    None if k is None else seconds(k, (step_s, exchange_s), _period(method)) for k in steps
                ]
            rows.append(
                {
                    "method": method,
                    "seeds": seeds,
                    "steps": steps,
                    "nbytes": [
                        None if k is None else sum(run["curve"]["sent_nbytes"][:k])
                        for k, run in zip(steps, runs, strict=True)
                    ],
                    "val_loss": [run["val_loss"] for run in runs],
                    "rates": timed,
                    "curve": runs[0]["curve"]["loss"],
                }
            )
        targets = {seed: self._target(seed) for seed in range(self._num_seeds) if self._kept_losses("ddp", seed)}
        return {"schema": 1, "conditions": facts, "latency": LATENCY, "target_loss": targets, "rows": rows}

    def _kept_losses(self, method: str, seed: int) -> bool:
        """Whether this cell and DDP's of the same seed are there."""
        return all(is_kept(self._folder, _loss_name(name, seed)) for name in ("ddp", method))

    def _target(self, seed: int) -> float:
        """Training loss that DDP has after `DDP_STEPS`."""
        return trailing(self.losses("ddp", seed)["runs"][0]["curve"]["loss"])[DDP_STEPS - 1]

    def _loss_settings(self, method: str, seed: int, **network: Any) -> Settings:
        settings = {"workload": "gpt", "methods": (method,), "rate": None, "first_seed": seed, **network}
        if method == "ddp":
            return Settings(**settings, steps=DDP_STEPS)
        return Settings(**settings, steps=self._max_steps, until_loss=self._target(seed))


def trailing(losses: Sequence[float]) -> list[float]:
    """Return, for every step, the mean over it and those before it, `LOSS_STEPS` in all where there are so many.

    >>> trailing([4.0, 2.0])
    [4.0, 3.0]
    """
    return [mean(losses[max(0, k - LOSS_STEPS) : k]) for k in range(1, len(losses) + 1)]


def reached(losses: Sequence[float], target: float) -> int | None:
    """Return the number of steps after which the mean of the last `LOSS_STEPS` is at most `target`."""
    means = trailing(losses)
    return next((k for k in range(LOSS_STEPS, len(means) + 1) if means[k - 1] <= target), None)


def costs(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds of a step without an exchange, and what an exchange adds to a period of them.

    >>> costs({"method": "diloco:4:int8", "curve": {"step_s": [9, 9, 9, 9, 1, 1, 1, 3, 1, 1, 1, 4]}})
    (1, 2.5)
    """
    step_s, period = run["curve"]["step_s"], _period(run["method"])
    if period == 1:
        return median(step_s[_WARM_UP:]), 0.0
    steady = step_s[period:]  # the first one warms up
    num_periods = len(steady) // period
    without_s = median(s for k, s in enumerate(steady) if k % period != period - 1)
    return without_s, sum(steady[: num_periods * period]) / num_periods - period * without_s


def seconds(steps: int, cost: tuple[float, float], period: int) -> float:
    """Return how long so many steps take, from what `costs` gives."""
    step_s, exchange_s = cost
    return steps * step_s + steps // period * exchange_s


def _period(method: str) -> int:
    local = split_local(method)
    return 1 if local is None else local.sync_every


def _short(method: str) -> str:
    """Return the method that is timed instead: all parameters travel at once however many steps lie between."""
    local = split_local(method)
    return f"diloco:{_SHORT}:{local.recipe}" if local is not None and local.kind == "diloco" else method


def _time_settings(method: str, rate: str) -> Settings:
    local = split_local(method)
    steps = 8 if local is None else 4 * _SHORT if local.kind == "diloco" else 2 * local.sync_every
    return Settings(workload="gpt", methods=(method,), rate=rate, latency=LATENCY, steps=steps)


def _loss_name(method: str, seed: int) -> str:
    return f"losses-{method}-{seed}"


def markdown(document: Mapping[str, Any]) -> list[str]:
    """Return the table: means over seeds, and the range of steps."""
    rates = [rate for rate in RATES if any(rate in row["rates"] for row in document["rows"])]
    headings = ["method", "seeds", "steps", "MB", "fewer bytes"]
    for rate in rates:
        at = rate_text(parse_rate(rate) or 0.0)
        headings += [f"step s, {at}", "exchange s", "time to the loss, s", "times as fast"]
    headings.append("validation loss there")
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    rows = document["rows"]
    base = next((row for row in rows if row["method"] == "ddp"), None)
    for row in rows:
        steps = [k for k in row["steps"] if k is not None]
        cells = [f"`{row['method']}`" if row["method"] != "ddp" else label(row), str(len(row["seeds"]))]
        missed = len(row["steps"]) - len(steps)
        if missed:
            cells.append(f"not reached with {missed} seed{'s' if missed > 1 else ''}")
        else:
            cells.append(f"{min(steps)} to {max(steps)}" if len(steps) > 1 else str(steps[0]))
        nbytes = _mean_of(row["nbytes"])
        cells += [_text(nbytes, 1e-6), _fewer(base and _mean_of(base["nbytes"]), nbytes)]
        for rate in rates:
            timed = row["rates"].get(rate)
            if timed is None:
                cells += [""] * 4
                continue
            own = _mean_of(timed["seconds"])
            theirs = base["rates"].get(rate) if base is not None else None
            exchange = f"{timed['exchange_s']:.2f}" if _period(row["method"]) > 1 else ""
            faster = _fewer(theirs and _mean_of(theirs["seconds"]), own)
            cells += [f"{timed['step_s']:.2f}", exchange, _text(own), faster]
        cells.append(f"{mean(row['val_loss']):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mean_of(values: Sequence[float | None]) -> float | None:
    """Mean over seeds; None where the loss was not reached with one."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _text(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:,.{0 if value * factor >= 100 else 1}f}"


def _fewer(base: float | None, own: float | None) -> str:
    return "" if base is None or own is None else f"{base / own:.{0 if base / own >= 10 else 1}f}"


def draw(document: Mapping[str, Any]) -> bytes:
    """Return loss against time on each network, of seed 0, as PNG; a point where the loss is reached."""
    matplotlib = require_matplotlib()
    rates = [rate for rate in RATES if any(rate in row["rates"] for row in document["rows"])]
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter

        figure = Figure(figsize=(11, 5.2), layout="constrained")
        panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
        for axes, rate in zip(panels, rates, strict=True):
            for row, (colour, style) in zip(document["rows"], _lines(document["rows"]), strict=True):
                if rate not in row["rates"]:
                    continue
                timed, period = row["rates"][rate], _period(row["method"])
                cost = timed["step_s"], timed["exchange_s"]
                losses = trailing(row["curve"])
                times = [seconds(k, cost, period) for k in range(1, len(losses) + 1)]
                name = label(row) if row["method"] == "ddp" else row["method"]
                axes.plot(times, losses, style, color=colour, linewidth=1.6, label=name)
                if row["seeds"][0] == 0 and row["steps"][0] is not None:
                    axes.plot(times[row["steps"][0] - 1], losses[row["steps"][0] - 1], "o", color=colour, markersize=5)
            axes.axhline(document["target_loss"][0], color="#b08800", linewidth=1.2, linestyle=":")
            axes.set_xscale("log")
            axes.set_xlim(left=10)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.set_xlabel(f"seconds, logarithmic: {rate_text(parse_rate(rate) or 0.0)}, {LATENCY} one way")
        panels[0].set_ylabel(f"training loss, mean of the last {LOSS_STEPS} steps")
        panels[0].set_ylim(top=4.0)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=160)
    return image.getvalue()


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A colour for every rhythm, a dash for every recipe."""
    colours = {1: "#1f2328", 10: "#0969da", 50: "#1a9f77", 100: "#d1495b"}
    found: list[tuple[str, str]] = []
    for row in rows:
        local = split_local(row["method"])
        if local is None:
            found.append((colours[1], "-" if row["method"] == "ddp" else "--"))
        elif local.kind == "streaming":
            found.append(({50: "#8250df", 100: "#e0812b"}.get(local.sync_every, "#17a2b8"), "-"))
        else:
            dash = {"dense": "-", "int8": "--", "e3m0": ":"}.get(local.recipe, "-.")
            found.append((colours.get(local.sync_every, "#17a2b8"), dash))
    return found


if __name__ == "__main__":
    main()
