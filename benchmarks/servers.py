"""Parameter servers beside the exchange without them: seconds of a step, and bytes of a host, on more and more hosts.

    python benchmarks/servers.py --hosts 4 --rates 100mbit,1gbit --recipes int8,onebit     # seconds
    python benchmarks/servers.py --hosts 2,4,8 --rates 1gbit --recipes int8 --turns 2      # bytes

Workers train the GPT on hosts of their own. Ways to exchange take five steps in turn, in an order that turns, so that
whatever drifts hits all alike: without servers, twice (what lies between the two is the floor); with two servers on
every worker's host; and with two servers on two hosts without workers. The first of the five does not count, for which
connections that were idle find their rate anew. A step is that of the slowest worker, bytes are those that leave a host
at its interface, in the mean over hosts. E is the encoded model.
"""

import argparse
import json
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.bench import measure, methods
from thinwire.bench.servers import end_servers, start_servers
from thinwire.bench.settings import Settings
from thinwire.bench.worker import GROUP_TIMEOUT
from thinwire.bench.workloads import make_workload
from thinwire.lab import open_network, parse_rate

STEPS = 4  # of a turn that count
SEPARATE = 2  # hosts with one server each, and no worker
PLACES: Mapping[str, Callable[[bool], int]] = {  # servers on a host, with a worker or without
    "none": lambda works: 0,
    "none again": lambda works: 0,
    "2 on every worker's host": lambda works: 2 * works,
    "2 on hosts of their own": lambda works: not works,
}


@dataclass
class Way:
    """One way to exchange, with a model of its own.

    Attributes:
        step: takes a step; of a host without a worker it is nothing.
        step_s: seconds on this rank.
        sent_nbytes: that left this host.
        encoded_nbytes: of the model.
    """

    step: Callable[[], object]
    encoded_nbytes: int = 0
    step_s: list[float] = field(default_factory=list[float])
    sent_nbytes: list[int] = field(default_factory=list[int])

    def measure(self, interface: measure.Interface) -> None:
        """Take a step, once all are there; return when all have taken it."""
        dist.barrier()
        before, start = interface.sent_nbytes(), time.perf_counter()
        self.step()
        self.step_s.append(time.perf_counter() - start)
        dist.barrier()
        after = interface.sent_nbytes()
        assert before is not None
        assert after is not None
        self.sent_nbytes.append(after - before)


def make_way(place: str, recipe: str, rate: str, num_workers: int) -> Way:
    """Start servers, and attach. Collective."""
    rank = dist.get_rank()
    here = PLACES[place](rank < num_workers)
    servers = start_servers(here, num_workers) if not place.startswith("none") else None
    workers = dist.new_group(range(num_workers))
    if rank >= num_workers:
        return Way(lambda: None)
    workload = make_workload(Settings(nodes=num_workers, rate=rate), rank, num_workers)
    workload.start(0)
    bucket_cap_mb = methods.bucket_cap_mb(recipe, None, parse_rate(rate))
    model = DistributedDataParallel(
        workload.model(0),
        process_group=workers,
        bucket_cap_mb=bucket_cap_mb,  # pyright: ignore[reportArgumentType]  (torch takes fractions)
        gradient_as_bucket_view=workload.gradient_as_bucket_view,
    )
    optimizer = workload.optimizer(model.parameters())
    link = thinwire.attach(model, recipe, servers=servers, optimizer=optimizer)
    encoded = sum(p.aggregator.up.nbytes(p.spec) for param in link.plan.params for p in param.partitions)
    return Way(lambda: (measure.timed_step(model, workload, optimizer), link), encoded)


