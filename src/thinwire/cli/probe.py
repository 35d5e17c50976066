"""``thinwire probe``: measure this launch's links, kernels and computation into a profile for ``thinwire advise``."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.advisor.findings import links, time_text, warnings
from thinwire.advisor.known import known_computation
from thinwire.advisor.probe import RECIPES, probe_cluster, profile
from thinwire.advisor.profile import Profile, write_profile
from thinwire.advisor.served import split_method
from thinwire.aggregators import Dense, Hierarchical, TwoShot
from thinwire.cli.bench import argument, check_writable, positive, positive_int
from thinwire.cli.ranks import MEETING_S, Watch, import_factory, launched, leave, meet, start
from thinwire.errors import ThinwireError
from thinwire.recipes import parse_recipe
from thinwire.shapes import MODELS

LEARNING_RATE = 1e-4


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``probe`` and its arguments."""
    parser = subparsers.add_parser(
        "probe",
        help="measure links, kernels and a model's computation into a profile for `thinwire advise`",
        description=(
            "Measures latency and rate of every pair of hosts and of collectives, how fast kernels encode and decode "
            "here, and when a model's gradients are ready. Run it as the training will run: `torchrun --nnodes 4 "
            "--nproc-per-node 1 ... -m thinwire probe --model my.module:make`, or in the lab, `thinwire lab --nodes 4 "
            "--rate 100mbit -- -m thinwire probe`; alone it starts ranks of its own, whose links are loopback."
        ),
    )
    parser.add_argument(
        "--model", metavar="MODULE:FACTORY", type=argument(_model), default="resnet50",
        help="returns (nn.Module, loss(model, step, rank)), or (nn.Module, loss, optimizer); or one of "
        f"{', '.join(MODELS)}, whose time on a V100 is then taken from a table (default: resnet50)",
    )  # fmt: skip
    parser.add_argument(
        "--recipes", metavar="RECIPE,...", type=argument(recipe_list), default=RECIPES,
        help=f"whose kernels to measure (default: {','.join(RECIPES)})",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("profile.json"), help="(default: %(default)s)"
    )
    parser.add_argument("--nproc", type=positive_int, help="ranks to start on this machine (default: 2)")
    parser.add_argument("--steps", type=positive_int, default=5, help="of training to time, after two (default: 5)")
    parser.add_argument("--threads", type=positive_int, default=1, help="native threads of a kernel (default: 1)")
    parser.add_argument("--timeout", type=positive, default=60.0, help="seconds that any wait may take (default: 60)")
    parser.add_argument("--target", type=positive, default=0.1, help="seconds up to which messages grow (default: 0.1)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Be one of a launcher's ranks, or start some."""
    if launched():
        if args.nproc:
            print("thinwire probe: --nproc is for running without a launcher", file=sys.stderr)
            return 2
        try:
            return _rank(args)
        except ThinwireError as error:
            print(f"thinwire: {error}", file=sys.stderr)
            leave()
    check_writable(args.output)
    command = ["probe", "--model", args.model, "--recipes", ",".join(args.recipes), "--output", str(args.output)]
    command += ["--steps", str(args.steps), "--threads", str(args.threads)]
    return start([*command, "--timeout", str(args.timeout), "--target", str(args.target)], args.nproc or 2)


def _rank(args: argparse.Namespace) -> int:
    rank = int(os.environ["RANK"])
    watch, meeting_s = Watch(rank), max(MEETING_S, args.timeout)
    if rank == 0:
        check_writable(args.output)
    watch.begin("meeting the other ranks", 2 * meeting_s)
    meet(rank, meeting_s)

    def on_stage(stage: str) -> None:
        watch.begin(f"measuring {stage}", 20 * args.timeout)
        if rank == 0:
            print(f"thinwire probe: measuring {stage}", file=sys.stderr, flush=True)

    settings: dict[str, Any] = {
        "recipes": args.recipes,
        "threads": args.threads,
        "timeout": args.timeout,
        "target": args.target,
        "name": args.model,
        "on_stage": on_stage,
    }
    if ":" in args.model:
        model, step = _training(args.model, rank)
        found = profile(model, step, steps=args.steps, **settings)
    else:
        computation, assumptions = known_computation(args.model)
        found = probe_cluster(computation, assumptions=assumptions, **settings)
    watch.end()
    if rank == 0:
        write_profile(found, args.output)
        print("\n".join(_lines(found, args.output)))
    dist.destroy_process_group()
    return 0


def _training(place: str, rank: int) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model and what does one step with it."""
    torch.manual_seed(0)
    made = import_factory(place)()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ThinwireError(
            f"--model {place}: expected a factory that returns (nn.Module, loss(model, step, rank)) or "
            f"(nn.Module, loss, optimizer), got {type(made).__name__}: without a loss there is no step to time"
        )
    model: nn.Module = made[0]
    loss: Any = made[1]
    optimizer = made[2] if len(made) == 3 else torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    number = 0

    def step() -> None:
        nonlocal number
        optimizer.zero_grad()
        loss(model, number, rank).backward()
        optimizer.step()
        number += 1

    return model, step


def _lines(found: Profile, output: Path) -> list[str]:
    cluster, computation = found.cluster, found.computation
    lines = [
        f"{cluster.hosts} hosts of {cluster.ranks_per_host} ranks, interface {cluster.interface or 'unknown'}",
        *links(cluster),
        f"{found.model}: forward {time_text(computation.forward_s)}, backward {time_text(computation.backward_s)}, "
        f"optimizer {time_text(computation.optimizer_s)}, {sum(p.numel for p in computation.parameters):,} parameters",
    ]
    for speed in found.kernels.speeds:
        if speed.operation in ("encode", "exchange") and speed.s_per_nbyte:
            lines.append(f"{speed.recipe}: {speed.operation} at {1e-9 / speed.s_per_nbyte:.2f} GB/s of float32")
    lines += [f"assumed: {sentence}" for sentence in found.assumptions]
    lines += [f"look at this: {sentence}" for sentence in warnings(cluster)]
    return [*lines, f"profile: {output}"]


def _model(text: str) -> str:
    if ":" in text:
        if not all(text.partition(":")):
            raise ValueError(f"expected MODULE:FACTORY, got {text!r}")
    else:
        known_computation(text)  # raises for one that is not there
    return text


def recipe_list(text: str) -> tuple[str, ...]:
    """Read recipes with commas between them, some through servers."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        servers, recipe = split_method(name)
        if not isinstance(parse_recipe(recipe), TwoShot | Hierarchical | Dense) and servers:
            raise ValueError(f"{name}: expected a recipe of the two-shot exchange behind servers, as int8 or hier/int8")
    if not names:
        raise ValueError(f"expected at least one recipe, got {text!r}")
    return names
