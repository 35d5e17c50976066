"""Which ranks share a node, which of them stands for it towards an owner, and sums over them: arithmetic alone."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks in nodes: the first `sizes[0]` ranks are node 0, and so on.

    Attributes:
        sizes: ranks per node.
        firsts: the lowest rank of each node.
        of: per rank, its node.
        places: (num_ranks,) each rank's place in its node.
        mates: (num_ranks,) the size of its node.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    of: tuple[int, ...]
    places: Numbers = field(compare=False, repr=False)
    mates: Numbers = field(compare=False, repr=False)

    @staticmethod
    @functools.cache
    def sized(sizes: tuple[int, ...]) -> "Nodes":
        """Return the nodes of these sizes."""
        firsts = tuple(itertools.accumulate(sizes[:-1], initial=0))
        of = tuple(node for node, size in enumerate(sizes) for _ in range(size))
        mates = np.repeat(sizes, sizes).astype(np.int64)
        return Nodes(sizes, firsts, of, np.arange(len(of)) - np.repeat(firsts, sizes), mates)

    def ranks(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(self.firsts[node], self.firsts[node] + self.sizes[node])

    def representative(self, owner: int, node: int) -> int:
        """Return the rank that stands for `node` where `owner` forms the mean; in the owner's node the owner itself.

        The owner's place in its own node, modulo the node's size: so the owners' partitions are spread over a node.
        """
        place = owner - self.firsts[self.of[owner]]
        return self.firsts[node] + place % self.sizes[node]

    def represented(self, rank: int) -> list[int]:
        """Return the owners towards which `rank` stands for its node: itself, then others in ascending order."""
        node, size = self.of[rank], self.sizes[self.of[rank]]
        others = (
            first + place
            for other, (first, owners) in enumerate(zip(self.firsts, self.sizes, strict=True))
            if other != node
            for place in range(rank - self.firsts[node], owners, size)
        )
        return [rank, *others]

    def representatives(self, owner: int) -> list[int]:
        """Return the ranks that stand for their nodes towards `owner`, but not itself, in ascending order."""
        return [self.representative(owner, node) for node in range(len(self.sizes)) if node != self.of[owner]]

    def over_represented(self, numbers: Numbers) -> Numbers:
        """Return, per rank, the sum of the other owners' numbers that it represents, without a list of pairs."""
        total = np.zeros_like(numbers)
        for size in set(self.sizes):
            ours = self.mates == size
            total[ours] = _by_place(self.places % size, numbers, size)[self.places[ours]]
        return total - numbers

    def over_representatives(self, numbers: Numbers) -> Numbers:
        """Return, per owner, the sum of the numbers of the other ranks that represent it."""
        total = np.zeros_like(numbers)
        for size in set(self.sizes):
            theirs = self.mates == size
            total += _by_place(self.places[theirs], numbers[theirs], size)[self.places % size]
        return total - numbers

    def over_mates(self, numbers: Numbers) -> Numbers:
        """Return, per rank, the sum of the numbers of its node's other ranks."""
        return np.repeat(np.add.reduceat(numbers, self.firsts), self.sizes) - numbers


def _by_place(places: Numbers, numbers: Numbers, size: int) -> Numbers:
    """Return (size,) sums of the numbers that have the same place."""
    return np.rint(np.bincount(places, numbers, size)).astype(np.int64)


def sizes_for(node_sizes: int | Sequence[int], world_size: int) -> tuple[int, ...] | None:
    """Return the sizes of all nodes: `node_sizes` itself, or nodes of so many ranks, the last of which may be smaller.

    None where they do not add up to `world_size`, or one of them is not positive.
    """
    if isinstance(node_sizes, int):
        if node_sizes < 1:
            return None
        whole, rest = divmod(world_size, node_sizes)
        return (node_sizes,) * whole + ((rest,) if rest else ())
    sizes = tuple(node_sizes)
    return sizes if sum(sizes) == world_size and all(size > 0 for size in sizes) else None
