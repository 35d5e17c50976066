r"""What a step takes with and without compression, in the closed forms of the papers.

Symbols of "On the Utility of Gradient Compression" in every docstring: T_comp the backward time of one rank alone, b
the bytes of a bucket, k buckets of which the last holds b_hat, p ranks, BW the rate in bytes/s, alpha the latency of a
message, gamma the factor by which exchanges slow backward down. Forward and optimizer are left out of all of them, as
there. They assume ranks that are equal, one link, and compression that runs after backward, since it would compete
with it; `thinwire.advisor.simulate` assumes none of this.

References:
    Saurabh Agarwal, Hongyi Wang, Shivaram Venkataraman, Dimitris Papailiopoulos, "On the Utility of Gradient
    Compression in Distributed Training Systems", 2022. Others are named where they are used.
"""

import math
from collections.abc import Callable, Sequence

from thinwire.advisor.collectives import all_gather_s, ring_all_reduce_s
from thinwire.advisor.profile import LinkClass
from thinwire.errors import ProfileError

Comm = Callable[[float], float]
"""Seconds that one collective of so many bytes takes."""


def cut(nbytes: float, bucket_nbytes: float) -> list[float]:
    """Return the sizes of k buckets: k-1 of b bytes, and the rest, b_hat, last.

    >>> cut(97.5, 25)
    [25, 25, 25, 22.5]
    """
    if not (nbytes > 0 and bucket_nbytes > 0):
        raise ProfileError(f"expected positive sizes, got {nbytes} bytes in buckets of {bucket_nbytes}")
    whole = math.ceil(nbytes / bucket_nbytes) - 1
    return [bucket_nbytes] * whole + [nbytes - whole * bucket_nbytes]


def overlapped_s(backward_s: float, buckets: Sequence[float], comm: Comm, *, gamma: float = 1.0) -> float:
    """Synchronous SGD: max(gamma T_comp, T_comm(b) of all but the last bucket) + T_comm(b_hat).

    The last bucket has nothing left to hide behind.
    """
    *hidden, last = buckets
    return max(gamma * backward_s, sum(map(comm, hidden))) + comm(last)


def sync_sgd_s(
    backward_s: float,
    nbytes: float,
    world_size: int,
    link: LinkClass,
    *,
    bucket_nbytes: float = 25 * 2**20,
    gamma: float = 1.0,
) -> float:
    """`overlapped_s` with ring all-reduces in buckets of DDP's size: what any compression has to beat."""
    buckets = cut(nbytes, bucket_nbytes)
    return overlapped_s(backward_s, buckets, lambda b: ring_all_reduce_s(b, world_size, link), gamma=gamma)


def headroom_s(backward_s: float, observed_s: float) -> float:
    """H = T_obs - T_comp: the most that any compression can save. It pays if codec and bytes take less than this."""
    return observed_s - backward_s


def power_sgd_nbytes(shapes: Sequence[Sequence[int]], rank: int) -> tuple[int, int, int]:
    r"""Return the bytes of P, of Q, and of what has one dimension and is sent as it is, in float32.

    P = 4 sum_l min(r, n_l, m_l) n_l and Q = 4 sum_l min(r, n_l, m_l) m_l, a tensor seen as a matrix of n_l (its first
    dimension) by m_l (all others).

    References:
        Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD", 2019.
    """
    p = q = dense = 0
    for shape in shapes:
        if len(shape) < 2:
            dense += 4 * math.prod(shape)
            continue
        n, m = shape[0], math.prod(shape[1:])
        r = min(rank, n, m)
        p, q = p + 4 * r * n, q + 4 * r * m
    return p, q, dense


def power_sgd_s(
    backward_s: float, codec_s: float, p_nbytes: float, q_nbytes: float, world_size: int, link: LinkClass
) -> float:
    """T_comp + T_encdec + T_comm(P) + T_comm(Q), by ring all-reduces; vectors travel while P is orthogonalised."""
    comm = ring_all_reduce_s(p_nbytes, world_size, link) + ring_all_reduce_s(q_nbytes, world_size, link)
    return backward_s + codec_s + comm


