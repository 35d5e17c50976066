"""Parameter servers on the hosts of the ranks: what their frames put on each link."""

import re

import numpy as np

from thinwire.advisor.occupancy import Numbers
from thinwire.comm.rounds import Pull, Push
from thinwire.errors import ProfileError
from thinwire.wire import FRAME_NBYTES

_METHOD = re.compile(r"servers:([1-9])/(.+)")


def split_method(method: str) -> tuple[int, str]:
    """Return how many servers a method has on every host, and its recipe.

    >>> split_method("servers:2/topk:0.01"), split_method("int8")
    ((2, 'topk:0.01'), (0, 'int8'))
    """
    found = _METHOD.fullmatch(method)
    return (0, method) if found is None else (int(found[1]), found[2])


def crossing(round_: Push | Pull, hosts: int, ranks_per_host: int) -> tuple[Numbers, Numbers]:
    """Return the bytes that leave each host for others, and those that reach it: two arrays of (num_hosts,).

    Server s of S lies on host s H // S of H. Whoever takes part pushes to, or pulls from, every server; those of its
    own host are reached without the network.

    Raises:
        ProfileError: hosts with different numbers of servers.
    """
    at_host, num = by_host(round_, hosts), taking_part(round_, hosts, ranks_per_host)
    by_ranks = num * (at_host.sum() - at_host)  # of a host's ranks, with servers elsewhere
    by_servers = (num.sum() - num) * at_host  # of a host's servers, with ranks elsewhere
    return (by_ranks, by_servers) if isinstance(round_, Push) else (by_servers, by_ranks)


def taking_part(round_: Push | Pull, hosts: int, ranks_per_host: int) -> Numbers:
    """Return (num_hosts,) numbers of ranks that push or pull: all, or the leaders of nodes."""
    if round_.ranks is None:
        return np.full(hosts, float(ranks_per_host))
    return np.bincount(np.array(round_.ranks) // ranks_per_host, minlength=hosts).astype(np.float64)


def by_host(round_: Push | Pull, hosts: int) -> Numbers:
    """Return (num_hosts,) bytes of what one rank exchanges with the servers on each host.

    Raises:
        ProfileError: hosts with different numbers of servers.
    """
    if len(round_.nbytes) % hosts:
        raise ProfileError(
            f"expected as many servers on each of {hosts} hosts, got {len(round_.nbytes)} in all: write servers:1/int8"
        )
    nbytes = np.array([FRAME_NBYTES + nbytes if nbytes else 0 for nbytes in round_.nbytes], np.float64)
    return nbytes.reshape(hosts, -1).sum(axis=1)
