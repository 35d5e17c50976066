"""``thinwire selfcheck``: does a recipe do here what it promises? On a launcher's ranks, or on some of its own."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from thinwire.bench.terminal import Column, open_table
from thinwire.cli.bench import argument, positive, positive_int
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.cli.ranks import MEETING_S, Watch, import_factory, launched, leave, meet, model_place, start
from thinwire.errors import ThinwireError
from thinwire.ladder import LADDER, Report, Rung, selfcheck
from thinwire.ladder.kill import START_S
from thinwire.ladder.training import Factory, Loss
from thinwire.policy import PlanOptions
from thinwire.schedule import parse_schedule


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``selfcheck`` and its arguments."""
    parser = subparsers.add_parser(
        "selfcheck",
        help="check that recipes do on this machine, or launch, what they promise",
        description=(
            "Trains a model for a few steps, several times, and checks: dense is DDP to the bit, replicas stay equal, "
            "what was delivered plus what is owed is all there was, bytes are those planned, the loss keeps up with "
            "DDP's, and a resumed run repeats the uninterrupted one, also after one of its processes was killed. Under "
            "a launcher, such as `torchrun --nproc-per-node 2 -m thinwire selfcheck`, on its ranks; alone, on ranks of "
            "its own over loopback."
        ),
    )
    parser.add_argument(
        "--recipe", dest="recipes", metavar="RECIPE", type=argument(_recipe), nargs="+", action="extend",
        help="one or more (default: int8)",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODULE:FACTORY", type=argument(model_place),
        help="returns an nn.Module, or (nn.Module, loss(model, step, rank)); a fully_shard one is checked as such "
        "(default: a small one)",
    )  # fmt: skip
    parser.add_argument("--weights", metavar="RECIPE", help="of a fully_shard model: how its weights travel")
    parser.add_argument(
        "--rungs", metavar="RUNG", nargs="+", choices=LADDER, default=list(LADDER),
        help=f"which checks: {', '.join(LADDER)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--nproc", type=positive_int, help="ranks to start on this machine (default: 2)")
    parser.add_argument(
        "--ranks-per-node", type=positive_int, metavar="N", help="of which hier recipes are to know: ranks on each host"
    )
    parser.add_argument("--steps", type=positive_int, default=6, help="of a training, at least 2 (default: 6)")
    parser.add_argument("--lr", type=positive, default=0.05, help="of SGD (default: 0.05)")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=60.0,
        help="seconds a collective may take; five times that a rung (default: 60)",
    )
    add_json_argument(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Be one of a launcher's ranks, or start some."""
    args.recipes = args.recipes or ["int8"]
    if (launched() and args.nproc) or args.steps < 2:
        why = "--nproc is for running without a launcher" if args.nproc else "expected --steps of at least 2"
        print(f"thinwire selfcheck: {why}", file=sys.stderr)
        return 2
    if launched():
        try:
            return _rank(args)
        except ThinwireError as error:
            print(f"thinwire: {error}", file=sys.stderr)
            leave()
    check_outputs(args.json)
    command = ["selfcheck", "--steps", str(args.steps), "--lr", str(args.lr), "--timeout", str(args.timeout)]
    command += [*(["--model", args.model] if args.model else []), *(["--json", args.json] if args.json else [])]
    command += ["--ranks-per-node", str(args.ranks_per_node)] if args.ranks_per_node else []
    command += ["--weights", args.weights] if args.weights else []
    return start([*command, "--rungs", *args.rungs, "--recipe", *args.recipes], args.nproc or 2)


def _rank(args: argparse.Namespace) -> int:
    rank = int(os.environ["RANK"])
    watch, meeting_s = Watch(rank), max(MEETING_S, args.timeout)
    factory = small_model if args.model is None else cast(Factory, import_factory(args.model))
    if rank == 0:
        check_outputs(args.json)
    watch.begin("meeting the other ranks", 2 * meeting_s)
    meet(rank, meeting_s)
    file = table_file(args.json) if rank == 0 else open(os.devnull, "w")  # noqa: SIM115  # until the program ends
    columns = (Column("recipe", 12, left=True), Column("rung", 12, left=True), Column("verdict", 14, left=True))
    reports: list[Report] = []
    with open_table([*columns, Column("s", 5), Column("found", left=True)], file) as table:
        for recipe in args.recipes:

            def on_rung(name: str, rung: Rung | None, recipe: str = recipe) -> None:
                starting_s = 2 * START_S if name == "kill" else 0.0
                watch.begin(f"{recipe}, rung {name!r}", 5 * args.timeout + starting_s)
                table.status(f"{recipe}: {name}")
                if rung is not None:
                    table.add([recipe, name, rung.verdict, f"{rung.seconds:.1f}", rung.sentence])

            report = selfcheck(
                factory,
                recipe,
                steps=args.steps,
                lr=args.lr,
                weights=args.weights,
                options=PlanOptions(node_sizes=args.ranks_per_node),
                timeout=args.timeout,
                rungs=args.rungs,
                on_rung=on_rung,
            )
            reports.append(report)
            if any(rung.numbers.get("raised") for rung in report.rungs):
                break
    watch.end()
    ok = all(report.ok for report in reports)
    if rank == 0:
        for report in reports:
            print(f"thinwire selfcheck: {report.verdict}", file=file)
        if left := args.recipes[len(reports) :]:
            print(f"thinwire selfcheck: not checked, since a rank raised before: {', '.join(left)}", file=file)
        write_json(_document(reports, args), args.json)
    file.flush()
    if ok:
        dist.destroy_process_group()
        return 0
    leave()


def _document(reports: Sequence[Report], args: argparse.Namespace) -> dict[str, Any]:
    from thinwire import __version__

    return {
        "schema": 1,
        "conditions": {
            "thinwire": __version__,
            "torch": torch.__version__,
            "world_size": reports[0].world_size,
            "ranks_per_node": args.ranks_per_node,
            "model": args.model or "built in",
            "steps": args.steps,
            "lr": args.lr,
            "timeout_s": args.timeout,
            "weights": args.weights,
        },
        "ok": all(report.ok for report in reports),
        "recipes": [report.as_dict() for report in reports],
    }


def small_model() -> tuple[nn.Module, Loss]:
    """Two layers, of which the weights are compressed and the biases are not, that learn to shift their input."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(16, 256)
        return (model(x) - x.roll(1, dims=1)).square().sum() / len(x)

    return model, loss


def _recipe(text: str) -> str:
    parse_schedule(text)
    return text
