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
    listed("--steps", type=bench.positive_int, default=8, help="of each method that count, after three (default: 8)")
    listed("--timeout", type=bench.positive, default=600.0, help="seconds of one cell (default: 600)")
    listed("--plot", metavar="FILE", type=Path, help="write a scatter plot, as PNG")
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
    check_outputs(args.json, args.plot)
    if args.plot is not None:
        from thinwire.bench.plots import require_matplotlib

        require_matplotlib()
    file = table_file(args.json)
    cells = list(grid(args.workloads, args.rates, args.hosts, methods=args.methods, steps=args.steps))
    with open_table(COLUMNS, file) as table:

        def on_rows(rows: Sequence[Mapping[str, Any]]) -> None:
            for row in rows:
                table.add(_cells(row))

        document = run_grid(cells, on_rows, timeout_s=args.timeout)
    for name, why in document["failed"].items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    print(
        f"error: median {100 * document['median_error']:.1f} %, 90th percentile {100 * document['p90_error']:.1f} %; "
        f"floor: median {100 * document['median_floor']:.1f} %",
        file=file,
    )
    for winner in document["winners"]:
        if winner["predicted"] != winner["measured"]:
            print(
                f"{winner['workload']}, {winner['nodes']} hosts, {rate_text(winner['rate_bps'] / 8)}: predicted "
                f"{winner['predicted']}, {100 * winner['loss']:.1f} % slower than {winner['measured']}",
                file=file,
            )
    write_json(document, args.json)
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
