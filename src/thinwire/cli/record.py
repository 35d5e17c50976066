"""``thinwire record``: write real gradients of the demo's GPT to a file."""

import argparse
import sys
from pathlib import Path
from typing import Any

from thinwire.bench.settings import OPTIMIZERS
from thinwire.cli.bench import argument, positive_int
from thinwire.cli.output import check_outputs

STEPS = (50, 51, 52)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``record`` and its arguments."""
    parser = subparsers.add_parser(
        "record",
        help="write real gradients of the demo's GPT to a file, for `thinwire replay`",
        description=(
            "Trains the demo's GPT in one process, with the batches of several ranks and the mean of their gradients, "
            "and writes every rank's gradients at some steps. 4 ranks take 78 MB a recorded step."
        ),
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file to write, such as gpt.npz")
    parser.add_argument(
        "--steps", type=argument(parse_steps), default=STEPS, help="to write, such as 1,50-52 (default: 50-52)"
    )
    parser.add_argument("--ranks", type=positive_int, default=4, help="shards of the data (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (default: 0)")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="sgd and nag are with momentum (default: adamw)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Train and write."""
    from thinwire.bench.recording import record
    from thinwire.bench.results import machine
    from thinwire.bench.settings import Settings
    from thinwire.bench.workloads import make_workload

    check_outputs(args.out)
    settings = Settings(workload="gpt", optimizer=args.optimizer)
    workloads = [make_workload(settings, rank, args.ranks) for rank in range(args.ranks)]
    last, live = max(args.steps), sys.stderr.isatty()

    def on_step(step: int, loss: float) -> None:
        if live or step in args.steps:
            print(
                f"step {step} of {last}, loss {loss:.3f}" + (", recorded" if step in args.steps else ""),
                end="\r" if live and step not in args.steps else "\n",
                file=sys.stderr,
                flush=True,
            )

    record(args.out, workloads, steps=args.steps, seed=args.seed, conditions=machine(), on_step=on_step)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.0f} MB")
    return 0


def parse_steps(text: str) -> tuple[int, ...]:
    """Read steps and ranges of them.

    >>> parse_steps("1,50-52")
    (1, 50, 51, 52)
    """
    steps: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start = positive_int(first)
        steps += range(start, (positive_int(last) if dash else start) + 1)
    if not steps or sorted(set(steps)) != steps:
        raise ValueError(f"expected ascending steps, each once, such as 1,50-52, got {text!r}")
    return tuple(steps)
