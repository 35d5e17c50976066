"""Blocks by owner: how exchanges through owners are laid out, and their way up, which several of them share."""

import itertools
from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from thinwire.aggregators.base import Partition
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.statistic import agree
from thinwire.comm.rounds import AllToAll, Transfer
from thinwire.wire import split


def fill(
    partitions: Sequence[Partition], world_size: int, nbytes_of: Callable[[Partition], int], *, header: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fill one block per owner, after a header, with its partitions in their order.

    Returns:
        The size of every owner's block, and per partition its first byte in its owner's.
    """
    nbytes = [header] * world_size
    starts: list[int] = []
    for partition in partitions:
        starts.append(nbytes[partition.owner])
        nbytes[partition.owner] += nbytes_of(partition)
    return tuple(nbytes), tuple(starts)


def places_owned(partitions: Sequence[Partition], rank: int) -> list[int]:
    """Return which partitions a rank owns, as indices."""
    return [place for place, partition in enumerate(partitions) if partition.owner == rank]


def places_of_all(partitions: Sequence[Partition], nbytes: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return the first byte of every partition where all owners' blocks lie one after another."""
    first = list(itertools.accumulate(nbytes, initial=0))
    return [first[partition.owner] + start for partition, start in zip(partitions, starts, strict=True)]


def send_to_owners(message: Message, section: Section, push: AllToAll) -> Generator[Transfer, None, list[Tensor]]:
    """Encode all blocks for their owners; return what came from each rank, read the headers of all.

    Every block, also to ranks that own nothing here, carries the header. What is returned are the parts of one buffer,
    which the caller gives back.
    """
    buffers, header = message.buffers, message.layout.header_nbytes
    send = buffers.take(sum(push.nbytes))
    received = buffers.take(len(push.nbytes) * push.nbytes[message.rank])
    yield from agree(message, section, send)
    bad = set[str]() if message.nonfinite else message.encode(section, send)
    for block in split(send, push.nbytes):
        message.write_header(block[:header], bad, used=True)
    yield Transfer(push, send, received)
    buffers.give(send)
    sources = split(received, [push.nbytes[message.rank]] * len(push.nbytes))
    message.read_headers(sources)
    return sources