def work(args: argparse.Namespace, hosts: int, rate: str, recipe: str) -> None:
    """Be one host; the first prints what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    interface = measure.Interface()
    ways = {place: make_way(place, recipe, rate, hosts) for place in PLACES}
    order = list(ways.values())
    for _ in range(args.turns):
        for way in order:
            for _ in range(1 + STEPS):
                way.measure(interface)
        order = [*order[1:], order[0]]
    found: dict[str, Any] = {}
    for place, way in ways.items():
        step_s = torch.tensor(way.step_s, dtype=torch.float64)
        dist.all_reduce(step_s, op=dist.ReduceOp.MAX)
        sent: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sent, measure.mean(_counted(way.sent_nbytes)))
        found[place] = {
            "step_s": _counted(step_s.tolist()),
            "worker_nbytes": measure.mean(sent[:hosts]),
            "server_nbytes": measure.mean(sent[hosts:]),
            "encoded_nbytes": way.encoded_nbytes,
        }
    if dist.get_rank() == 0:
        print(json.dumps({"ways": found}), flush=True)
    dist.barrier()
    end_servers()
    dist.destroy_process_group()


def _counted(steps: Sequence[float]) -> list[float]:
    """Return those of all turns but the first, in which DDP rebuilds its buckets, and but the first of each."""
    return [step for number, step in enumerate(steps) if number > STEPS and number % (1 + STEPS)]


def run(args: argparse.Namespace, hosts: int, rate: str, recipe: str) -> dict[str, Any]:
    """Measure on so many hosts with workers."""
    found = queue.SimpleQueue[dict[str, Any]]()

    def on_line(rank: int, line: str) -> None:
        if line.startswith('{"ways"'):
            found.put(json.loads(line)["ways"])
        else:
            print(f"[{rank}] {line.rstrip()}", file=sys.stderr)

    with open_network(nodes=hosts + SEPARATE, rate=rate, allow_loopback=False) as lab:
        argv = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--host-of", str(hosts), rate, recipe]
        result = lab.start(argv, on_line=on_line).wait(timeout=args.timeout)
    if not result.ok:
        raise SystemExit(f"{hosts} hosts, {rate}, {recipe}: {result.message}")
    return found.get_nowait()  # the first host printed it before it ended


def rows_of(hosts: int, rate: str, recipe: str, ways: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for every way."""
    step_s = {place: measure.median(way["step_s"]) for place, way in ways.items()}
    encoded = ways["none"]["encoded_nbytes"]
    return [
        {
            "hosts": hosts,
            "rate": rate,
            "recipe": recipe,
            "servers": place,
            "steps": len(way["step_s"]),
            "step_s": step_s[place],
            "over_none": step_s[place] / step_s["none"],
            "worker_mb": way["worker_nbytes"] / 1e6,
            "worker_over_encoded": way["worker_nbytes"] / encoded,
            "server_mb": way["server_nbytes"] / 1e6,
            "encoded_mb": encoded / 1e6,
        }
        for place, way in ways.items()
    ]


def main() -> None:
    """Measure all; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="4", help="numbers of workers, comma-separated")
    parser.add_argument("--rates", default="100mbit,1gbit", help="of each host's link")
    parser.add_argument("--recipes", default="int8,onebit")
    parser.add_argument("--turns", type=int, default=5, help="of five steps of each way; the first does not count")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--host-of", nargs=3, help=argparse.SUPPRESS)  # this process is a host of that run
    args = parser.parse_args()
    if args.host_of:
        hosts, rate, recipe = args.host_of
        work(args, int(hosts), rate, recipe)
        return
    print(
        "| hosts | rate | recipe | servers | step s | over none | MB of a worker's host | of E | of a server's host |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    rows: list[dict[str, Any]] = []
    for hosts in map(int, args.hosts.split(",")):
        for rate in args.rates.split(","):
            for recipe in args.recipes.split(","):
                for row in rows_of(hosts, rate, recipe, run(args, hosts, rate, recipe)):
                    rows.append(row)
                    print(
                        f"| {hosts} | {rate} | `{recipe}` | {row['servers']} | {row['step_s']:.3f} | "
                        f"{row['over_none']:.3f} | {row['worker_mb']:.2f} | {row['worker_over_encoded']:.2f} | "
                        f"{row['server_mb']:.2f} |",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