def top_k_s(backward_s: float, codec_s: float, numel: int, density: float, world_size: int, link: LinkClass) -> float:
    """T_comp + T_encdec + AG(4 k) + AG(4 k): all-gathers of k values and of k indices, which grow with p."""
    chosen_nbytes = 4 * density * numel
    return backward_s + codec_s + 2 * all_gather_s(chosen_nbytes, world_size, link)


def sign_vote_s(
    backward_s: float, encode_s: float, decode_one_s: float, numel: int, world_size: int, link: LinkClass
) -> float:
    """T_comp + T_enc + p T_dec + AG(N/8): every rank unpacks the signs of all p, so decoding grows with p, too.

    References:
        Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Animashree Anandkumar, "signSGD", 2018.
    """
    return backward_s + encode_s + world_size * decode_one_s + all_gather_s(numel / 8, world_size, link)


def ideal_compressor_s(
    backward_s: float, buckets: Sequence[float], comm: Comm, ratio: float, *, gamma: float = 1.0
) -> float:
    """T(R): synchronous SGD with R times fewer bytes that cost nothing to encode or decode."""
    return overlapped_s(backward_s, [b / ratio for b in buckets], comm, gamma=gamma)


def required_ratio(
    backward_s: float, buckets: Sequence[float], comm: Comm, *, gamma: float = 1.0, within: float = 0.1
) -> float:
    """Return the least R >= 1 with T(R) <= (1 + within) gamma T_comp: scaling as good as linear; inf if none is.

    `comm` must not decrease in the bytes. No ratio helps where latencies alone take longer.
    """
    limit = (1 + within) * gamma * backward_s

    def good(ratio: float) -> bool:
        return ideal_compressor_s(backward_s, buckets, comm, ratio, gamma=gamma) <= limit

    if good(1.0):
        return 1.0
    low, high = 1.0, 2.0
    while not good(high):
        low, high = high, 2 * high
        if high > 2**40:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def trade_off_s(backward_s: float, codec_s: float, nbytes: float, comm: Comm, *, faster: float, larger: float) -> float:
    """T_comp + T_encdec / k + T_comm(l k b): a codec k times as fast whose result is l k times as large."""
    return backward_s + codec_s / faster + comm(larger * faster * nbytes)


def global_qsgd_limit(reduce_nbytes_per_s: float, *, slower: float, ratio: float = 4.0) -> float:
    """Return the rate B below which reducing codes in a tree beats reducing float32: 2 g (rho - 1) / (w - rho).

    From T0 = 2 log2(N) alpha + 2 log2(N) S/B + log2(N) S/g against the same with S' = S / rho bytes that are reduced at
    g' = g / w: smaller iff B (w - rho) < 2 g (rho - 1), always so where w <= rho.

    Args:
        reduce_nbytes_per_s: g, at which float32 is reduced.
        slower: w = g / g', how many times slower a byte of codes is.
        ratio: rho = S / S'.

    References:
        Jihao Xin, Marco Canini, Peter Richtarik, Samuel Horvath, "Global-QSGD", 2023. Differs from the paper as
        printed: w there is the inverse.
    """
    return math.inf if slower <= ratio else 2 * reduce_nbytes_per_s * (ratio - 1) / (slower - ratio)


def clan_ideal_scaling(forward_s: float, backward_s: float, nbytes: float, nbytes_per_s: float) -> float:
    """Return (T_FP + T_BP) / (T_FP + max(T_BP, T_COMM)), T_COMM = 2 d / bandwidth: the best share of linear scaling.

    Push and pull of d bytes, one after the other, through one interface, hidden behind backward as far as they fit.

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021.
    """
    comm_s = 2 * nbytes / nbytes_per_s
    return (forward_s + backward_s) / (forward_s + max(backward_s, comm_s))


def gossip_gain(nbytes: float, world_size: int, link: LinkClass, *, num_neighbours: int = 2) -> float:
    """Return how many times faster a gossip step's exchange is than a ring all-reduce.

    Ring: 2 (n-1) alpha + 2 (n-1)/n M/B; gossip on a ring: alpha + 2 M/B. Latency decides: compression mends B,
    neighbours mend alpha.

    References:
        Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can Decentralized Algorithms Outperform
        Centralized Algorithms?", 2017.
    """
    return ring_all_reduce_s(nbytes, world_size, link) / link.seconds(num_neighbours * nbytes)
