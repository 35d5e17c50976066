"""``thinwire bench validate``: are predicted step times those that the lab measures?"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.advisor.findings import rate_text, time_text
from thinwire.bench.settings import parse_methods, parse_workload
from thinwire.bench.terminal import Column, open_table
from thinwire.bench.validation import DENSE_RECIPES, METHODS, TWICE, grid, run_grid
from thinwire.bench.validation_text import markdown, summary
from thinwire.cli import bench
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.errors import ThinwireError
from thinwire.recipes import parse_recipe

WORKLOADS = ("gpt", "replay:vgg16/8", "replay:resnet50")
RATES = ("10mbit", "100mbit", "300mbit", "1gbit")
HOSTS = (2, 4, 8)
COLUMNS = (
    Column("workload", 17, left=True),
    Column("hosts"),
    Column("rate", 10),
    Column("method", 12, left=True),
    Column("predicted", 9),
    Column("measured", 9),
    Column("error", 8),
    Column("floor", 7),
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``validate`` and its arguments, below ``bench``."""
    parser = subparsers.add_parser(
        "validate",
        help="compare predicted step times with measured ones",
        description=(
            "For every cell of workloads, rates and hosts: measures a profile in the lab, predicts a step with every "
            "method from it, then lets the methods take steps in turn and compares. DDP runs twice, as two methods: "
            "what lies between is the floor that no prediction can be below. Large models are left out below 50 Mbit/s."
        ),
    )
    listed: Callable[..., Any] = parser.add_argument
    listed("--workloads", type=bench.argument(listed_of(parse_workload)), default=WORKLOADS, help=default_of(WORKLOADS))
    listed("--rates", type=bench.argument(listed_of(_rate)), default=RATES, help=default_of(RATES))
    listed("--hosts", type=bench.argument(listed_of(bench.at_least_two)), default=HOSTS, help=default_of(HOSTS))
    listed("--methods", type=bench.argument(parse_methods), default=METHODS, help=default_of(METHODS))
    listed("--steps", type=bench.positive_int, default=8, help="of each method that count, after two (default: 8)")
    listed(
        "--steps-time",
        metavar="SECONDS",
        type=bench.positive,
        default=40.0,
        help="of one cell, after which no further step is begun, if two have counted (default: 40)",
    )
    listed("--timeout", type=bench.positive, default=900.0, help="seconds of one cell (default: 900)")
    listed(
        "--keep",
        metavar="FOLDER",
        type=Path,
        help="keep there what is measured, cell by cell; cells that are there are not measured again, but predicted",
    )
    listed("--plot", metavar="FILE", type=Path, help="write a scatter plot, as PNG")
    listed("--table", metavar="FILE", type=Path, help="write the figures as tables, in Markdown")
    add_json_argument(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure cell after cell."""
    if TWICE not in args.methods:
        raise ThinwireError(f"--methods: expected {TWICE} among them, which runs twice for the floor")
    methods: Sequence[str] = args.methods
    for method in methods:
        if method.startswith("ddp-powersgd"):
            raise ThinwireError(f"--methods: {method} has no plan to predict from; thinwire's own is powersgd:RANK")
        parse_recipe(DENSE_RECIPES.get(method, method))  # raises for a schedule, which has no one step time
    check_outputs(args.json, args.plot, args.table)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    if args.plot is not None:
        from thinwire.bench.plots import require_matplotlib

        require_matplotlib()
    file = table_file(args.json)
    settings = {"methods": args.methods, "steps": args.steps, "steps_s": args.steps_time}
    cells = list(grid(args.workloads, args.rates, args.hosts, **settings))
    with open_table(COLUMNS, file) as table:

        def on_rows(rows: Sequence[Mapping[str, Any]]) -> None:
            for row in rows:
                table.add(_cells(row))

        document = run_grid(cells, on_rows, timeout_s=args.timeout, folder=args.keep)
    for name, why in document["failed"].items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    for line in summary(document):
        print(line, file=file)
    write_json(document, args.json)
    if args.table is not None:
        args.table.write_text(markdown(document))
    if args.plot is not None:
        from thinwire.bench.validation_plot import scatter

        args.plot.write_bytes(scatter(document))
    return 1 if document["failed"] else 0


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["workload"],
        str(row["nodes"]),
        rate_text(row["rate_bps"] / 8),
        row["recipe"],
        time_text(row["predicted_s"]),
        time_text(row["measured_s"]),
        f"{100 * (row['predicted_s'] / row['measured_s'] - 1):+.1f} %",
        f"{100 * row['floor']:.1f} %",
    ]


def listed_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return what reads a comma-separated list of what `parse` reads."""

    def convert(text: str) -> tuple[Any, ...]:
        values = tuple(parse(part.strip()) for part in text.split(",") if part.strip())
        if not values:
            raise ValueError(f"expected at least one, got {text!r}")
        return values

    return convert


def _rate(text: str) -> str:
    rate = bench.rate(text)
    if rate is None:
        raise ValueError(f"expected a rate such as 100mbit, got {text!r}")
    return rate


def default_of(values: Sequence[object]) -> str:
    """Return the help of such a list."""
    return f"comma-separated (default: {','.join(map(str, values))})"
