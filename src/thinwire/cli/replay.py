"""``thinwire replay``: what recipes make of recorded gradients."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.aggregators import Aggregator
from thinwire.bench.terminal import Column, open_table
from thinwire.catalogue import catalogue
from thinwire.cli.bench import argument, positive_int
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.errors import ThinwireError
from thinwire.recipes import parse_recipe

COLUMNS = (
    Column("recipe", 26, left=True),
    Column("feedback", left=True),
    Column("bits", 5),
    Column("one encode"),
    Column("mean", 8),
    Column("sum", 8),
    Column("cosine"),
    Column("encode ms"),
    Column("decode ms"),
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``replay`` and its arguments."""
    parser = subparsers.add_parser(
        "replay",
        help="run recipes over gradients that `thinwire record` wrote, and show their errors",
        description=(
            "Exchanges recorded gradients in lock step, with feedback from step to step where the recipe has it. "
            "Prints bits per element, the relative squared error of one encode, of the mean over ranks and of its sum "
            "over the recorded steps, the cosine of the mean, and milliseconds to encode and decode all of it."
        ),
    )
    parser.add_argument("file", type=Path, help="what `thinwire record` wrote")
    parser.add_argument(
        "--recipes", type=argument(parse_recipes), metavar="RECIPE,...", help="to run (default: the catalogue)"
    )
    parser.add_argument("--threads", type=positive_int, default=1, help="of every kernel call (default: 1)")
    add_json_argument(parser)
    parser.add_argument("--plot", metavar="FILE", type=argument(_picture), help="draw error against bits: .png or .svg")
    parser.add_argument(
        "--by-family", action="store_true", help="with --plot FILE.png: a picture FILE-NAME.png for each family too"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, show rows as they come, write and draw what was asked for."""
    from thinwire.bench.fidelity import Fidelity
    from thinwire.bench.plots import require_matplotlib
    from thinwire.bench.recording import Recording

    check_outputs(args.json, args.plot)
    if args.plot is not None:
        require_matplotlib()
    recipes = args.recipes or parse_recipes(",".join(entry.recipe for entry in catalogue() if entry.aggregators))
    fidelity = Fidelity(Recording(args.file), threads=args.threads)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with open_table(COLUMNS, table_file(args.json)) as table:
        for aggregator in recipes:
            recipe = aggregator.recipe()

            def on_step(doing: str, recipe: str = recipe) -> None:
                table.status(f"{recipe}: {doing}")

            try:
                rows.append(fidelity.measure(aggregator, on_step))
            except ThinwireError as error:  # it does not fit these gradients
                left_out[aggregator.recipe()] = str(error)
                continue
            table.add(_cells(rows[-1]))
    document = fidelity.document(rows, left_out)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", file=table_file(args.json))
    print(_conditions(document["conditions"]), file=table_file(args.json))
    write_json(document, args.json)
    if args.plot is not None:
        _draw(document, args.plot, by_family=args.by_family)
    return 0


def _draw(document: Mapping[str, Any], path: Path, *, by_family: bool) -> None:
    from thinwire.bench.scatter import draw

    draw(document, path)
    if by_family:
        for family in dict.fromkeys(row["family"] for row in document["rows"]):
            draw(document, path.with_name(f"{path.stem}-{family.replace('_', '-')}{path.suffix}"), family=family)


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["recipe"],
        "yes" if row["feedback"] else "",
        f"{row['bits_per_element']:.2f}",
        *(_scientific(row[name]) for name in ("encode_error", "mean_error", "sum_error")),
        f"{row['cosine']:.4f}",
        *("–" if row[name] is None else f"{1e3 * row[name]:.2f}" for name in ("encode_s", "decode_s")),
    ]


def _scientific(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.2e}"


def _conditions(conditions: Mapping[str, Any]) -> str:
    steps = ", ".join(map(str, conditions["steps"]))
    return (
        f"Squared errors, relative. {conditions['recorded'].get('model', 'gradients')}, {conditions['numel']:,} "
        f"gradients in matrices, steps {steps}, {conditions['num_ranks']} ranks; times of one rank's step on "
        f"{conditions['threads']} threads, {conditions['kernels']} kernels, {conditions['processor']}."
    )


def parse_recipes(text: str) -> list[Aggregator]:
    """Read a comma-separated list of recipes."""
    return list(dict.fromkeys(parse_recipe(recipe) for recipe in text.split(",")))


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"expected a file that ends in .png or .svg, got {text!r}")
    return path
