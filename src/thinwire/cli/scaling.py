"""``thinwire bench scaling``: what a step is made of on more and more hosts, and how efficient they are."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.bench.scaling import HOSTS, METHODS, WORKLOADS, Grid, remarks, run_grid
from thinwire.bench.settings import AUTO, AUTO_START, parse_methods, parse_workload, split_local
from thinwire.bench.terminal import Column, open_table
from thinwire.cli import bench
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.cli.validate import default_of, listed_of
from thinwire.errors import ThinwireError

_WIDTHS = {"workload": 17, "method": 17, "communication s": 15, "efficiency": 10, "limit": 9}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``scaling`` and its arguments, below ``bench``."""
    parser = subparsers.add_parser(
        "scaling",
        help="measure how the exchange of large models scales with hosts",
        description=(
            "Replays large models on one emulated host and on more: communication is the step's time on n hosts less "
            "that on one, compression included; efficiency is time on one host over time on n, beside the ideal "
            "(T_FP+T_BP)/(T_FP+max(T_BP,T_COMM)). On one host nothing is exchanged."
        ),
    )
    parser.add_argument(
        "--workloads", type=bench.argument(listed_of(_replay)), default=WORKLOADS, help=default_of(WORKLOADS)
    )
    parser.add_argument("--hosts", type=bench.argument(listed_of(_hosts)), default=HOSTS, help=default_of(HOSTS))
    parser.add_argument("--methods", type=bench.argument(parse_methods), default=METHODS, help=default_of(METHODS))
    parser.add_argument("--rate", type=bench.rate, default="1gbit", help="of each host's link (default: 1gbit)")
    parser.add_argument("--latency", type=bench.latency, help="one way, such as 5ms (default: none added)")
    parser.add_argument("--steps", type=bench.positive_int, default=8, help="of each method that count (default: 8)")
    parser.add_argument("--compute", type=bench.positive, help="seconds of forward plus backward of every workload")
    parser.add_argument("--report", metavar="FOLDER", type=Path, help="write both figures and a page")
    add_json_argument(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure workload after workload."""
    from thinwire.bench.checks import check_settings
    from thinwire.bench.scaling_plots import HEADINGS, cells, network_line

    for method in args.methods:
        if split_local(method) is not None:
            raise ThinwireError(f"--methods: {method} exchanges what an optimizer changed; a replay has none")
        if method == AUTO and args.steps < AUTO_START + 2:
            raise ThinwireError(
                f"--steps: expected at least {AUTO_START + 2} with auto, which tries first, got {args.steps}"
            )
    grid = Grid(
        workloads=args.workloads,
        hosts=args.hosts,
        methods=args.methods,
        rate=args.rate,
        latency=args.latency,
        steps=args.steps,
        compute_s=args.compute,
    )
    check_settings(grid.settings(args.workloads[0], max(2, *args.hosts), args.methods))
    check_outputs(args.json)
    if args.report is not None:
        from thinwire.bench.plots import require_matplotlib

        require_matplotlib()
        bench.check_writable(args.report, folder=True)
    file = table_file(args.json)
    columns = [Column(name, _WIDTHS.get(name, 0), left=name in ("workload", "method")) for name in HEADINGS]
    rows: list[Mapping[str, Any]] = []
    with open_table(columns, file) as table:

        def on_event(workload: str, hosts: int, event: Mapping[str, Any]) -> None:
            where = f"{workload} on {hosts} host{'s' if hosts > 1 else ''}"
            match event["event"]:
                case "network":
                    table.status(f"{where}: starting")
                case "method":
                    table.status(f"{where}: {event['method']}")
                case "step":
                    table.status(f"{where}: {event['method']}, step {event['step']}, {event['step_s']:.2f} s")

        def on_row(row: Mapping[str, Any]) -> None:
            rows.append(row)
            table.add(cells(rows, row))

        document = run_grid(grid, on_event, on_row)
    print("\n".join(["", network_line(document), *(f"* {line}" for line in remarks(document))]), file=file)
    write_json(document, args.json)
    if args.report is not None:
        from thinwire.bench.scaling_plots import write_page

        print(f"report: {write_page(document, args.report)}", file=sys.stderr)
    different = [row["method"] for row in document["rows"] if not row["bit_identical"]]
    if different:
        print(f"thinwire: replicas differ after {', '.join(different)}", file=sys.stderr)
    return 1 if different or document["failed"] else 0


def _replay(text: str) -> str:
    workload = parse_workload(text)
    if not workload.startswith("replay:"):
        raise ValueError(f"expected a replay such as replay:vgg16, got {text!r}")
    return workload


def _hosts(text: str) -> int:
    return 1 if text == "1" else bench.at_least_two(text)
