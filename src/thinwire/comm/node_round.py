"""A round inside nodes or between them: who sends what to whom follows from a few numbers a rank."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from thinwire.comm.nodes import Nodes, Numbers

Way = Literal["mates", "represented", "representatives"]


@dataclass(frozen=True, slots=True)
class NodeRound:
    """Every rank sends to some others: a `SendRecv` whose moves are not listed, since thousands of ranks make millions.

    Rank s sends by_source[s] + by_target[t] bytes to t. Its blocks lie one after another in its buffer, in order of
    targets; where there is no `by_target` all get the same bytes, from the first on.

    Attributes:
        nodes: who shares one.
        way: to whom a rank sends: the other ranks of its node, the owners that it represents, or the ranks that
            represent it.
        by_source: bytes per source.
        by_target: bytes per target beside them, or None.
        own_first: whether the rank's own block, which stays, lies before the others.
    """

    nodes: Nodes
    way: Way
    by_source: tuple[int, ...]
    by_target: tuple[int, ...] | None = None
    own_first: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.by_source)

    def sends(self, rank: int) -> list[tuple[int, int, int]]:
        """Return (target, start, stop) of all that leaves `rank`."""
        if self.by_target is None:
            return [(target, 0, self.by_source[rank]) for target in self._targets(rank)]
        targets = [rank] * self.own_first + list(self._targets(rank))
        ends = itertools.accumulate(self.by_source[rank] + self.by_target[target] for target in targets)
        cuts = [0, *ends]
        return list(zip(targets, cuts, cuts[1:], strict=False))[self.own_first :]

    def receives(self, rank: int) -> list[tuple[int, int]]:
        """Return (source, bytes) of all that arrives at `rank`."""
        more = 0 if self.by_target is None else self.by_target[rank]
        return [(source, self.by_source[source] + more) for source in self._sources(rank)]

    @property
    def moves(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield all, as a `SendRecv` lists them."""
        for source in range(self.world_size):
            for target, start, stop in self.sends(source):
                yield source, target, start, stop

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that leave `rank`."""
        return sum(stop - start for _, start, stop in self.sends(rank))

    def received_nbytes(self, rank: int) -> int:
        """Bytes that arrive at `rank`."""
        return sum(nbytes for _, nbytes in self.receives(rank))

    def sent_nbytes_by_rank(self) -> list[int]:
        """Bytes that leave each rank."""
        return self._total(self.by_source, self.by_target, self.way).tolist()

    def received_nbytes_by_rank(self) -> list[int]:
        """Bytes that arrive at each rank."""
        return self._total(self.by_target, self.by_source, _BACK[self.way]).tolist()

    def _total(self, own: tuple[int, ...] | None, others: tuple[int, ...] | None, way: Way) -> Numbers:
        """Return, per rank, the sum over those on its way of its own number and theirs."""
        total = np.zeros(self.world_size, np.int64)
        if own is not None:
            total += np.array(own) * self._over(np.ones_like(total), way)
        if others is not None:
            total += self._over(np.array(others), way)
        return total

    def _over(self, numbers: Numbers, way: Way) -> Numbers:
        match way:
            case "mates":
                return self.nodes.over_mates(numbers)
            case "represented":
                return self.nodes.over_represented(numbers)
            case "representatives":
                return self.nodes.over_representatives(numbers)

    def _targets(self, rank: int) -> Sequence[int]:
        return self._on(self.way, rank)

    def _sources(self, rank: int) -> Sequence[int]:
        return self._on(_BACK[self.way], rank)

    def _on(self, way: Way, rank: int) -> Sequence[int]:
        match way:
            case "mates":
                return [mate for mate in self.nodes.ranks(self.nodes.of[rank]) if mate != rank]
            case "represented":
                return self.nodes.represented(rank)[1:]
            case "representatives":
                return self.nodes.representatives(rank)


_BACK: dict[Way, Way] = {"mates": "mates", "represented": "representatives", "representatives": "represented"}
