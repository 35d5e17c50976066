"""Recursive halving over any number of ranks: who sends what to whom, until every rank owns one sum."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Merge:
    """What `source` holds for the owners `first` to `last` - 1 goes to `target`, who merges it with its own.

    Attributes:
        source, target: ranks.
        first, last: the range of owners.
        number: of this node in the tree of merges, the same whoever owns.
        counts: how many ranks' contributions the target and the source hold before.
    """

    source: int
    target: int
    first: int
    last: int
    number: int
    counts: tuple[int, int]


@functools.cache
def halving(world_size: int) -> tuple[tuple[Merge, ...], ...]:
    """Return the merges, step after step, after which rank r holds the sum over all ranks of what r owns.

    Ranks take the places 0 to n - 1 of 2^D, D = ceil(log2 n), and rank p - 2^(D-1) an empty place p too. In the step
    for bit b, from the highest on, every place gives its partner, whose number differs in b, what those own whose bit b
    is the partner's. So contributions are merged in one tree of depth D, whoever owns. A rank with two places has
    nothing to send in the first step: every rank sends (n-1)/n of its bytes, if owners have equal shares and n is a
    power of two, or little more.
    """
    num_steps = (world_size - 1).bit_length()
    num_places = 1 << num_steps

    def rank(place: int) -> int:
        return place if place < world_size else place - num_places // 2

    def num_merged(place: int, modulus: int) -> int:
        """Return how many ranks' contributions a place holds: of those that are equal in the bits to come."""
        return len(range(place % modulus, world_size, modulus))

    steps: list[tuple[Merge, ...]] = []
    for step in range(num_steps):
        bit = num_places >> (step + 1)
        merges: list[Merge] = []
        for place in range(num_places):
            partner, first = place ^ bit, place - place % bit
            last = min(first + bit, world_size)
            if first < last and rank(place) != rank(partner):
                counts = num_merged(place, 2 * bit), num_merged(partner, 2 * bit)
                number = step * num_places + place % bit
                merges.append(Merge(rank(partner), rank(place), first, last, number, counts))
        steps.append(tuple(sorted(merges, key=lambda merge: (merge.source, merge.target))))
    return tuple(steps)
