"""What commands share of their output: where tables go, and the JSON document."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from thinwire.cli.bench import check_writable


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``; without a file it is standard output."""
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the results as JSON; - for standard output"
    )


def table_file(json_file: str | None) -> TextIO:
    """Return where tables go: standard output, unless the JSON is there."""
    return sys.stderr if json_file == "-" else sys.stdout


def check_outputs(*files: str | Path | None) -> None:
    """Raise `ThinwireError` unless all of these can be written: better now than after minutes of measuring."""
    for file in files:
        if file not in (None, "-"):
            check_writable(Path(file))


def write_json(document: Mapping[str, Any], file: str | None) -> None:
    """Write a document where ``--json`` says, if it was given."""
    if file is None:
        return
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")
