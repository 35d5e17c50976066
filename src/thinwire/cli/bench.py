"""``thinwire bench``: compare methods on a workload and a network of your choice."""

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.settings import (
    DEMO_METHODS,
    OPTIMIZERS,
    SHARDED_METHODS,
    WRAPS,
    Settings,
    parse_methods,
    parse_workload,
    split_local,
)
from thinwire.errors import ThinwireError
from thinwire.lab.units import MAX_NODES


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``bench`` and its arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="measure gradient exchange on a workload and a network of your choice",
        description=(
            "Trains a workload with several methods on an emulated network and compares them. `bench server` "
            "measures a parameter server's own work instead, without a network."
        ),
    )
    parser.add_argument(
        "--workload",
        type=argument(parse_workload),
        default="gpt",
        help="gpt, digits, or replay:resnet50|resnet101|vgg16|bert-base|bert-large[/SCALE] (default: gpt)",
    )
    add_network_arguments(parser)
    parser.add_argument(
        "--wrap", choices=WRAPS, default="ddp", help="what the model is put into; fsdp is FSDP2 (default: ddp)"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=positive_int,
        default=1,
        help="ranks on each host, which hier recipes know as a node (default: 1)",
    )
    parser.add_argument(
        "--methods",
        type=argument(parse_methods),
        help=f"comma-separated (default: {','.join(DEMO_METHODS)}; with --wrap fsdp {','.join(SHARDED_METHODS)})",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive_int, help="train exactly this many steps with each method")
    length.add_argument("--seconds", type=positive, default=30.0, help="train each method this long (default: 30)")
    parser.add_argument("--seeds", type=positive_int, default=1, help="repeat for this many seeds (default: 1)")
    parser.add_argument(
        "--bucket-cap-mb", type=positive, help="DDP's bucket size for all (default: each method's best)"
    )
    parser.add_argument(
        "--start-after", type=int, default=0, help="dense steps before thinwire compresses (default: 0)"
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help=(
            "sgd and nag are with momentum: @dgc recipes need sgd, @nag recipes nag, and apply it themselves "
            "(default: adamw)"
        ),
    )
    parser.add_argument("--lr", type=positive, help="learning rate (default: the workload's for the optimizer)")
    parser.add_argument(
        "--decay",
        choices=("linear", "cosine"),
        help="with --steps: warm the learning rate up for a tenth of them, then let it fall to 0 (default: constant)",
    )
    parser.add_argument("--compute", type=positive, help="seconds of forward plus backward in a replay")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write what every rank does in one step, for https://ui.perfetto.dev; FILE-METHOD for several methods",
    )
    parser.add_argument("--report", metavar="FOLDER", type=Path, help="write an HTML report with plots")
    from thinwire.cli import scaling, validate  # take their arguments' types from here

    others = parser.add_subparsers(dest="what", metavar="server|validate|scaling")
    alone = others.add_parser("server", help="measure a parameter server alone")
    alone.add_argument("--workers", type=positive_int, default=8, help="that push (default: 8)")
    alone.add_argument(
        "--recipes", metavar="A,B", default="onebit,int8,topk:0.01,identity", help="default: %(default)s"
    )
    alone.add_argument("--mb", type=positive, default=16.0, help="MiB of one worker's gradient (default: 16)")
    alone.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    validate.add_parser(others)
    scaling.add_parser(others)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    if args.what == "server":
        from thinwire.cli.bench_server import run_server

        return run_server(args.recipes.split(","), args.workers, int(args.mb * (1 << 20)), args.json)
    if args.workload.startswith("replay:") and (args.optimizer != "adamw" or args.lr is not None):
        option = "--lr" if args.optimizer == "adamw" else "--optimizer"
        raise ThinwireError(f"{option}: a replay trains nothing and has no optimizer; leave it out")
    if args.decay is not None and args.steps is None:
        raise ThinwireError("--decay: the learning rate falls over a number of steps; give it with --steps")
    methods = args.methods or (SHARDED_METHODS if args.wrap == "fsdp" else DEMO_METHODS)
    local = {method: name.sync_every for method in methods if (name := split_local(method)) is not None}
    if local and args.workload.startswith("replay:"):
        raise ThinwireError(f"--methods: {next(iter(local))} exchanges what an optimizer changed; a replay has none")
    longest = max(local, key=lambda method: local[method], default="")
    if longest and args.steps is not None and args.steps < local[longest]:
        raise ThinwireError(
            f"--steps: expected at least {local[longest]}, for one exchange of {longest}, got {args.steps}"
        )
    settings = Settings(
        workload=args.workload,
        methods=methods,
        wrap=args.wrap,
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        rate=args.rate,
        latency=args.latency,
        steps=args.steps,
        seconds=args.seconds,
        seeds=args.seeds,
        bucket_cap_mb=args.bucket_cap_mb,
        start_after=args.start_after,
        optimizer=args.optimizer,
        learning_rate=args.lr,
        decay=args.decay,
        compute_s=args.compute,
        trace=args.trace is not None,
    )
    from thinwire.bench.checks import check_settings  # with torch: not for --help

    check_settings(settings)
    return run_settings(settings, json_file=args.json, report=args.report, trace=args.trace)


