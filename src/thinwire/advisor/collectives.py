r"""What collectives cost by the alpha-beta-gamma model: a latency, a rate, and the work of adding.

A message of b bytes takes alpha + b/B seconds from one rank to another (`LinkClass`, whose `beta` is the rate B), and
adding b bytes to b others gamma b. A rank sends and receives at the same time, at full rate. Every function returns
seconds for p ranks, and 0 for one, if not said otherwise.

These forms know of one collective at a time and of ranks that all start at once. `thinwire.advisor.simulate` does not
use them; tests hold both against each other.

References:
    Rajeev Thakur, Rolf Rabenseifner, William Gropp, "Optimization of Collective Communication Operations in MPICH",
    2005 (ring, halving, all-gather). Saurabh Agarwal, Hongyi Wang, Shivaram Venkataraman, Dimitris Papailiopoulos, "On
    the Utility of Gradient Compression in Distributed Training Systems", 2022 (ring, all-gather). Jihao Xin, Marco
    Canini, Peter Richtarik, Samuel Horvath, "Global-QSGD", 2023 (tree). Xiangru Lian et al., "Can Decentralized
    Algorithms Outperform Centralized Algorithms?", 2017 (gossip).
"""

import math

from thinwire.advisor.profile import LinkClass


def ring_all_reduce_s(nbytes: float, world_size: int, link: LinkClass, gamma_s_per_nbyte: float = 0.0) -> float:
    """2 (p-1) alpha + 2 (p-1)/p b/B + (p-1)/p b gamma: the fewest bytes, and latency that grows with p.

    >>> round(ring_all_reduce_s(100e6, 8, LinkClass(alpha_s=50e-6, beta=10e9 / 8)), 4)
    0.1407
    """
    share = (world_size - 1) / world_size * nbytes
    return 2 * (world_size - 1) * link.alpha_s + 2 * share / link.beta + share * gamma_s_per_nbyte


def halving_all_reduce_s(nbytes: float, world_size: int, link: LinkClass, gamma_s_per_nbyte: float = 0.0) -> float:
    """2 log2(p) alpha + 2 (p-1)/p b/B + (p-1)/p b gamma: recursive halving, then doubling."""
    share = (world_size - 1) / world_size * nbytes
    return _steps(world_size) * 2 * link.alpha_s + 2 * share / link.beta + share * gamma_s_per_nbyte


def tree_all_reduce_s(nbytes: float, world_size: int, link: LinkClass, gamma_s_per_nbyte: float = 0.0) -> float:
    """log2(p) (2 alpha + 2 b/B + b gamma): all bytes up a tree and down again, at every step."""
    return _steps(world_size) * (2 * link.seconds(nbytes) + nbytes * gamma_s_per_nbyte)


def all_to_all_s(nbytes: float, world_size: int, link: LinkClass) -> float:
    """(p-1) alpha + (p-1)/p b/B, where a rank's blocks for all ranks, its own among them, are b bytes."""
    return (world_size - 1) * link.seconds(nbytes / world_size)


def all_gather_s(nbytes: float, world_size: int, link: LinkClass) -> float:
    """(p-1) (alpha + b/B), where every rank's own block is b bytes: grows with p."""
    return (world_size - 1) * link.seconds(nbytes)


def two_shot_s(nbytes: float, world_size: int, link: LinkClass) -> float:
    """2 alpha + 2 (p-1)/p b/B: b encoded bytes to their owners, and as many back; all blocks under way at once.

    Scatter and gather through p servers that are the ranks themselves. As many bytes as a ring of b, in two rounds.
    """
    return 2 * link.seconds((world_size - 1) / world_size * nbytes) if world_size > 1 else 0.0


def parameter_server_s(nbytes: float, num_workers: int, num_servers: int, link: LinkClass) -> float:
    """2 alpha + 2 n b / (S B): S servers that share the bytes of n workers, and receive, then send, all of them."""
    return 2 * link.seconds(num_workers * nbytes / num_servers)


def gossip_s(nbytes: float, num_neighbours: int, link: LinkClass) -> float:
    """Alpha + k b/B, whatever the number of ranks: every rank sends its b bytes to its k neighbours."""
    return link.seconds(num_neighbours * nbytes)


def _steps(world_size: int) -> int:
    """ceil(log2(p))."""
    return math.ceil(math.log2(world_size))
