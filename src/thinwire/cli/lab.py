"""``thinwire lab``: run a script on emulated hosts behind a slow network."""

import argparse
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.cli import interrupt_on_signals
from thinwire.cli.bench import check_writable, positive_int
from thinwire.errors import LabError
from thinwire.lab.clean import clean
from thinwire.lab.network import Lab
from thinwire.lab.run import LabResult
from thinwire.lab.units import MAX_NODES, LinkRate, NodeRates, format_rate, parse_duration, parse_rate

DESCRIPTION = """\
Run a torchrun-style program on N emulated hosts of this machine, joined by a network as slow as you say.

  thinwire lab --nodes 4 --rate 100mbit -- train.py --epochs 1
  thinwire lab --nodes 2 --rate 50mbit --latency 20ms --nproc-per-node 2 -- -m my.module
  thinwire lab --nodes 3 --rate 1gbit,1gbit,100mbit:20mbit -- train.py    (per node; up:down)
  thinwire lab --nodes 4 --rate 1gbit --rate-after 30s=10mbit -- train.py"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "lab",
        help="run a script on emulated hosts behind a slow network",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=_nodes, default=4, help="number of emulated hosts (default 4)")
    add(
        "--rate",
        type=_argument(parse_rates),
        metavar="RATE",
        help="100mbit, up:down, or a comma list with one per node",
    )
    add("--latency", type=_argument(parse_duration), metavar="TIME", help="one-way delay between any two hosts: 5ms")
    add("--nproc-per-node", type=positive_int, default=1, metavar="N", help="ranks on each host (default 1)")
    add(
        "--rate-after",
        type=_argument(parse_rate_change),
        action="append",
        default=[],
        metavar="TIME=RATE",
        help="change the rate while running, for example 30s=10mbit; may be repeated",
    )
    add(
        "--grace", type=_argument(parse_duration), default=10.0, metavar="TIME", help="for the others when a rank fails"
    )
    add("--all-cores", action="store_true", help="let every rank run on every core instead of its host's share of them")
    add("--timeout", type=_argument(parse_duration), metavar="TIME", help="end everything after this time")
    add("--json", metavar="FILE", help="also write the result as JSON; - is standard output")
    add("--clean", action="store_true", help="end what labs that were killed left behind, and exit")
    add("program", nargs=argparse.REMAINDER, metavar="-- train.py ARGS", help="script, -m module, or any program")
    parser.set_defaults(fail=parser.error)
    return parser


def run(args: argparse.Namespace) -> int:
    """Open the lab, run the program on every rank, report."""
    if args.clean:
        ended = clean()
        print(f"thinwire lab: ended {len(ended)} processes of dead labs" if ended else "thinwire lab: nothing to clean")
        return 0
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        args.fail("what should the hosts run? For example: thinwire lab --nodes 4 --rate 100mbit -- train.py")
    out = sys.stderr if args.json == "-" else sys.stdout
    if args.json and args.json != "-":
        check_writable(Path(args.json))
    interrupt_on_signals()
    try:
        result, lab = _run_in_lab(args, command_line(program), out)
    except KeyboardInterrupt:
        print("thinwire lab: interrupted; every process has been ended and the network removed", file=sys.stderr)
        return 130
    _report(result, lab, out)
    if args.json:
        text = json.dumps(_record(result, lab)) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            with open(args.json, "w", encoding="utf-8") as file:
                file.write(text)
    if not result.ok:
        raise LabError(f"lab: {result.message}")
    return 0


def _run_in_lab(args: argparse.Namespace, argv: list[str], out: Any) -> tuple[LabResult, Lab]:
    with Lab(args.nodes, args.rate, args.latency, args.nproc_per_node) as lab:
        print(f"thinwire lab: {_describe(lab)}", file=out, flush=True)
        timers = [threading.Timer(after_s, _change, (lab, rate, out)) for after_s, rate in args.rate_after]

        def on_line(rank: int, line: str) -> None:
            out.write(f"[rank {rank}] {line}\n")
            out.flush()

        run = lab.start(argv, on_line=on_line, grace_s=args.grace, share_cores=not args.all_cores)
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            return run.wait(args.timeout), lab
        finally:
            for timer in timers:
                timer.cancel()


def command_line(program: list[str]) -> list[str]:
    """What to execute: ``x.py`` and ``-m module`` run with this interpreter, anything else is a program."""
    if program[0].endswith(".py") or program[0] == "-m":
        return [sys.executable, *program]
    return program


def parse_rates(text: str) -> NodeRates:
    """Read ``--rate``: one rate or ``up:down`` pair, or a comma list of them with one entry per node."""
    pairs = []
    for entry in text.split(","):
        up, colon, down = entry.partition(":")
        pairs.append((parse_rate(up), parse_rate(down if colon else up)))
    if len(pairs) == 1:
        return LinkRate(up=pairs[0][0], down=pairs[0][1])
    return pairs


def parse_rate_change(text: str) -> tuple[float, NodeRates]:
    """Read ``--rate-after``: ``30s=10mbit``."""
    after, equals, rate = text.partition("=")
    if not equals:
        raise LabError(f"a change of rate looks like 30s=10mbit, got {text!r}")
    return parse_duration(after) or 0.0, parse_rates(rate)


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse report our errors as wrong arguments (exit status 2)."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except LabError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _nodes(text: str) -> int:
    nodes = positive_int(text)
    if nodes > MAX_NODES:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_NODES} hosts, got {text!r}")
    return nodes


def _change(lab: Lab, rate: NodeRates, out: Any) -> None:
    try:
        lab.set_rates(rate)
    except LabError as error:
        print(f"thinwire lab: the rate was not changed: {error}", file=sys.stderr, flush=True)
    else:
        print(f"thinwire lab: now {_describe(lab)}", file=out, flush=True)


def _describe(lab: Lab) -> str:
    pairs = [(format_rate(rate.up), format_rate(rate.down)) for rate in lab.rates]
    words = [up if up == down else f"{up} up, {down} down" for up, down in pairs]
    rates = words[0] if len(set(words)) == 1 else "; ".join(f"node {node}: {word}" for node, word in enumerate(words))
    text = f"{lab.nodes} hosts, {lab.world_size} ranks, {rates}"
    if lab.delay_line is not None:
        text += f", {1e3 * (lab.latency or 0):g} ms one way ({lab.delay_line})"
    if lab.congestion_control is not None:
        text += f", TCP with {lab.congestion_control}"
    return text


def _report(result: LabResult, lab: Lab, out: Any) -> None:
    print(f"thinwire lab: {result.message}, after {result.seconds:.1f} s", file=out)
    for node, (sent, received) in enumerate(zip(result.sent_nbytes, result.received_nbytes, strict=True)):
        mean = 8e-6 * sent / result.seconds
        print(
            f"thinwire lab: node {node} sent {sent:,} bytes ({mean:.1f} Mbit/s on average), received {received:,}",
            file=out,
        )


def _record(result: LabResult, lab: Lab) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": "lab",
        "nodes": lab.nodes,
        "nproc_per_node": lab.nproc_per_node,
        "rates_bps": [[rate.up, rate.down] for rate in lab.rates],
        "latency_s": lab.latency,
        "delay_line": lab.delay_line,
        "congestion_control": lab.congestion_control,
        "returncodes": result.returncodes,
        "failed_rank": result.failed_rank,
        "message": result.message,
        "sent_nbytes": result.sent_nbytes,
        "received_nbytes": result.received_nbytes,
        "seconds": result.seconds,
    }
