"""``thinwire keys``: keys for parameter servers and their workers."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``keys`` and its arguments."""
    parser = subparsers.add_parser(
        "keys",
        help="make keys for parameter servers and workers that are not on one machine",
        description=(
            "Makes FOLDER/server, for `thinwire server --keys`, and FOLDER/worker, for thinwire.attach(keys=...). "
            "Whoever has either can take that side: copy each only to the machines that need it."
        ),
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="that has no keys yet")
    return parser


def run(args: argparse.Namespace) -> int:
    """Make them."""
    from thinwire.server.keys import make_keys

    make_keys(args.folder)
    print(f"{args.folder}/server for servers, {args.folder}/worker for workers; secret keys are readable by you alone")
    return 0
