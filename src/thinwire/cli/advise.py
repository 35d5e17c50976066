"""``thinwire advise``: which plan is fastest for a model on a cluster, and whether it pays to compress at all."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from thinwire.advisor.advise import Report, advise, describe_profile
from thinwire.advisor.apart import Apart
from thinwire.advisor.lines import HEADINGS, cells, sections
from thinwire.advisor.probe import APART_RECIPES, NODE_RECIPES, RECIPES, default_recipes
from thinwire.advisor.profile import Profile
from thinwire.algorithms.planned import planned
from thinwire.bench.settings import LocalName, parse_methods, split_local
from thinwire.bench.terminal import Column, open_table
from thinwire.cli.bench import argument
from thinwire.cli.by_hand import add_profile_arguments, check_arguments, profile_of
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.cli.probe import recipe_list
from thinwire.policy import PlanOptions

APART = (
    "localsgd:10:dense",
    *(f"diloco:{every}:{recipe}" for every in (10, 50, 100) for recipe in ("dense", *APART_RECIPES)),
    "streaming:50:4:5:e3m0",
)
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
        type=argument(_names),
        help=f"to compare, beside dense, dense:fp16 and fp16 (default: {','.join(RECIPES)}, with several ranks a host "
        f"{','.join(NODE_RECIPES)}, and local methods: {','.join(APART)})",
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
    names: Sequence[str] = args.recipes or (*default_recipes(args.gpus_per_host or 1), *APART)
    local = {name: method for name in names if (method := split_local(name)) is not None}
    recipes = [name for name in names if name not in local]
    kernels = ["dense:fp16", "fp16", *recipes, *(method.recipe for method in local.values())]
    profile = profile_of(args, tuple(dict.fromkeys(kernels)))
    if args.recipes is None:
        recipes = default_recipes(profile.cluster.ranks_per_host)
    report = advise(profile, recipes, apart=_apart(profile, local, asked=args.recipes is not None))
    _print(report, profile, file)
    document = {**report.as_dict(), "on": describe_profile(profile)}
    write_json(document, args.json)
    if args.page is not None:
        from thinwire.bench.advice_page import write_page

        write_page(report, profile, args.page)
        print(f"page: {args.page}", file=sys.stderr)
    return 0


def _apart(profile: Profile, local: Mapping[str, LocalName], *, asked: bool) -> list[Apart]:
    """Return what the local methods exchange; unasked none with more parts than the model has parameters."""
    tensors = profile.computation.named_tensors()
    return [
        planned(
            name,
            method.kind,
            method.recipe,
            tensors,
            profile.cluster.world_size,
            sync_every=method.sync_every,
            fragments=method.fragments,
            overlap=method.overlap,
            options=PlanOptions(node_sizes=profile.cluster.ranks_per_host),
        )
        for name, method in local.items()
        if asked or method.fragments <= len(tensors)
    ]


def _names(text: str) -> tuple[str, ...]:
    """Read recipes and local methods with commas between them."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    local = {name for name in names if split_local(name) is not None}
    if local:
        parse_methods(",".join(local))  # raises for a rhythm that there is not
    if local != set(names):
        recipe_list(",".join(name for name in names if name not in local))
    return names


def _print(report: Report, profile: Profile, file: TextIO) -> None:
    print(describe_profile(profile), file=file)
    with open_table(COLUMNS, file) as table:
        for plan in report.plans:
            table.add(cells(plan))
    for heading, sentences in sections(report):
        for sentence in sentences:
            print(f"{heading}: {sentence}", file=file)
    print(report.verdict, file=file)
