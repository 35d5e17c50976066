"""What a round puts on each link: bytes that leave and reach hosts and ranks, from its sizes alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.advisor.occupancy import Numbers
from thinwire.advisor.profile import Cluster, Operation
from thinwire.advisor.served import by_host, crossing, taking_part
from thinwire.comm.node_round import NodeRound
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Pull, Push, Round, SendRecv


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of one round, for ranks in hosts of equal size, host by host.

    Attributes:
        operation: what kind of round.
        sent: (num_ranks,) bytes that leave each rank, as the round counts them; with servers each rank's part of what
            leaves its host.
        out, into: (num_hosts,) bytes that cross each host's network interface.
        out_inside, into_inside: (num_ranks,) bytes between ranks of one host.
        in_step: whether no rank can go on before all have begun: rings.
    """

    operation: Operation
    sent: Numbers
    out: Numbers
    into: Numbers
    out_inside: Numbers
    into_inside: Numbers
    in_step: bool = False


def traffic(round_: Round, hosts: int, ranks_per_host: int) -> Traffic:
    """Return the bytes of a round on every link.

    Blocks travel from rank to rank as thinwire's driver sends them: an all-gather's go once to every other rank. A ring
    passes through all ranks of a host before the next, so that it crosses each interface once.
    """
    num_ranks = hosts * ranks_per_host
    match round_:
        case AllToAll(nbytes):
            return _all_to_all(np.array(nbytes, np.float64), hosts, ranks_per_host)
        case AllGather(nbytes):
            there = _all_to_all(np.array(nbytes, np.float64), hosts, ranks_per_host)
            # The other way round: what every rank would send to rank r, rank r sends to every rank.
            return Traffic(
                operation="all_gather",
                sent=np.array(nbytes, np.float64) * (num_ranks - 1),
                out=there.into,
                into=there.out,
                out_inside=there.into_inside,
                into_inside=there.out_inside,
            )
        case AllReduce():
            sent = np.full(num_ranks, float(round_.sent_nbytes(0)))
            between = np.full(hosts, sent[0] if hosts > 1 else 0.0)
            # Of a host's ranks all but the one whose next is on another host.
            staying = np.resize(np.arange(ranks_per_host) < ranks_per_host - (hosts > 1), num_ranks)
            arriving = np.resize(np.arange(ranks_per_host) >= (hosts > 1), num_ranks)
            return Traffic(
                operation="all_reduce",
                sent=sent,
                out=between,
                into=between,
                out_inside=sent * staying,
                into_inside=sent * arriving,
                in_step=True,
            )
        case SendRecv():
            return _send_recv(round_, hosts, ranks_per_host)
        case NodeRound() if set(round_.nodes.sizes) == {ranks_per_host}:
            return _node_round(round_, hosts)
        case NodeRound():  # nodes are not hosts: a move of either kind may cross
            return _send_recv(SendRecv(tuple(round_.moves), num_ranks), hosts, ranks_per_host)
        case Push() | Pull():
            out, into = crossing(round_, hosts, ranks_per_host)
            nothing, sent = np.zeros(num_ranks), np.repeat(out / ranks_per_host, ranks_per_host)
            return Traffic(
                operation="all_to_all" if isinstance(round_, Push) else "all_gather",
                sent=sent,
                out=out,
                into=into,
                out_inside=nothing,
                into_inside=nothing,
            )


def _all_to_all(nbytes: Numbers, hosts: int, ranks_per_host: int) -> Traffic:
    """Every rank sends nbytes[d] to every rank d but itself."""
    num_ranks, total = len(nbytes), float(nbytes.sum())
    of_host = nbytes.reshape(hosts, ranks_per_host).sum(axis=1)
    return Traffic(
        operation="all_to_all",
        sent=total - nbytes,
        out=ranks_per_host * (total - of_host),
        into=(num_ranks - ranks_per_host) * of_host,
        out_inside=np.repeat(of_host, ranks_per_host) - nbytes,
        into_inside=(ranks_per_host - 1) * nbytes,
    )


def _send_recv(moves: SendRecv, hosts: int, ranks_per_host: int) -> Traffic:
    num_ranks = hosts * ranks_per_host
    source, target, start, stop = np.array(moves.moves, np.int64).reshape(-1, 4).T
    nbytes = (stop - start).astype(np.float64)
    leaves = source // ranks_per_host != target // ranks_per_host
    outside, inside = nbytes * leaves, nbytes * ~leaves
    return Traffic(
        operation="send_recv",
        sent=by_place(source, nbytes, num_ranks),
        out=by_place(source // ranks_per_host, outside, hosts),
        into=by_place(target // ranks_per_host, outside, hosts),
        out_inside=by_place(source, inside, num_ranks),
        into_inside=by_place(target, inside, num_ranks),
    )


def _node_round(round_: NodeRound, hosts: int) -> Traffic:
    """Of nodes that are hosts: either all of it crosses or nothing."""
    sent, received = (
        np.array(nbytes, np.float64) for nbytes in (round_.sent_nbytes_by_rank(), round_.received_nbytes_by_rank())
    )
    inside = round_.way == "mates"
    return Traffic(
        operation="send_recv",
        sent=sent,
        out=sent.reshape(hosts, -1).sum(axis=1) * (not inside),
        into=received.reshape(hosts, -1).sum(axis=1) * (not inside),
        out_inside=sent * inside,
        into_inside=received * inside,
    )


def by_place(places: NDArray[np.int64], numbers: Numbers, num: int) -> Numbers:
    """Return (num,) sums of the numbers that have the same place."""
    return np.bincount(places, numbers, num).astype(np.float64)


def pair_nbytes(round_: Round, source: int, target: int, cluster: Cluster) -> float:
    """Return the bytes that travel from one host to another."""
    each = cluster.ranks_per_host
    sources, targets = range(source * each, (source + 1) * each), range(target * each, (target + 1) * each)
    match round_:
        case AllToAll(nbytes):
            return float(each * sum(nbytes[rank] for rank in targets))
        case AllGather(nbytes):
            return float(each * sum(nbytes[rank] for rank in sources))
        case AllReduce():
            return float(round_.sent_nbytes(0)) if target == (source + 1) % cluster.hosts else 0.0
        case SendRecv() | NodeRound():
            moves = [move for rank in sources for move in round_.sends(rank)]
            return float(sum(stop - start for rank, start, stop in moves if rank in targets))
        case Push() | Pull():
            rank_at, server_at = (source, target) if isinstance(round_, Push) else (target, source)
            num = taking_part(round_, cluster.hosts, each)[rank_at]
            return float(num * by_host(round_, cluster.hosts)[server_at])
