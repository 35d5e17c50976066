"""``thinwire demo``: one command that shows what compression does for training over a slow network."""

import argparse
from pathlib import Path
from typing import Any

from thinwire.bench.settings import DEMO_METHODS, Settings, parse_methods
from thinwire.cli.bench import add_network_arguments, argument, positive, run_settings

SECONDS = 24.0  # for each of seven methods: with start-up and evaluation the whole stays under five minutes


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``demo`` and its arguments."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small GPT on 4 emulated hosts with and without compression; report in 5 minutes",
        description=(
            "Trains a byte-level GPT on the source text of Python's standard library, on emulated hosts with slow "
            "links, with PyTorch's own methods and with thinwire, the same time for each. Ends with a table and an "
            "HTML report. Where network namespaces cannot be had it runs over plain loopback and says so."
        ),
    )
    add_network_arguments(parser)
    parser.add_argument(
        "--methods",
        type=argument(parse_methods),
        default=DEMO_METHODS,
        help=f"comma-separated (default: {','.join(DEMO_METHODS)})",
    )
    parser.add_argument(
        "--seconds", type=positive, default=SECONDS, help=f"of training per method (default: {SECONDS:g})"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("thinwire-demo"), help="folder for the report (default: thinwire-demo)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON too; - for standard output")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    settings = Settings(
        workload="gpt",
        methods=args.methods,
        nodes=args.nodes,
        rate=args.rate,
        latency=args.latency,
        seconds=args.seconds,
    )
    from thinwire.bench.checks import check_settings

    check_settings(settings)
    return run_settings(settings, json_file=args.json, report=args.output)
