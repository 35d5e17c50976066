"""What a round takes on each link of a cluster: by what was measured of it, else by the links' alpha and beta."""

from dataclasses import dataclass

import numpy as np

from thinwire.advisor.occupancy import Numbers
from thinwire.advisor.profile import Cluster
from thinwire.advisor.traffic import Traffic, pair_nbytes
from thinwire.comm.rounds import AllReduce, Round


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCost:
    """Seconds of one round.

    Attributes:
        alpha_s: until the first byte is there.
        out_s, into_s: (num_hosts,) for which each host's interface sends and receives.
        out_inside_s, into_inside_s: (num_ranks,) for which each rank does, inside its host.
        core_s: (num_ranks,) core-seconds of copies and system calls.
    """

    alpha_s: float
    out_s: Numbers
    into_s: Numbers
    out_inside_s: Numbers
    into_inside_s: Numbers
    core_s: Numbers


class Links:
    """The links of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._alpha = {True: self._ring_alpha_s(), False: self._alpha_s()}

    def cost(self, round_: Round, traffic: Traffic) -> RoundCost:
        """Return what a round takes, had it the network for itself."""
        cluster = self._cluster
        fit = cluster.fit(traffic.operation)
        inside = np.inf if cluster.inside is None else cluster.inside.beta
        if fit is None:
            alpha_s, rate = self._alpha[isinstance(round_, AllReduce)], cluster.between.beta
            core_s = np.zeros(cluster.world_size)
        else:
            alpha_s = fit.alpha_s if cluster.world_size > 1 else 0.0
            rate = fit.beta * self._crossing_per_sent(traffic)
            core_s = fit.cpu_s + fit.cpu_s_per_nbyte * traffic.sent
        out_s, into_s = traffic.out / rate, traffic.into / rate
        if fit is None:  # else it has been measured over these very pairs
            for pair in cluster.exceptions:
                more = 1 / pair.beta - 1 / cluster.between.beta
                if more > 0:
                    seconds = more * pair_nbytes(round_, pair.source, pair.target, cluster)
                    out_s[pair.source] += seconds
                    into_s[pair.target] += seconds
        if fit is not None and cluster.hosts == 1:
            inside = fit.beta
        return RoundCost(
            alpha_s=alpha_s,
            out_s=out_s,
            into_s=into_s,
            out_inside_s=traffic.out_inside / inside,
            into_inside_s=traffic.into_inside / inside,
            core_s=core_s,
        )

    def _crossing_per_sent(self, traffic: Traffic) -> float:
        """Return how many bytes cross a host's interface for each that leaves a rank, blocks being equal."""
        ranks, each = self._cluster.world_size, self._cluster.ranks_per_host
        if ranks == each or traffic.operation in ("all_reduce", "send_recv"):
            return 1.0
        return each * (ranks - each) / (ranks - 1)

    def _alpha_s(self) -> float:
        """Of blocks that are all under way at once: the longest latency."""
        cluster = self._cluster
        if cluster.hosts > 1:
            return max(cluster.between.alpha_s, *(pair.alpha_s for pair in cluster.exceptions), 0.0)
        return 0.0 if cluster.inside is None else cluster.inside.alpha_s

    def _ring_alpha_s(self) -> float:
        """Of a ring, twice round but for one hop each: p - 1 hops, between hosts or inside one."""
        cluster = self._cluster
        crossing = cluster.hosts - 1
        inside = 0.0 if cluster.inside is None else cluster.inside.alpha_s
        hops = crossing * cluster.between.alpha_s + (cluster.world_size - cluster.hosts) * inside
        slowest = [p.alpha_s - cluster.between.alpha_s for p in cluster.exceptions if self._in_ring(p.source, p.target)]
        return 2 * (hops + sum(max(more, 0.0) for more in slowest))

    def _in_ring(self, source: int, target: int) -> bool:
        return target == (source + 1) % self._cluster.hosts
