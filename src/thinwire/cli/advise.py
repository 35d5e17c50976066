"""``thinwire advise``: which plan is fastest for a model on a cluster, and whether it pays to compress at all."""

import argparse
import sys
from pathlib import Path
from typing import Any, TextIO

from thinwire.advisor.advise import Report, advise, describe_profile
from thinwire.advisor.lines import HEADINGS, cells, sections
from thinwire.advisor.probe import NODE_RECIPES, RECIPES, default_recipes
from thinwire.advisor.profile import Profile
from thinwire.bench.terminal import Column, open_table
from thinwire.cli.bench import argument
from thinwire.cli.by_hand import add_profile_arguments, check_arguments, profile_of
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.cli.probe import recipe_list

COLUMNS = tuple(Column(heading, 9, left=heading in ("plan", "risk", "why")) for heading in HEADINGS)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``advise`` and its arguments."""
    parser = subparsers.add_parser(
        "advise",
        help="say which plan is fastest for a model on a cluster, and whether compression pays at all",
        description=(
            "Simulates a step of training with every plan, no compression among them, and ranks them. From a profile "
            "that `thinwire probe` has measured, or by hand: thinwire advise --model bert-large --hosts 8 "
            "--gpus-per-host 8 --rate 10gbit --latency 50us --backward 120ms. What is assumed is printed."
        ),
    )
    add_profile_arguments(parser)
    parser.add_argument(
        "--recipes",
        metavar="RECIPE,...",
        type=argument(recipe_list),
        help=f"to compare, beside dense, dense:fp16 and fp16 (default: {','.join(RECIPES)}, and with several ranks "
        f"a host {','.join(NODE_RECIPES)})",
    )
    add_json_argument(parser)
    parser.add_argument("--page", metavar="FILE", type=Path, help="write an HTML page with plots")
    return parser


def run(args: argparse.Namespace) -> int:
    """Predict, rank, say what to do."""
    check_arguments(args)
    check_outputs(args.json, args.page)
    if args.page is not None:
        from thinwire.bench.plots import require_matplotlib

        require_matplotlib()
    file = table_file(args.json)
    recipes = args.recipes or default_recipes(args.gpus_per_host or 1)
    profile = profile_of(args, ("dense:fp16", "fp16", *recipes))
    report = advise(profile, args.recipes or default_recipes(profile.cluster.ranks_per_host))
    _print(report, profile, file)
    document = {**report.as_dict(), "on": describe_profile(profile)}
    write_json(document, args.json)
    if args.page is not None:
        from thinwire.bench.advice_page import write_page

        write_page(report, profile, args.page)
        print(f"page: {args.page}", file=sys.stderr)
    return 0


def _print(report: Report, profile: Profile, file: TextIO) -> None:
    print(describe_profile(profile), file=file)
    with open_table(COLUMNS, file) as table:
        for plan in report.plans:
            table.add(cells(plan))
    for heading, sentences in sections(report):
        for sentence in sentences:
            print(f"{heading}: {sentence}", file=file)
    print(report.verdict, file=file)
