"""auto beside fixed recipes on emulated networks, also such as change: every method takes one step in turn.

    python benchmarks/auto.py --workload gpt --nodes 4 --networks 10mbit,100mbit,1gbit,unshaped --json auto.json
    python benchmarks/auto.py --networks 100mbit-1gbit,1gbit-100mbit,unshaped-100mbit      # the rate changes in mid-run

A network is a rate, or several that follow each other, each for as many rounds. Methods have models of their own; in
each round everyone takes one step, in an order that turns, so that whatever drifts hits all alike. DDP runs twice: what
lies between the two is the floor. Printed for every rate, over the rounds after the first `--settle`, with medians of
the slowest rank's steps: auto over the faster of DDP and its 16-bit hook, auto over the fastest of all others, the
floor; and after how many steps a change was noticed. On slow networks `--large-every 10` lets DDP and 16 bits take a
step in every tenth round only.
"""

import argparse
import json
import logging
import queue
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.bench import measure
from thinwire.bench.settings import Settings, parse_workload
from thinwire.bench.validation import AGAIN
from thinwire.bench.validation_worker import Method
from thinwire.bench.worker import GROUP_TIMEOUT
from thinwire.bench.workloads import make_workload
from thinwire.lab import open_network, parse_rate

AUTO = "auto"
BASELINES = ("ddp", "ddp-fp16")
UNSHAPED = "unshaped"
CHANGE_S = 1.0  # for the lab to set another rate


def rates_of(network: str) -> list[str | None]:
    """Return the rates that follow each other."""
    rates = [None if part == UNSHAPED else part for part in network.split("-")]
    for rate in rates:
        parse_rate(rate)
    return rates


class _Lines(logging.Handler):
    """Keeps what auto says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        if "auto" in record.getMessage():
            self.lines.append(record.getMessage())


def work(args: argparse.Namespace, network: str) -> None:
    """Be one rank: rank 0 prints {"rate": N} where the Nth rate is to begin, and in the end what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    heard = _Lines()
    log = logging.getLogger("thinwire")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    rates = rates_of(network)
    settings = Settings(workload=args.workload, nodes=args.nodes, rate=rates[0])
    workload = make_workload(settings, dist.get_rank(), dist.get_world_size())
    workload.start(0)
    # Buckets are each method's best at the slowest rate: a model keeps those that it was wrapped with.
    slowest = min((bps for rate in rates if (bps := parse_rate(rate)) is not None), default=None)
    running = {name: Method(name, workload, slowest) for name in (*args.methods, AGAIN, AUTO)}
    order = list(running)
    rounds: dict[str, list[int]] = {name: [] for name in running}
    for number in range(args.rounds * len(rates)):
        if number and number % args.rounds == 0:
            dist.barrier()
            if dist.get_rank() == 0:
                print(json.dumps({"rate": number // args.rounds}), flush=True)
            time.sleep(CHANGE_S)
        for name in order:
            large = name in (*BASELINES, AGAIN)
            if large and number % args.large_every and number >= measure.WARM_UP_STEPS:
                continue
            running[name].step()
            rounds[name].append(number)
        order = [*order[1:], order[0]]
    step_s: dict[str, list[float]] = {}
    for name, method in running.items():
        seconds = torch.tensor(method.step_s, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # a step is over when the last rank is
        step_s[name] = seconds.tolist()
    if dist.get_rank() == 0:
        print(json.dumps({"step_s": step_s, "rounds": rounds, "log": heard.lines}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(args: argparse.Namespace, network: str) -> dict[str, Any]:
    """Measure on one network, whose rates are set as rank 0 asks for them."""
    rates, found = rates_of(network), queue.SimpleQueue[dict[str, Any]]()
    with open_network(nodes=args.nodes, rate=rates[0], allow_loopback=False) as lab:

        def on_line(rank: int, line: str) -> None:
            if line.startswith('{"rate"'):
                lab.set_rate(rates[json.loads(line)["rate"]])
            elif line.startswith('{"step_s"'):
                found.put(json.loads(line))
            else:
                print(f"[{rank}] {line.rstrip()}", file=sys.stderr)

        argv = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--rank-of", network]
        result = lab.start(argv, on_line=on_line).wait(timeout=args.timeout)
    if not result.ok:
        raise SystemExit(f"{network}: {result.message}")
    return found.get()


def evaluate(args: argparse.Namespace, network: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for every rate of a network."""
    rows = []
    said = [(int(line.split(":")[0].removeprefix("step ")), line) for line in told["log"]]
    for place, rate in enumerate(rates_of(network)):
        begin, end = place * args.rounds, (place + 1) * args.rounds
        medians = {
            name: measure.median(
                s
                for s, at in zip(told["step_s"][name], told["rounds"][name], strict=True)
                if begin + args.settle <= at < end
            )
            for name in told["step_s"]
        }
        fixed = {name: s for name, s in medians.items() if name not in (AUTO, AGAIN)}
        noticed = next((step - begin for step, line in said if begin <= step < end and "tries again" in line), None)
        rows.append(
            {
                "network": network,
                "rate_bps": parse_rate(rate),
                "step_s": medians,
                "auto_over_ddp_or_16bit": medians[AUTO] / min(fixed[name] for name in BASELINES),
                "auto_over_best_fixed": medians[AUTO] / min(fixed.values()),
                "best_fixed": min(fixed, key=fixed.__getitem__),
                "floor": abs(medians["ddp"] / medians[AGAIN] - 1),
                "noticed_after_steps": noticed if place else None,
                "log": [line for step, line in said if begin <= step < end],
            }
        )
    return rows


def main() -> None:
    """Measure all networks; print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=parse_workload, default="gpt")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--networks", default="10mbit,100mbit,1gbit,unshaped,100mbit-1gbit,1gbit-100mbit")
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=(*BASELINES, "int8", "int4"))
    parser.add_argument("--rounds", type=int, default=120, help="of every rate")
    parser.add_argument("--settle", type=int, default=50, help="rounds of every rate that do not count")
    parser.add_argument("--large-every", type=int, default=1, help="rounds between steps of DDP and of 16 bits")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for a network")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # this process is a rank on that network
    args = parser.parse_args()
    if not set(BASELINES) <= set(args.methods):
        parser.error(f"--methods: expected {' and '.join(BASELINES)} among them, got {','.join(args.methods)}")
    if args.rank_of:
        work(args, args.rank_of)
        return
    rows: list[dict[str, Any]] = []
    for network in args.networks.split(","):
        told = run(args, network)
        for row in evaluate(args, network, told):
            rows.append(row)
            print(
                f"{network}, {row['rate_bps'] or UNSHAPED}: "
                + ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in row["step_s"].items())
                + f"; auto over DDP or 16 bit {row['auto_over_ddp_or_16bit']:.3f}, over {row['best_fixed']} "
                f"{row['auto_over_best_fixed']:.3f}, floor {100 * row['floor']:.1f} %, "
                f"noticed after {row['noticed_after_steps']}"
            )
            for line in row["log"]:
                print("   ", line, flush=True)
    if args.json:
        conditions = {name: value for name, value in vars(args).items() if name not in ("json", "rank_of")}
        args.json.write_text(json.dumps({"schema": 1, "conditions": conditions, "rows": rows}))


if __name__ == "__main__":
    main()
