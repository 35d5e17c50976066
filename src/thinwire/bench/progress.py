"""Live progress of a benchmark: a rich table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from thinwire.bench.settings import Settings
from thinwire.bench.table import columns, label, network_line, notes, plain_text, rows
from thinwire.bench.terminal import rich_table

Event = Mapping[str, Any]

WIDE = 140  # columns of a terminal that the whole table needs


def make_progress(settings: Settings) -> "PlainProgress | RichProgress":
    """Rich progress where a terminal and rich are there, else plain lines on standard error."""
    if sys.stderr.isatty():
        try:
            import rich  # noqa: F401
        except ModuleNotFoundError:
            print("for live progress: pip install '.[demo]'", file=sys.stderr)
        else:
            return RichProgress(settings)
    return PlainProgress(settings)


def _run_text(record: Mapping[str, Any]) -> str:
    text = f"{record['steps']} steps, {record['step_s']:.3f} s a step"
    if record["val_loss"] is not None:
        text += f", validation loss {record['val_loss']:.3f}"
    return text


def _table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> Any:
    """A rich table, names left and numbers right."""
    table = rich_table(headings, [index == 0 for index in range(len(headings))])
    for row in cells:
        table.add_row(*row)
    return table


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """One line when something begins or ends."""

    def __init__(self, settings: Settings):
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""

    def on_event(self, event: Event) -> None:
        """Print what happened."""
        match event["event"]:
            case "network":
                self._print("emulated network is up" if event["emulated"] else f"plain loopback: {event['reason']}")
            case "ready":
                self._print(f"ranks are up: {event['facts']['model']}, {event['facts']['num_parameters']:,} parameters")
            case "run":
                self._print(f"{label(event['record'])}: {_run_text(event['record'])}")

    def show(self, document: Mapping[str, Any]) -> None:
        """Print the final table on standard output."""
        print(plain_text(document))

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)


class RichProgress(AbstractContextManager["RichProgress"]):
    """A table with one live row per method and seed."""

    def __init__(self, settings: Settings):
        from rich.console import Console
        from rich.live import Live

        self._settings = settings
        self._console = Console(stderr=True)
        self._status = "starting the network"
        self._states: dict[tuple[str, int], dict[str, Any]] = {
            (method, seed): {} for seed in settings.seed_numbers for method in settings.methods
        }
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=5)

    def __enter__(self) -> "RichProgress":
        """Start drawing."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing; the last picture stays."""
        self._live.stop()

    def on_event(self, event: Event) -> None:
        """Update the picture."""
        match event["event"]:
            case "network":
                self._status = "starting the ranks" if event["emulated"] else f"plain loopback: {event['reason']}"
            case "ready":
                self._status = "ranks are up"
            case "method":
                self._status = "training"
                self._states[event["method"], event["seed"]]["state"] = "running"
            case "step":
                self._states[event["method"], event["seed"]].update(event)
            case "run":
                record = event["record"]
                self._states[record["method"], record["seed"]].update(record, state="done", step=record["steps"])

    def show(self, document: Mapping[str, Any]) -> None:
        """Print the final table on standard output."""
        from rich.console import Console

        console = Console()
        headings = [column.heading for column in columns(document)]
        cells = rows(document)
        # One table where it fits, else time and bytes above, learning below.
        middle = headings.index("ratio") + 1 if console.width < WIDE else len(headings)
        console.print(f"[bold]{document['conditions']['model']}[/bold]. {network_line(document['conditions'])}")
        for part in (slice(1, middle), slice(middle, None)):
            if headings[part]:
                console.print(_table([headings[0], *headings[part]], [[row[0], *row[part]] for row in cells]))
        for line in notes(document):
            console.print(f"* {line}")

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(title=f"thinwire: {self._settings.workload}, {self._status}", title_justify="left")
        for heading in ("method", "", "steps", "step s", "sent MB", "loss"):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for (method, seed), state in self._states.items():
            name = label({"method": method}) + (f", seed {seed}" if self._settings.seeds > 1 else "")
            if not state:
                table.add_row(name, "waiting", style="dim")
                continue
            done = state.get("state") == "done"
            share = 1.0 if done else self._share(state)
            loss = state.get("val_loss") if done else state.get("loss")
            table.add_row(
                name,
                ProgressBar(total=1.0, completed=share, width=24),
                str(state.get("step", "")),
                f"{state['step_s']:.3f}" if "step_s" in state else "",
                f"{state['sent_nbytes'] / 1e6:,.1f}" if state.get("sent_nbytes") else "",
                ("val. " if done else "") + f"{loss:.3f}" if loss is not None else "",
                style="bold" if done else "",
            )
        return Group(table)

    def _share(self, state: Mapping[str, Any]) -> float:
        if self._settings.steps is not None:
            return state.get("step", 0) / self._settings.steps
        return min(1.0, state.get("seconds", 0.0) / self._settings.seconds)
