"""``thinwire selfcheck``: does a recipe do here what it promises? On a launcher's ranks, or on some of its own."""

import argparse
import datetime
import importlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn

from thinwire.bench.terminal import Column, open_table
from thinwire.cli.bench import argument, positive, positive_int
from thinwire.cli.output import add_json_argument, check_outputs, table_file, write_json
from thinwire.errors import ThinwireError
from thinwire.ladder import Report, Rung, selfcheck
from thinwire.ladder.training import Factory, Loss
from thinwire.policy import PlanOptions
from thinwire.schedule import parse_schedule

_MEETING_S = 60.0  # ranks may take so long to start, whatever the timeout of collectives
_GRACE_S = 10.0  # for the others, once a rank has ended with an error


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``selfcheck`` and its arguments."""
    parser = subparsers.add_parser(
        "selfcheck",
        help="check that recipes do on this machine, or launch, what they promise",
        description=(
            "Trains a model for a few steps, several times, and checks: dense is DDP to the bit, replicas stay equal, "
            "what was delivered plus what is owed is all there was, bytes are those planned, the loss keeps up with "
            "DDP's, and a resumed run repeats the uninterrupted one. Under a launcher, such as `torchrun "
            "--nproc-per-node 2 -m thinwire selfcheck`, on its ranks; alone, on ranks of its own over loopback."
        ),
    )
    parser.add_argument(
        "--recipe", dest="recipes", metavar="RECIPE", type=argument(_recipe), nargs="+", action="extend",
        help="one or more (default: int8)",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODULE:FACTORY", type=argument(_place),
        help="returns an nn.Module, or (nn.Module, loss(model, step, rank)) (default: a small one)",
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
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if (launched and args.nproc) or args.steps < 2:
        why = "--nproc is for running without a launcher" if args.nproc else "expected --steps of at least 2"
        print(f"thinwire selfcheck: {why}", file=sys.stderr)
        return 2
    if launched:
        try:
            return _rank(args)
        except ThinwireError as error:
            print(f"thinwire: {error}", file=sys.stderr)
            _leave()
    check_outputs(args.json)
    return _start(args, args.nproc or 2)


def _start(args: argparse.Namespace, num: int) -> int:
    """Run this very command on ranks of our own; return the status of the first that fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num)}
    launch |= {"GLOO_SOCKET_IFNAME": "lo", "THINWIRE_SOCKET_IFNAME": "lo"}
    launch |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "thinwire", "selfcheck", "--steps", str(args.steps), "--lr", str(args.lr)]
    command += ["--timeout", str(args.timeout), *(["--model", args.model] if args.model else [])]
    command += ["--ranks-per-node", str(args.ranks_per_node)] if args.ranks_per_node else []
    command += [*(["--json", args.json] if args.json else []), "--recipe", *args.recipes]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num)
    ]
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    deadline = float("inf")
    failed = dict[int, int]()  # exit status by rank, of those that ended by themselves
    while True:
        running = [process.poll() for process in ranks].count(None)
        for rank, process in enumerate(ranks):
            if process.returncode and rank not in failed:
                failed[rank] = process.returncode
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                if process.returncode < 0:
                    print(f"thinwire selfcheck: rank {rank} was ended by signal {-process.returncode}", file=sys.stderr)
        if not running or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return 0 if not failed else 2 if set(failed.values()) == {2} else 1


def _rank(args: argparse.Namespace) -> int:
    rank = int(os.environ["RANK"])
    watch, meeting_s = _Watch(rank), max(_MEETING_S, args.timeout)
    factory = small_model if args.model is None else _factory(args.model)
    if rank == 0:
        check_outputs(args.json)
    watch.begin("meeting the other ranks", 2 * meeting_s)
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=meeting_s))
    except (RuntimeError, ValueError) as error:  # no store, no peers; no address in the environment
        reason = " ".join(str(error).split())[:300]
        raise ThinwireError(
            f"rank {rank} did not meet the others, for whom it waits {meeting_s:g} s at most: {reason}"
        ) from error
    file = table_file(args.json) if rank == 0 else open(os.devnull, "w")  # noqa: SIM115  # until the program ends
    columns = (Column("recipe", 12, left=True), Column("rung", 12, left=True), Column("verdict", 14, left=True))
    reports: list[Report] = []
    with open_table([*columns, Column("s", 5), Column("found", left=True)], file) as table:
        for recipe in args.recipes:

            def on_rung(name: str, rung: Rung | None, recipe: str = recipe) -> None:
                watch.begin(f"{recipe}, rung {name!r}", 5 * args.timeout)
                table.status(f"{recipe}: {name}")
                if rung is not None:
                    table.add([recipe, name, rung.verdict, f"{rung.seconds:.1f}", rung.sentence])

            report = selfcheck(
                factory,
                recipe,
                steps=args.steps,
                lr=args.lr,
                options=PlanOptions(node_sizes=args.ranks_per_node),
                timeout=args.timeout,
                on_rung=on_rung,
            )
            reports.append(report)
            if any(rung.numbers.get("raised") for rung in report.rungs):
                break
    watch.end()
    ok = all(report.ok for report in reports)
    if rank == 0:
        for report in reports:
            print(str(report).splitlines()[-1], file=file)
        verdict = "does what it promises here" if ok else "FAILED: see above"
        print(f"thinwire selfcheck: {verdict}", file=file)
        write_json(_document(reports, args), args.json)
    file.flush()
    if ok:
        dist.destroy_process_group()
        return 0
    _leave()


def _leave() -> NoReturn:
    """End with status 1 at once: threads of a failed exchange may still be waiting for each other."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
        },
        "ok": all(report.ok for report in reports),
        "recipes": [report.as_dict() for report in reports],
    }


class _Watch:
    """Ends the program, with a line that says where, if something takes too long: a user's own loop, for one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._timer: threading.Timer | None = None

    def begin(self, what: str, seconds: float) -> None:
        self.end()
        self._timer = threading.Timer(seconds, self._expire, [what, seconds])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, what: str, seconds: float) -> None:
        print(f"thinwire: rank {self._rank}: {what} took more than {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(1)


def small_model() -> tuple[nn.Module, Loss]:
    """Two layers, of which the weights are compressed and the biases are not, that learn to shift their input."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(16, 256)
        return (model(x) - x.roll(1, dims=1)).square().sum() / len(x)

    return model, loss


def _factory(place: str) -> Factory:
    module, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ThinwireError(f"--model {place}: {error}") from error
    if not callable(factory):
        raise ThinwireError(f"--model {place}: expected a function, got {type(factory).__name__}")
    return cast(Factory, factory)


def _place(text: str) -> str:
    if not all(text.partition(":")):
        raise ValueError(f"expected MODULE:FACTORY, got {text!r}")
    return text


def _recipe(text: str) -> str:
    parse_schedule(text)
    return text
