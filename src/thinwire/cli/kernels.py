"""``thinwire kernels``: how fast every compressor encodes and decodes on this machine, beside its memory's speed."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.aggregators import PowerSGD
from thinwire.bench.terminal import Column, open_table
from thinwire.catalogue import catalogue
from thinwire.cli.bench import argument, positive_int
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.compressors import Compressor
from thinwire.errors import ThinwireError
from thinwire.recipes import parse_compressor, parse_recipe

COLUMNS = (
    Column("compressor", 26, left=True),
    Column("threads"),
    Column("encode", 12),
    Column("with feedback"),
    Column("decode", 12),
    Column("accumulate", 12),
    Column("10,000 x 1 KiB"),
    Column("torch encode"),
)

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``kernels`` and its arguments."""
    parser = subparsers.add_parser(
        "kernels",
        help="measure how fast every compressor encodes and decodes on this machine",
        description=(
            "Encodes and decodes float32 in partitions of 65,536, one native call per operation. Prints GB/s of "
            "float32 and, in brackets, the time over that of the memory traffic the operation cannot do without, at "
            "the speed of a plain copy in the same run: 1.0 is as fast as memory allows. Then the time of one call "
            "for 10,000 partitions of 1 KiB, and GB/s of the same kernel in plain torch."
        ),
    )
    add_json_argument(parser)
    parser.add_argument("--threads", type=argument(_threads), default=(1, 2), help="comma-separated (default: 1,2)")
    parser.add_argument(
        "--only", type=argument(_compressors), metavar="RECIPE,...", help="measure these (default: the catalogue)"
    )
    parser.add_argument(
        "--nbytes", type=argument(parse_nbytes), default=64 << 20, help="of float32, such as 1MiB (default: 64MiB)"
    )
    parser.add_argument("--repeats", type=positive_int, default=7, help="timings per row; the best counts (default: 7)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, show rows as they come, write what was asked for."""
    from thinwire.bench.kernels import KernelBench

    check_outputs(args.json)
    bench = KernelBench(args.nbytes, args.repeats)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with open_table(COLUMNS, table_file(args.json)) as table:
        for compressor in args.only or _all_compressors():
            for threads in args.threads:
                table.status(f"measuring {compressor.recipe()}, {threads} threads")
                try:
                    if isinstance(compressor, PowerSGD):
                        measured = bench.exchange_rows(compressor, threads)
                    else:
                        measured = bench.rows(compressor, threads)
                except ThinwireError as error:  # the values do not suit it
                    left_out[compressor.recipe()] = str(error)
                    continue
                rows += measured
                table.add(_cells(measured))
    document = bench.document(rows, left_out)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", file=table_file(args.json))
    print(_conditions(document["conditions"]), file=table_file(args.json))
    write_json(document, args.json)
    return 0


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for one compressor and number of threads."""
    by_op = {row["op"]: row for row in rows}
    first, small = rows[0], by_op.get("encode_small")
    by_op["encode_feedback"] = by_op.get("exchange", by_op.get("encode_feedback", first))
    reference = first["reference_gb_per_s"]
    return [
        first["compressor"],
        str(first["threads"]),
        *(
            f"{by_op[op]['gb_per_s']:.2f} ({by_op[op]['floor_ratio']:.2f})" if op in by_op else ""
            for op in ("encode", "encode_feedback", "decode", "accumulate")
        ),
        "" if small is None else f"{1e3 * small['seconds']:.2f} ms",
        "" if reference is None else f"{reference:.3f}",
    ]


def _conditions(conditions: Mapping[str, Any]) -> str:
    copies = ", ".join(f"{gb:.1f} GB/s with {threads}" for threads, gb in conditions["copy_gb_per_s"].items())
    return (
        f"GB/s of float32 (time / floor). {conditions['nbytes'] / 2**20:g} MiB in partitions of 65,536, best of "
        f"{conditions['repeats']}; {conditions['kernels']} kernels, torch {conditions['torch']}, "
        f"{conditions['processor']}. A copy moves, read and written, {copies} threads."
    )


def _all_compressors() -> list[Compressor | PowerSGD]:
    """Those of the catalogue that call kernels, each once, and the exchanges that do so by themselves."""
    entries = [entry for entry in catalogue() if entry.kind != "dense"]
    return list(dict.fromkeys(_measured(e.recipe) if e.kind == "powersgd" else e.compressor for e in entries))


def _compressors(text: str) -> list[Compressor | PowerSGD]:
    """What the recipes send."""
    return list(dict.fromkeys(map(_measured, text.split(","))))


def _measured(recipe: str) -> Compressor | PowerSGD:
    if recipe.startswith("powersgd"):
        settings = parse_recipe(recipe)
        assert isinstance(settings, PowerSGD)
        return settings
    return parse_compressor(recipe.rpartition("/")[2])


def _threads(text: str) -> tuple[int, ...]:
    return tuple(positive_int(number) for number in text.split(","))


def parse_nbytes(text: str) -> int:
    """Read a size such as ``64MiB``.

    >>> parse_nbytes("64MiB"), parse_nbytes("1.5kB")
    (67108864, 1500)
    """
    found = re.fullmatch(r"([\d.]+)\s*([KMG]?I?B?)", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"expected a size such as 64MiB, got {text!r}")
    nbytes = int(float(found[1]) * _UNITS[found[2]])
    if nbytes < 4:
        raise ValueError(f"expected at least 4 bytes, got {text!r}")
    return nbytes
