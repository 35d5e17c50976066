"""``thinwire compressors``: list every kind, with what it promises and when to choose it."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.terminal import Column, open_table
from thinwire.catalogue import Entry, catalogue, contract_text
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.errors import ThinwireError

COLUMNS = (
    Column("recipe", 26, left=True),
    Column("bits", 5),
    Column("contract", 44, left=True),
    Column("aggregators", 15, left=True),
    Column("feedback", left=True),
    Column("choose it when", left=True),
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``compressors`` and its arguments."""
    parser = subparsers.add_parser(
        "compressors",
        help="list every kind of compressor, what it promises, and when to choose it",
        description=(
            "Lists examples of every kind that a recipe may name: bits per element of a full partition of 65,536 "
            "float32, the contract of the error there, the aggregators that take it, and whether it needs feedback."
        ),
    )
    add_json_argument(parser)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/compressors.md")
    parser.add_argument(
        "--cost", metavar="FILE", type=Path, help="for --markdown: speeds, as `thinwire kernels --json FILE` wrote them"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """List the catalogue."""
    check_outputs(args.json)
    entries = catalogue()
    write_json({"schema": 1, "compressors": [_record(entry) for entry in entries]}, args.json)
    if args.markdown:
        print(markdown(entries, {} if args.cost is None else read_costs(args.cost)), file=table_file(args.json))
    elif args.json != "-":
        with open_table(COLUMNS, table_file(args.json)) as table:
            for entry in entries:
                table.add(_cells(entry))
    return 0


def markdown(entries: Sequence[Entry], costs: Mapping[str, str]) -> str:
    """Return the catalogue as a table for the documentation, with the costs of recipes where they are known."""
    rows = [
        ["recipe", "bits a value", "error", "feedback", "aggregators", "GB/s", "choose it when"],
        ["---"] * 7,
    ]
    for entry in entries:
        _, bits, contract, aggregators, feedback, when = _cells(entry)
        rows.append([f"`{entry.recipe}`", bits, contract, feedback, aggregators, costs.get(entry.recipe, "–"), when])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def read_costs(file: Path) -> dict[str, str]:
    """Return, per recipe, GB/s of encoding (with feedback where it is needed) and decoding on one thread."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ThinwireError(f"--cost: expected what `thinwire kernels --json` writes, got {file}: {error}") from error
    speeds = {(row["compressor"], row["op"]): row["gb_per_s"] for row in rows if row["threads"] == 1}
    costs: dict[str, str] = {}
    for entry in catalogue():
        name = entry.recipe.rpartition("/")[2]
        encode = speeds.get((name, "encode_feedback" if entry.needs_feedback else "encode"))
        decode = speeds.get((name, "decode"))
        if encode is not None and decode is not None:
            costs[entry.recipe] = f"{encode:.2g} / {decode:.2g}"
    return costs


def _cells(entry: Entry) -> list[str]:
    return [
        entry.recipe,
        f"{entry.bits_per_element:.2f}".removesuffix(".00"),
        contract_text(entry.contract),
        ", ".join(entry.aggregators),
        "error feedback" if entry.needs_feedback else "none",
        entry.when,
    ]


def _record(entry: Entry) -> dict[str, Any]:
    contract = dataclasses.asdict(entry.contract)
    limits = {name: value for name, value in contract.items() if name not in ("smallest", "largest")}
    record = {**dataclasses.asdict(entry), "contract": {"type": type(entry.contract).__name__, **limits}}
    del record["compressor"]
    return record