def run_settings(settings: Settings, *, json_file: str | None, report: Path | None, trace: Path | None = None) -> int:
    """Run a benchmark with live progress, show its table, write what was asked for; shared with ``demo``."""
    from thinwire.bench.engine import run_benchmark
    from thinwire.bench.progress import make_progress

    # Better now than after minutes of measuring:
    if report is not None:
        from thinwire.bench.plots import require_matplotlib

        require_matplotlib()
    traces = {} if trace is None else trace_files(trace, settings.methods)
    for path in (report, None if json_file in (None, "-") else Path(json_file), *traces.values()):
        if path is not None:
            check_writable(path, folder=path is report)
    progress = make_progress(settings)
    with progress:
        document = run_benchmark(settings, progress.on_event, traces=traces)
    if json_file == "-":
        json.dump(document, sys.stdout)
        print()
    else:
        progress.show(document)
        if json_file is not None:
            Path(json_file).write_text(json.dumps(document, indent=1))
    if report is not None:
        from thinwire.bench.report import write_report

        print(f"report: {write_report(document, report)}", file=sys.stderr)
    for path in traces.values():
        print(f"trace: {path} (open it in https://ui.perfetto.dev)", file=sys.stderr)
    different = [run["method"] for run in document["runs"] if not run["bit_identical"]]
    if different:
        print(f"thinwire: replicas differ after {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def trace_files(path: Path, methods: Sequence[str]) -> dict[str, Path]:
    """Return a file per method: `path` for one, with the method's name in its own for several."""
    if len(methods) == 1:
        return {methods[0]: path}
    names = {method: re.sub(r"[^\w.@+~-]+", "-", method) for method in methods}
    return {method: path.with_name(f"{path.stem}-{name}{path.suffix}") for method, name in names.items()}


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Raise `ThinwireError` unless a file can be written at `path`, or files in the folder `path`. Leaves no file."""
    try:
        if folder:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        else:
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()
    except OSError as error:
        raise ThinwireError(f"cannot write {path}: {error.strerror}") from error


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the network."""
    parser.add_argument("--nodes", type=at_least_two, default=4, help="emulated hosts (default: 4)")
    parser.add_argument(
        "--rate", type=rate, default="100mbit", help="of each host's link, such as 1gbit; none for no limit"
    )
    parser.add_argument("--latency", type=latency, help="one way, such as 5ms (default: none added)")


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Turn a parser's error into argparse's own error, message included: exit status 2 and one readable line."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, ThinwireError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(float, text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def not_negative(text: str) -> float:
    """A number from 0 on."""
    value = _number(float, text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return value


def positive_int(text: str) -> int:
    """A whole number above 0."""
    value = _number(int, text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return value


def at_least_two(text: str) -> int:
    """A number of hosts between which something can be exchanged, and that the lab can make."""
    value = _number(int, text)
    if not 2 <= value <= MAX_NODES:
        raise argparse.ArgumentTypeError(f"expected 2 to {MAX_NODES} hosts, got {text!r}")
    return value


def rate(text: str) -> str | None:
    """A rate as the lab reads it; None for ``none``."""
    from thinwire.lab import parse_rate

    return None if argument(parse_rate)(text) is None else text


def latency(text: str) -> str:
    """A duration as the lab reads it."""
    from thinwire.lab import parse_duration

    argument(parse_duration)(text)
    return text


def _number(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
