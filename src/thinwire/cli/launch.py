"""``thinwire launch``: workers through torchrun, with parameter servers beside them."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.cli import interrupt_on_signals
from thinwire.cli.bench import argument, positive_int
from thinwire.cli.server import add_options, option_arguments, parse_metrics
from thinwire.errors import ThinwireError
from thinwire.server.cpus import parse_cpus_or_all


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``launch`` and its arguments."""
    parser = subparsers.add_parser(
        "launch",
        help="start workers through torchrun, with parameter servers on the same nodes",
        description=(
            "Run on every node, with its own --node-rank. Workers attach with thinwire.attach(model, recipe, "
            "servers='env'). When a node's workers have ended, its servers serve those of others until all have."
        ),
    )
    parser.add_argument("--servers-per-node", type=positive_int, default=2, help="default: 2")
    parser.add_argument("--nproc-per-node", type=positive_int, required=True, help="workers on every node")
    parser.add_argument(
        "--hosts", default="127.0.0.1", metavar="A,B", help="of all nodes, as the others reach them (default: this one)"
    )
    parser.add_argument(
        "--nnodes", type=positive_int, metavar="N", help="how many hosts there are (default: as in --hosts)"
    )
    parser.add_argument("--node-rank", type=int, default=0, help="which of the hosts this is, from 0 (default: 0)")
    parser.add_argument("--port", type=positive_int, default=5555, help="of a node's first server (default: 5555)")
    parser.add_argument("--master-port", type=positive_int, default=29500, help="torchrun's (default: 29500)")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="that `thinwire keys` made; free on one machine")
    parser.add_argument("--threads", type=positive_int, default=1, help="of every server (default: 1)")
    add_options(parser)
    parser.add_argument(
        "--metrics",
        type=argument(parse_metrics),
        metavar="[HOST:]PORT",
        help="Prometheus numbers of a node's first server; the others follow, each a port on (default host: 127.0.0.1)",
    )
    parser.add_argument(
        "--cpu-affinity",
        type=argument(parse_cpus_or_all),
        metavar="CPUS",
        help="processors of this node, such as 0-15, or all: every server and every worker gets some of its own",
    )
    parser.add_argument(
        "--leader-share",
        type=positive_int,
        default=2,
        metavar="N",
        help="of these the first worker gets N times as many as each other (default: 2)",
    )
    parser.add_argument("script", help="what workers run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run servers and workers of this node."""
    from thinwire.server.launch import Launch
    from thinwire.server.launch import run as launch

    hosts = tuple(args.hosts.split(","))
    if args.nnodes not in (None, len(hosts)):
        raise ThinwireError(
            f"--nnodes: expected {len(hosts)}, one for each of --hosts {args.hosts}, got {args.nnodes}: name all nodes "
            "there, as the others reach them, and run this on each with its --node-rank"
        )
    what = Launch(
        hosts=hosts,
        node_rank=args.node_rank,
        servers_per_node=args.servers_per_node,
        nproc_per_node=args.nproc_per_node,
        port=args.port,
        master_port=args.master_port,
        keys=args.keys,
        threads=args.threads,
        cpus=None if args.cpu_affinity is None else frozenset(args.cpu_affinity),
        leader_share=args.leader_share,
        metrics=args.metrics,
        grace_s=args.grace,
        server_arguments=option_arguments(args),
        script=(args.script, *args.arguments),
    )
    interrupt_on_signals()
    return launch(what, _dying_with_this() if sys.platform == "linux" else None)


def _dying_with_this() -> Callable[[], None]:
    """Return what every child calls first: where `launch` is killed it can end nobody, and the kernel asks them."""
    from thinwire.lab.linux import die_with_parent

    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:  # that was sooner
            os._exit(1)

    return prepare
