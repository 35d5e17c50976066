"""``thinwire server``: a parameter server."""

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.bench import argument, not_negative, positive, positive_int
from thinwire.server.cpus import check_cpus, format_cpus, parse_cpus

if TYPE_CHECKING:
    from thinwire.server.metrics import StatusLine
    from thinwire.server.process import Server


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``server`` and its arguments."""
    parser = subparsers.add_parser(
        "server",
        help="form the mean of what workers push, compressed both ways",
        description=(
            "Serves one run after another, until interrupted. Workers attach with "
            "thinwire.attach(model, recipe, servers=['tcp://HOST:PORT', ...]). Needs no GPU."
        ),
    )
    parser.add_argument(
        "--bind", metavar="tcp://HOST:PORT", required=True, help="0.0.0.0 for all; port 0 for a free one"
    )
    parser.add_argument("--num-workers", type=positive_int, required=True, help="ranks of a run")
    parser.add_argument(
        "--server-index",
        type=argument(parse_index),
        default=(0, 1),
        metavar="i/num",
        help="which of how many servers this is (default: 0/1)",
    )
    parser.add_argument(
        "--keys", metavar="FOLDER", type=Path, help="FOLDER/server of `thinwire keys`; free on loopback"
    )
    parser.add_argument("--threads", type=positive_int, default=1, help="that decode and encode (default: 1)")
    add_options(parser)
    parser.add_argument(
        "--metrics",
        type=argument(parse_metrics),
        metavar="[HOST:]PORT",
        help="Prometheus numbers at http://HOST:PORT/metrics, for whoever can reach it (default host: 127.0.0.1)",
    )
    parser.add_argument(
        "--cpu-affinity",
        type=argument(parse_cpus),
        metavar="CPUS",
        help="processors to run on, such as 0,2-5 (default: all)",
    )
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `thinwire launch` takes for its servers, too, and hands on (`option_arguments`; it knows the grace)."""
    parser.add_argument(
        "--on-worker-loss",
        choices=("fail", "continue"),
        default="fail",
        help="fail: the others get an error; continue: means are over those present (default: fail)",
    )
    parser.add_argument(
        "--order",
        choices=("rank", "arrival"),
        default="rank",
        help="in which contributions are added; by rank, runs repeat to the bit (default: rank)",
    )
    parser.add_argument(
        "--heartbeat-timeout", type=positive, default=30.0, help="seconds of silence after which a worker is lost"
    )
    parser.add_argument(
        "--grace",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="for a run that is under way when SIGTERM, SIGHUP or Ctrl-C comes; the same signal again ends it "
        "(default: 60)",
    )
    parser.add_argument("--status", type=positive, metavar="SECONDS", help="print a line of numbers every so often")


def option_arguments(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the command line that gives what `add_options` has read, but the grace."""
    status = () if args.status is None else ("--status", str(args.status))
    return (
        *("--on-worker-loss", args.on_worker_loss, "--order", args.order),
        *("--heartbeat-timeout", str(args.heartbeat_timeout), *status),
    )


def run(args: argparse.Namespace) -> int:
    """Serve."""
    where = ""
    if args.cpu_affinity is not None:  # first of all: threads inherit it
        check_cpus(args.cpu_affinity)
        os.sched_setaffinity(0, args.cpu_affinity)
        where = f" on processors {format_cpus(args.cpu_affinity)}"
    from thinwire.server.keys import ServerKeys
    from thinwire.server.metrics import StatusLine, serve_metrics
    from thinwire.server.process import Server
    from thinwire.server.service import ServiceOptions
    from thinwire.server.sockets import join_address

    index, num = args.server_index
    options = ServiceOptions(
        num_workers=args.num_workers,
        server=index,
        num_servers=num,
        order=args.order,
        on_worker_loss=args.on_worker_loss,
        heartbeat_timeout_s=args.heartbeat_timeout,
        threads=args.threads,
    )
    server = Server(args.bind, options, None if args.keys is None else ServerKeys.read(args.keys), args.grace)
    with contextlib.closing(server):
        lines = [f"server {index} of {num} for {args.num_workers} workers{where} at {server.address}"]
        if args.metrics is not None:
            host, port = args.metrics
            port = serve_metrics(server, port, host)
            lines.append(f"metrics at http://{join_address(host, port)}/metrics")
        _stop_on_signals(server, args.grace)
        print(*lines, sep="\n", flush=True)
        if args.status is not None:
            threading.Thread(target=_say, args=(StatusLine(server), args.status), daemon=True).start()
        server.run()
    print(f"served {server.service.counts['rounds']} rounds", file=sys.stderr)
    return 0


def _stop_on_signals(server: "Server", grace_s: float) -> None:
    """Let a signal end the server when its run is over, and the same one again at once, but for that of `launch`."""
    seen = set[int]()

    def stop(number: int, _: object) -> None:
        server.stop(at_once=number in seen - {signal.SIGUSR1})
        if not (seen or server.service.is_over):  # not by print, in whose middle the signal may have come
            os.write(2, f"serving on until the run is over, for {grace_s:g} s at most; again to end now\n".encode())
        seen.add(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup stays in force
            signal.signal(number, stop)


def _say(status: "StatusLine", every_s: float) -> None:
    while True:
        time.sleep(every_s)
        print(status.line(), file=sys.stderr, flush=True)


def parse_metrics(text: str) -> tuple[str, int]:
    """Read where to answer Prometheus.

    >>> parse_metrics("9100"), parse_metrics("0.0.0.0:9100"), parse_metrics("[::]:9100")
    (('127.0.0.1', 9100), ('0.0.0.0', 9100), ('::', 9100))
    """
    found = re.fullmatch(r"(?:(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]+):)?(?P<port>\d{1,5})", text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"expected a port, such as 9100, or HOST:PORT, such as 0.0.0.0:9100, got {text!r}")
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def parse_index(text: str) -> tuple[int, int]:
    """Read which of how many.

    >>> parse_index("1/4")
    (1, 4)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(f"expected which of how many servers, such as 0/2 or 1/2, got {text!r}")
    return int(found[1]), int(found[2])
