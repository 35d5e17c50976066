"""Latency and rate of every pair of hosts, one way at a time.

Rounds of a tournament: in each, hosts meet in pairs that have nothing in common, so that a switch carries them side by
side. Of a pair one sends messages that grow until they take a while, and each is answered with 8 bytes.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from thinwire.advisor.fit import Point, fit_line, telling
from thinwire.advisor.profile import LinkClass, Pair
from thinwire.errors import RankLostError

PINGS = 10
REPEATS = 3
FIRST_NBYTES = 64 << 10
GROWTH = 2
MOST_NBYTES = 16 << 20
MOST_ROUNDS = 15  # all pairs of 16 hosts; of more a sample
SLOW = 0.75  # of the usual rate: below this a pair is named
LATE = 3.0  # times the usual latency, likewise
LATE_S = 200e-6  # and by so much at least
CONFIRMATIONS = 2  # times that exceptions are measured again

Points = Mapping[tuple[int, int], Sequence[Point]]
"""By source and target: (bytes, seconds) of messages with their answers."""


def tournament(num: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds in which each of `num` meets another, until everybody has met everybody: the circle method.

    >>> [sorted(pairs) for pairs in tournament(4)]
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*range(num), *([None] if num % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def measure_pairs(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    *,
    target_s: float,
    only: Collection[tuple[int, int]] | None = None,
) -> dict[tuple[int, int], list[Point]]:
    """Measure what this rank sends to the others among `ranks`, in turn. All of `ranks` must call.

    Args:
        ranks: one of every host, or all of one host; keys of the result are places in it.
        group: their process group, whose time-out ends every wait.
        target_s: messages grow until they take as long.
        only: sources and targets to measure, the same on all; None is all of them.

    Raises:
        RankLostError: a peer did not answer within the time-out; both are named.
    """
    found: dict[tuple[int, int], list[Point]] = {}
    for number, pairs in enumerate(tournament(len(ranks))):
        if number == MOST_ROUNDS:
            break
        for low, high in pairs:
            for source, target in ((low, high), (high, low)):
                if only is not None and (source, target) not in only:
                    continue
                here, there = ranks[source], ranks[target]
                try:
                    if group.rank() == here:
                        found[source, target] = _send(there, group, target_s)
                    elif group.rank() == there:
                        _answer(here, group)
                except RuntimeError as error:
                    raise RankLostError(
                        f"the link from rank {here} to rank {there} was being measured, and rank {group.rank()} got no "
                        f"answer: {' '.join(str(error).split())[:200]}"
                    ) from error
    return found


def _send(peer: int, group: dist.ProcessGroup, target_s: float) -> list[Point]:
    header, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def once(nbytes: int) -> float:
        header[0] = nbytes
        group.send([header], peer, 0).wait()
        group.recv([answer], peer, 0).wait()  # now the other waits, too
        data = torch.zeros(nbytes, dtype=torch.uint8)
        start = time.perf_counter()
        group.send([data], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        return time.perf_counter() - start

    points = [(8.0, min(once(8) for _ in range(PINGS)))]
    nbytes = FIRST_NBYTES
    while True:
        seconds = min(once(nbytes) for _ in range(REPEATS))
        points.append((float(nbytes), seconds))
        if seconds >= target_s or nbytes * GROWTH > MOST_NBYTES:
            break
        nbytes *= GROWTH
    header[0] = 0
    group.send([header], peer, 0).wait()
    return points


def _answer(peer: int, group: dist.ProcessGroup) -> None:
    header, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    while True:
        group.recv([header], peer, 0).wait()
        if header[0] == 0:
            return
        group.send([answer], peer, 0).wait()
        group.recv([torch.empty(int(header[0]), dtype=torch.uint8)], peer, 0).wait()
        group.send([answer], peer, 0).wait()


def link_class(points: Points) -> tuple[LinkClass, tuple[Pair, ...]]:
    """Return the class that most pairs belong to, and those that are slower or farther.

    A message and its answer take 2 alpha + nbytes / beta.
    """
    fits = {pair: _one(measured) for pair, measured in points.items()}
    alpha_s = statistics.median(alpha for alpha, _ in fits.values())
    beta = statistics.median(beta for _, beta in fits.values())
    exceptions = tuple(
        Pair(source=source, target=target, alpha_s=alpha, beta=rate)
        for (source, target), (alpha, rate) in sorted(fits.items())
        if rate < SLOW * beta or alpha > max(LATE * alpha_s, alpha_s + LATE_S)
    )
    named = {(pair.source, pair.target) for pair in exceptions}
    usual = [point for pair, measured in points.items() if pair not in named for point in telling(measured)]
    both_s, beta, residual = fit_line(usual)
    return LinkClass(alpha_s=both_s / 2, beta=beta, residual=residual), exceptions


def confirmed_class(
    measure: Callable[[Collection[tuple[int, int]] | None], Points],
) -> tuple[LinkClass, tuple[Pair, ...]]:
    """Return `link_class` of what is measured, where exceptions have stayed so when they were measured again.

    Args:
        measure: all pairs, or those that it gets. It is called on all ranks or on none.
    """
    points = measure(None)
    between, exceptions = link_class(points)
    for _ in range(CONFIRMATIONS):
        if not exceptions:
            break
        again = measure([(pair.source, pair.target) for pair in exceptions])
        points = {pair: fastest(once, again.get(pair, ())) for pair, once in points.items()}
        between, exceptions = link_class(points)
    return between, exceptions


def fastest(once: Sequence[Point], again: Sequence[Point]) -> list[Point]:
    """Return the least time of every size: what disturbs a message only makes it slower.

    >>> fastest([(8.0, 0.2), (64.0, 0.5)], [(8.0, 0.1), (64.0, 0.6), (128.0, 0.9)])
    [(8.0, 0.1), (64.0, 0.5), (128.0, 0.9)]
    """
    times: dict[float, float] = {}
    for nbytes, seconds in (*once, *again):
        times[nbytes] = min(seconds, times.get(nbytes, seconds))
    return sorted(times.items())


def _one(points: Sequence[Point]) -> tuple[float, float]:
    both_s, beta, _ = fit_line(telling(points))
    return both_s / 2, beta
