"""A profile from a file, or from arguments that say what a cluster and a model are like."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.bench import argument, latency, positive_int, rate
from thinwire.errors import ProfileError

if TYPE_CHECKING:
    from thinwire.advisor.profile import Profile

INSIDE_ALPHA_S, INSIDE_NBYTES_PER_S = 5e-6, 50e9


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--profile``, and the arguments that stand in for it."""
    parser.add_argument("--profile", metavar="FILE", type=Path, help="what `thinwire probe` wrote; else, by hand:")
    parser.add_argument(
        "--model", default="resnet50", metavar="NAME|FILE",
        help="a model of the tables (resnet50, vgg16, bert-large, ...), or a JSON file of {name: shape} "
        "(default: resnet50)",
    )  # fmt: skip
    parser.add_argument("--hosts", type=positive_int, default=8, help="(default: 8)")
    parser.add_argument("--gpus-per-host", type=positive_int, default=1, help="ranks of each host (default: 1)")
    parser.add_argument("--rate", type=rate, default="10gbit", help="of each host's link (default: 10gbit)")
    parser.add_argument("--latency", type=latency, default="50us", help="one way (default: 50us)")
    parser.add_argument("--backward", type=latency, help="time of the backward pass (default: the table's, of a V100)")
    parser.add_argument("--cores", type=positive_int, default=os.cpu_count() or 1, help="of each host, for kernels")
    parser.add_argument(
        "--busy-cores", type=argument(float), default=0.0,
        help="cores that backward keeps busy on each rank; 0 where GPUs compute (default: 0)",
    )  # fmt: skip


def read_arguments(args: argparse.Namespace, recipes: tuple[str, ...]) -> "Profile":
    """Return the profile that arguments describe; kernels are then measured here, which takes seconds.

    Raises:
        ProfileError: a file that is no profile, or a model that no table knows.
    """
    from thinwire.advisor.kernel_speed import compressors_of, measure_exchange, measure_kernels
    from thinwire.advisor.known import known_computation, listed_computation
    from thinwire.advisor.profile import Cluster, Kernels, LinkClass, Profile, read_profile
    from thinwire.aggregators import PowerSGD
    from thinwire.lab import parse_duration, parse_rate
    from thinwire.plan import build_plan
    from thinwire.policy import PlanOptions

    if args.profile is not None:
        return read_profile(args.profile)
    backward_s, file = parse_duration(args.backward), Path(args.model)
    if file.suffix == ".json":
        computation, assumptions = listed_computation(file, backward_s=backward_s)
    else:
        computation, assumptions = known_computation(args.model, backward_s=backward_s)
    bits, alpha_s = parse_rate(args.rate), parse_duration(args.latency)
    if bits is None or alpha_s is None:
        raise ProfileError("expected a rate and a latency of the links between hosts, got none")
    inside = None
    if args.gpus_per_host > 1:
        inside = LinkClass(alpha_s=INSIDE_ALPHA_S, beta=INSIDE_NBYTES_PER_S)
        assumptions.append(
            f"ranks of one host exchange {INSIDE_NBYTES_PER_S / 1e9:g} GB/s, {INSIDE_ALPHA_S * 1e6:g} us one way"
        )
    computation = dataclasses.replace(computation, busy_cores=args.busy_cores)
    world_size = args.hosts * args.gpus_per_host
    options = PlanOptions(node_sizes=args.gpus_per_host)
    plans = [build_plan(computation.named_tensors(), recipe, world_size, options) for recipe in recipes]
    speeds = list(measure_kernels(compressors_of(plans)))
    speeds += [
        measure_exchange(plan)
        for plan in plans
        if any(isinstance(p.aggregator, PowerSGD) and not p.reason for p in plan.params)
    ]
    assumptions.append("kernels are as fast as on this machine, on one thread")
    return Profile(
        cluster=Cluster(
            hosts=args.hosts,
            ranks_per_host=args.gpus_per_host,
            between=LinkClass(alpha_s=alpha_s, beta=bits / 8),
            inside=inside,
        ),
        computation=computation,
        kernels=Kernels(cores=args.cores, ranks_per_machine=args.gpus_per_host, speeds=tuple(speeds)),
        model=args.model,
        assumptions=tuple(assumptions),
    )
