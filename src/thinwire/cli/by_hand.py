"""A profile for `advise` and `whatif`: from a file, or from arguments that say what a cluster and a model are like."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.bench import argument, latency, positive_int
from thinwire.lab import parse_duration, parse_rate
from thinwire.shapes import MODELS

if TYPE_CHECKING:
    from thinwire.advisor.profile import Computation, Profile

BY_HAND = ("hosts", "rate", "latency", "gpus_per_host", "cores", "backward", "forward", "optimizer")
LATENCY_S = 50e-6


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--profile``, and the arguments that stand in for it."""
    parser.add_argument("--profile", metavar="FILE", type=Path, help="measured by `thinwire probe`")
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"{', '.join(MODELS)}, each with /SCALE, or a JSON file of shapes by name; beside --profile checked only",
    )
    parser.add_argument("--hosts", type=positive_int, help="number of hosts")
    parser.add_argument("--gpus-per-host", type=positive_int, help="ranks of a host (default: 1)")
    parser.add_argument("--rate", type=argument(_rate), help="of each host's network interface, such as 10gbit")
    parser.add_argument("--latency", type=latency, help="one way between two hosts (default: 50us)")
    parser.add_argument("--cores", type=positive_int, help="of each host, for the kernels alone (default: 4 a rank)")
    parser.add_argument("--backward", type=latency, help="of one step (default: a V100's, from a table)")
    parser.add_argument("--forward", type=latency, help="of one step (default: half of backward)")
    parser.add_argument("--optimizer", type=latency, help="of one step (default: 0)")
    parser.set_defaults(fail=parser.error)


def check_arguments(args: argparse.Namespace) -> None:
    """End with a usage error unless there is a file, or enough by hand, and not both."""
    given = [f"--{name.replace('_', '-')}" for name in BY_HAND if getattr(args, name) is not None]
    if args.profile is not None and given:
        args.fail(f"{', '.join(given)}: expected either --profile or a cluster by hand")
    if args.profile is None and (missing := [n for n in ("model", "hosts", "rate") if getattr(args, n) is None]):
        args.fail(f"expected --profile FILE, or a cluster by hand: --{', --'.join(missing)} are missing")


def profile_of(args: argparse.Namespace, recipes: Sequence[str]) -> "Profile":
    """Return the profile; by hand the kernels of these recipes are measured here and now, which takes seconds.

    Raises:
        ProfileError: a file that is no profile, or one of another model; a model that no table knows.
    """
    from thinwire.advisor.by_hand import hand_profile
    from thinwire.advisor.profile import read_profile

    if args.profile is not None:
        profile = read_profile(args.profile)
        if args.model is not None:
            computation, _ = _computation(args.model, backward_s=1.0, forward_s=0.0, optimizer_s=0.0)
            profile.check_model({p.name: p.shape for p in computation.parameters})
        return profile
    computation, assumptions = _computation(
        args.model,
        backward_s=parse_duration(args.backward),
        forward_s=parse_duration(args.forward),
        optimizer_s=parse_duration(args.optimizer) or 0.0,
    )
    if args.latency is None:
        assumptions.append(f"latency is {1e6 * LATENCY_S:g} µs one way")
    rate_bps = parse_rate(args.rate)
    assert rate_bps is not None
    return hand_profile(
        computation,
        hosts=args.hosts,
        ranks_per_host=args.gpus_per_host or 1,
        rate_bps=rate_bps,
        latency_s=LATENCY_S if args.latency is None else parse_duration(args.latency) or 0.0,
        cores=args.cores,
        recipes=recipes,
        model=args.model,
        assumptions=assumptions,
    )


def _computation(
    model: str, *, backward_s: float | None, forward_s: float | None, optimizer_s: float
) -> "tuple[Computation, list[str]]":
    from thinwire.advisor.known import known_computation, listed_computation

    if model.endswith(".json"):
        return listed_computation(Path(model), backward_s=backward_s, forward_s=forward_s, optimizer_s=optimizer_s)
    return known_computation(model, backward_s=backward_s, forward_s=forward_s, optimizer_s=optimizer_s)


def _rate(text: str) -> str:
    if parse_rate(text) is None:
        raise ValueError(f"expected a rate such as 10gbit, got {text!r}: without a limit there is nothing to predict")
    return text
