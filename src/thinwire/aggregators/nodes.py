"""Which ranks share a node, and which of them stands for it towards an owner: arithmetic alone."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks in nodes: the first `sizes[0]` ranks are node 0, and so on.

    Attributes:
        sizes: ranks per node.
        firsts: the lowest rank of each node.
        of: per rank, its node.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    of: tuple[int, ...]

    @staticmethod
    @functools.cache
    def sized(sizes: tuple[int, ...]) -> "Nodes":
        """Return the nodes of these sizes."""
        firsts = tuple(itertools.accumulate(sizes[:-1], initial=0))
        return Nodes(sizes, firsts, tuple(node for node, size in enumerate(sizes) for _ in range(size)))

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
        node = self.of[rank]
        owners = range(len(self.of))
        return [rank, *(o for o in owners if self.of[o] != node and self.representative(o, node) == rank)]


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
