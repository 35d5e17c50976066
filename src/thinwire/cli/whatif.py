"""``thinwire whatif``: how a step's time changes with the network, the processors, the codec, the batch, the hosts."""

import argparse
import math
from pathlib import Path
from typing import Any

from thinwire.cli.bench import argument, check_writable
from thinwire.cli.by_hand import add_profile_arguments, check_arguments, profile_of
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.recipes import parse_recipe

SCHEMA = 1
RECIPES = ("int8", "int4", "topk:0.01")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``whatif`` and its arguments."""
    parser = subparsers.add_parser(
        "whatif",
        help="draw how a step's time changes with bandwidth, latency, compute, codec, batch and hosts",
        description=(
            "Predicts a step's time from a profile, or from arguments, while one thing is varied: bandwidth, latency, "
            "the speed of computation, the number of hosts (simulated), and in closed form a codec's time against its "
            "ratio, and the ratio that a batch needs to scale. Prints where each recipe begins to pay."
        ),
    )
    add_profile_arguments(parser)
    parser.add_argument(
        "--recipes", metavar="RECIPE,...", type=argument(_recipes), default=RECIPES,
        help=f"to compare with DDP (default: {','.join(RECIPES)})",
    )  # fmt: skip
    parser.add_argument("--report", metavar="FOLDER", type=Path, help="write pictures and a page")
    add_json_argument(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Sweep, say where what pays, write and draw what was asked for."""
    from thinwire.advisor.document import as_dict
    from thinwire.advisor.whatif import BASELINE, Sweep, sweeps

    check_arguments(args)
    check_outputs(args.json)
    if args.report is not None:
        from thinwire.bench.plots import require_matplotlib

        require_matplotlib()
        check_writable(args.report, folder=True)
    profile = profile_of(args, ("dense", BASELINE, *args.recipes))
    found: list[Sweep] = []
    lines: list[str] = []
    for sweep in sweeps(profile, args.recipes):
        found.append(sweep)
        lines += _lines(sweep)
    out = table_file(args.json)
    cluster = profile.cluster
    conditions = {
        "model": profile.model,
        "hosts": cluster.hosts,
        "ranks_per_host": cluster.ranks_per_host,
        "rate_bps": 8 * cluster.between.beta,
        "latency_s": cluster.between.alpha_s,
        "backward_s": profile.computation.backward_s,
        "assumptions": list(profile.assumptions),
    }
    document = {"schema": SCHEMA, "conditions": conditions, "sweeps": [_plain(as_dict(sweep)) for sweep in found]}
    lines += [f"assumed: {sentence}" for sentence in profile.assumptions]
    print("\n".join(lines), file=out)
    write_json(document, args.json)
    if args.report is not None:
        from thinwire.bench.whatif_plots import write_page

        print(f"report: {write_page(document, found, lines, args.report)}", file=out)
    return 0


def _lines(sweep: Any) -> list[str]:
    """Say where curves cross that of DDP with 16 bits."""
    from thinwire.bench.whatif_plots import quantity

    lines: list[str] = []
    for label, x in sweep.crossings():
        curve = next(curve for curve in sweep.curves if curve.label == label)
        base = next(curve for curve in sweep.curves if curve.label == "dense:fp16")
        first = next(i for i, each in enumerate(curve.x) if each > x)
        after = curve.y[first] < base.y[first]
        lines.append(
            f"{sweep.title.lower()}: {label} is faster than 16-bit DDP {'above' if after else 'below'} "
            f"{quantity(x, sweep.x_name)}"
        )
    return lines


def _plain(sweep: Any) -> Any:
    """JSON has no infinity: where nothing helps there is null."""
    for curve in sweep["curves"]:
        curve["y"] = [y if math.isfinite(y) else None for y in curve["y"]]
    return sweep


def _recipes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"expected at least one recipe, got {text!r}")
    for name in names:
        parse_recipe(name)
    return names
