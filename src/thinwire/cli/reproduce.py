"""``thinwire reproduce``: studies of the literature, done again with thinwire's own model."""

import argparse
from collections.abc import Mapping
from typing import Any

from thinwire.bench.terminal import Column, open_table
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json

COLUMNS = (
    Column("model", 10, left=True),
    Column("GPUs", 5),
    Column("batch", 5),
    Column("Gbit/s", 6),
    Column("method", 20, left=True),
    Column("ms", 7),
    Column("16-bit DDP"),
    Column("fp32 DDP"),
    Column("speed-up"),
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``reproduce`` and its arguments."""
    parser = subparsers.add_parser(
        "reproduce",
        help="do a study of the literature again: utility",
        description=(
            "utility: over 600 set-ups of data centres (models x GPUs x batch x method x bandwidth), as in Agarwal et "
            "al. 2022, On the Utility of Gradient Compression in Distributed Training Systems. Prints which of them "
            "win over DDP that sends 16 bits and overlaps its exchange with backward, and where every input comes from."
        ),
    )
    parser.add_argument("study", choices=("utility",))
    parser.add_argument("--all", action="store_true", help="print the set-ups that lose, too")
    add_json_argument(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Simulate, show rows as they come, write what was asked for."""
    from thinwire.bench.utility import setups, study

    check_outputs(args.json)
    total, done = len(list(setups())), 0
    with open_table(COLUMNS, table_file(args.json)) as table:

        def on_row(row: Mapping[str, Any]) -> None:
            nonlocal done
            done += 1
            table.status(f"{done} of {total} set-ups")
            if args.all or row["wins"]:
                table.add(_cells(row))

        document = study(on_row=on_row)
    print(_conclusion(document), file=table_file(args.json))
    write_json(document, args.json)
    return 0


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["model"],
        str(row["num_gpus"]),
        str(row["batch"]),
        f"{row['rate_gbit']:g}",
        row["method"],
        *(f"{1e3 * row[name]:.0f}" for name in ("observed_s", "ddp_16bit_s", "ddp_s")),
        f"{row['speedup_vs_16bit']:.2f}",
    ]


def _conclusion(document: Mapping[str, Any]) -> str:
    conditions = document["conditions"]
    lines = [
        "Milliseconds of backward with its exchange; the speed-up is over 16-bit DDP.",
        f"{document['wins']} of {document['setups']} set-ups win over DDP that sends 16 bits.",
    ]
    for rate, counts in document["by_rate_gbit"].items():
        lines.append(
            f"  at {rate} Gbit/s {counts['wins']} of {counts['setups']}; over DDP that sends 32 bits "
            f"{counts['wins_vs_fp32']}"
        )
    lines += [
        f"In the paper {conditions['paper_result']}: {conditions['paper']}.",
        "Inputs, none of them measured here:",
    ]
    lines += [f"  {name}: {source}" for name, source in conditions["sources"].items()]
    for model, source in conditions["backward_sources"].items():
        lines.append(f"  {model}, {1e3 * conditions['backward_s'][model]:.0f} ms of backward: {source}")
    codec = ", ".join(f"{recipe} {1e3 * s:g} ms" for recipe, s in conditions["codec_s_resnet50"].items())
    lines.append(f"  encode and decode, ResNet-50: {codec}")
    return "\n".join(lines)
