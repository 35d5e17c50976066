"""A profile of a cluster that nobody has measured, from what its owner knows of it, with every assumption stated."""

from collections.abc import Sequence

from thinwire.advisor.kernel_speed import compressors_of, measure_exchange, measure_kernels
from thinwire.advisor.overhead import measure_messages_alone
from thinwire.advisor.probe import plan_for
from thinwire.advisor.profile import Cluster, Computation, Kernels, LinkClass, Overhead, Profile
from thinwire.aggregators import PowerSGD
from thinwire.errors import ProfileError

PAYLOAD = 1448 / 1514  # of a full Ethernet frame
INSIDE = LinkClass(alpha_s=10e-6, beta=20e9)
CORES_PER_RANK = 4


def hand_profile(
    computation: Computation,
    *,
    hosts: int,
    ranks_per_host: int,
    rate_bps: float,
    latency_s: float,
    recipes: Sequence[str],
    model: str,
    cores: int | None = None,
    assumptions: Sequence[str] = (),
) -> Profile:
    """Return a profile from a cluster's data, and this machine's kernels.

    Args:
        computation: of the model.
        hosts: number of hosts, at least two.
        ranks_per_host: one a GPU.
        rate_bps: of each host's network interface, bits per second.
        latency_s: one way between two hosts.
        recipes: whose kernels are measured, here and now.
        model: what the computation is of.
        cores: processor cores of each host that do nothing but run kernels; None for four a rank.
        assumptions: made already.

    Raises:
        ProfileError: one host, numbers that cannot be, or a process that is one of several ranks.
        RecipeError: an unknown recipe.
    """
    if hosts < 2:
        raise ProfileError(f"hosts: expected at least 2, between which there is a network, got {hosts}")
    cores = CORES_PER_RANK * ranks_per_host if cores is None else cores
    stated = [
        *assumptions,
        f"a host sends and receives at once, {100 * PAYLOAD:.1f} % of the rate being payload, without loss",
        f"kernels are as fast as on this machine, with {cores / ranks_per_host:g} idle processor cores a rank",
    ]
    inside = None
    if ranks_per_host > 1:
        inside = INSIDE
        stated.append(f"inside a host {INSIDE.beta / 1e9:g} GB/s and {1e6 * INSIDE.alpha_s:g} µs")
    cluster = Cluster(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        between=LinkClass(alpha_s=latency_s, beta=PAYLOAD * rate_bps / 8),
        inside=inside,
    )
    plans = [plan for recipe in recipes if (plan := plan_for(computation, cluster, recipe)) is not None]
    speeds = list(measure_kernels(compressors_of(plans)))
    for plan in plans:
        if any(isinstance(param.aggregator, PowerSGD) and not param.reason for param in plan.params):
            speeds.append(measure_exchange(plan))
    message_s, round_s = measure_messages_alone()
    stated.append(
        f"a message takes {1e6 * message_s:.0f} µs of a core and each of its rounds {1e6 * round_s:.0f} µs, as on this "
        "machine in one process; what sockets add is not counted, nor are DDP's copies, which accelerators do"
    )
    return Profile(
        cluster=cluster,
        computation=computation,
        kernels=Kernels(cores=cores, ranks_per_machine=ranks_per_host, speeds=tuple(speeds)),
        overhead=Overhead(message_s=message_s, round_s=round_s),
        model=model,
        assumptions=tuple(stated),
    )
