"""``thinwire advise``: which plan is fastest for a model on a cluster, and whether it pays to compress at all."""

import argparse
import sys
from pathlib import Path
from typing import Any, TextIO

from thinwire.advisor.advise import Report, advise, describe_profile
from thinwire.advisor.by_hand import hand_profile
from thinwire.advisor.known import known_computation, listed_computation
from thinwire.advisor.lines import HEADINGS, cells, sections
from thinwire.advisor.probe import NODE_RECIPES, RECIPES, default_recipes
from thinwire.advisor.profile import Computation, Profile, read_profile
from thinwire.bench.terminal import Column, open_table
from thinwire.cli.bench import argument, positive_int
from thinwire.cli.bench import latency as checked_duration
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.cli.probe import recipe_list
from thinwire.lab import parse_duration, parse_rate
from thinwire.shapes import MODELS

COLUMNS = tuple(Column(heading, 9, left=heading in ("plan", "risk", "why")) for heading in HEADINGS)
BY_HAND = ("hosts", "rate", "latency", "gpus_per_host", "backward", "forward", "optimizer")


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
    parser.add_argument("--profile", metavar="FILE", type=Path, help="measured by `thinwire probe`")
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"{', '.join(MODELS)}, each with /SCALE, or a JSON file of shapes by name; beside --profile checked only",
    )
    parser.add_argument("--hosts", type=positive_int, help="number of hosts")
    parser.add_argument("--gpus-per-host", type=positive_int, help="ranks of a host (default: 1)")
    parser.add_argument("--rate", type=argument(_rate), help="of each host's network interface, such as 10gbit")
    parser.add_argument("--latency", type=checked_duration, help="one way between two hosts (default: 50us)")
    parser.add_argument("--backward", type=checked_duration, help="of one step (default: a V100's, from a table)")
    parser.add_argument("--forward", type=checked_duration, help="of one step (default: half of backward)")
    parser.add_argument("--optimizer", type=checked_duration, help="of one step (default: 0)")
    parser.add_argument(
        "--recipes",
        metavar="RECIPE,...",
        type=argument(recipe_list),
        help=f"to compare, beside dense, dense:fp16 and fp16 (default: {','.join(RECIPES)}, and with several ranks "
        f"a host {','.join(NODE_RECIPES)})",
    )
    add_json_argument(parser)
    parser.add_argument("--page", metavar="FILE", type=Path, help="write an HTML page with plots")
    parser.set_defaults(fail=parser.error)
    return parser


def run(args: argparse.Namespace) -> int:
    """Predict, rank, say what to do."""
    given = [f"--{name.replace('_', '-')}" for name in BY_HAND if getattr(args, name) is not None]
    if args.profile is not None and given:
        args.fail(f"{', '.join(given)}: expected either --profile or a cluster by hand")
    if args.profile is None and (missing := [n for n in ("model", "hosts", "rate") if getattr(args, n) is None]):
        args.fail(f"expected --profile FILE, or a cluster by hand: --{', --'.join(missing)} are missing")
    check_outputs(args.json, args.page)
    if args.page is not None:
        from thinwire.bench.plots import require_matplotlib

        require_matplotlib()
    file = table_file(args.json)
    profile = _by_hand(args) if args.profile is None else _measured(args)
    report = advise(profile, args.recipes or default_recipes(profile.cluster.ranks_per_host))
    _print(report, profile, file)
    document = {**report.as_dict(), "on": describe_profile(profile)}
    write_json(document, args.json)
    if args.page is not None:
        from thinwire.bench.advice_page import write_page

        write_page(report, profile, args.page)
        print(f"page: {args.page}", file=sys.stderr)
    return 0


def _measured(args: argparse.Namespace) -> Profile:
    profile = read_profile(args.profile)
    if args.model is not None:
        computation, _ = _computation(args.model, backward_s=1.0, forward_s=0.0, optimizer_s=0.0)
        profile.check_model({p.name: p.shape for p in computation.parameters})
    return profile


def _by_hand(args: argparse.Namespace) -> Profile:
    backward_s, forward_s = parse_duration(args.backward), parse_duration(args.forward)
    computation, assumptions = _computation(
        args.model, backward_s=backward_s, forward_s=forward_s, optimizer_s=parse_duration(args.optimizer) or 0.0
    )
    if args.latency is None:
        assumptions.append("latency is 50 µs one way")
    latency_s = 50e-6 if args.latency is None else parse_duration(args.latency) or 0.0
    rate_bps = parse_rate(args.rate)
    assert rate_bps is not None
    return hand_profile(
        computation,
        hosts=args.hosts,
        ranks_per_host=args.gpus_per_host or 1,
        rate_bps=rate_bps,
        latency_s=latency_s,
        recipes=("dense:fp16", "fp16", *(args.recipes or default_recipes(args.gpus_per_host or 1))),
        model=args.model,
        assumptions=assumptions,
    )


def _computation(
    model: str, *, backward_s: float | None, forward_s: float | None, optimizer_s: float
) -> tuple[Computation, list[str]]:
    if model.endswith(".json"):
        return listed_computation(Path(model), backward_s=backward_s, forward_s=forward_s, optimizer_s=optimizer_s)
    return known_computation(model, backward_s=backward_s, forward_s=forward_s, optimizer_s=optimizer_s)


def _print(report: Report, profile: Profile, file: TextIO) -> None:
    print(describe_profile(profile), file=file)
    with open_table(COLUMNS, file) as table:
        for plan in report.plans:
            table.add(cells(plan))
    for heading, sentences in sections(report):
        for sentence in sentences:
            print(f"{heading}: {sentence}", file=file)
    print(report.verdict, file=file)


def _rate(text: str) -> str:
    if parse_rate(text) is None:
        raise ValueError(f"expected a rate such as 10gbit, got {text!r}: without a limit there is nothing to predict")
    return text
