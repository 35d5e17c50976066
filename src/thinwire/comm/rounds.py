"""Rounds: the communication an exchange consists of, as sizes (`Round`) and as buffers to move (`Transfer`).

Sizes are known from arithmetic alone, for any world size, and feed the driver, the check between ranks, the byte
counters and the cost model. Drivers only move or sum; they know no compressor.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.comm.node_round import NodeRound
from thinwire.errors import ScheduleError
from thinwire.wire import FRAME_NBYTES, split


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Every rank sends nbytes[d] bytes to rank d, for every d."""

    nbytes: tuple[int, ...]

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that leave `rank`."""
        return sum(self.nbytes) - self.nbytes[rank]

    def sent_nbytes_by_rank(self) -> list[int]:
        """Bytes that leave each rank."""
        total = sum(self.nbytes)
        return [total - kept for kept in self.nbytes]


@dataclass(frozen=True, slots=True)
class AllGather:
    """Rank r sends its nbytes[r] bytes to every other rank."""

    nbytes: tuple[int, ...]

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that leave `rank`."""
        return self.nbytes[rank] * (len(self.nbytes) - 1)

    def sent_nbytes_by_rank(self) -> list[int]:
        """Bytes that leave each rank."""
        return [nbytes * (len(self.nbytes) - 1) for nbytes in self.nbytes]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Combine, in place, `numel` numbers of `dtype` over `world_size` ranks: their sum, or the largest.

    By a ring, in which each rank sends 2 (n-1)/n of them.
    """

    numel: int
    dtype: torch.dtype
    world_size: int
    op: Literal["sum", "max"] = "sum"

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that leave `rank`."""
        return round(2 * (self.world_size - 1) / self.world_size * self.numel * self.dtype.itemsize)

    def sent_nbytes_by_rank(self) -> list[int]:
        """Bytes that leave each rank."""
        return [self.sent_nbytes(0)] * self.world_size


@dataclass(frozen=True, slots=True)
class SendRecv:
    """Some ranks send to some others: (source, target, start, stop), in order of sources and targets.

    Bytes start to stop of the source's buffer travel. What arrives at one rank lies in the order of the moves.
    """

    moves: tuple[tuple[int, int, int, int], ...]
    world_size: int

    def sends(self, rank: int) -> list[tuple[int, int, int]]:
        """Return (target, start, stop) of all that leaves `rank`."""
        return [(target, start, stop) for source, target, start, stop in self.moves if source == rank]

    def receives(self, rank: int) -> list[tuple[int, int]]:
        """Return (source, bytes) of all that arrives at `rank`."""
        return [(source, stop - start) for source, target, start, stop in self.moves if target == rank]

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that leave `rank`."""
        return sum(stop - start for source, _, start, stop in self.moves if source == rank)

    def sent_nbytes_by_rank(self) -> list[int]:
        """Bytes that leave each rank."""
        sent = [0] * self.world_size
        for source, _, start, stop in self.moves:
            sent[source] += stop - start
        return sent

    def received_nbytes(self, rank: int) -> int:
        """Bytes that arrive at `rank`."""
        return sum(stop - start for _, target, start, stop in self.moves if target == rank)


@dataclass(frozen=True, slots=True)
class Push:
    """Every rank sends nbytes[s] bytes to server s, in a frame, for every s; nothing where that is 0.

    contents[s] describes what those bytes are; the server is told it once, and frames name it by its digest. With
    `ranks` only these do it, each for others, too.
    """

    nbytes: tuple[int, ...]
    contents: tuple[str, ...]
    world_size: int
    ranks: tuple[int, ...] | None = None

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that leave `rank`, headers of frames included."""
        return sum(FRAME_NBYTES + nbytes for nbytes in self.nbytes if nbytes) if self.includes(rank) else 0

    def sent_nbytes_by_rank(self) -> list[int]:
        """Bytes that leave each rank."""
        return _by_rank(self)

    def includes(self, rank: int) -> bool:
        """Whether `rank` takes part."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True, slots=True)
class Pull:
    """Every rank gets nbytes[s] bytes from server s, the same for all ranks, for every s; its push has asked for them.

    With `ranks` only these do.
    """

    nbytes: tuple[int, ...]
    contents: tuple[str, ...]
    world_size: int
    ranks: tuple[int, ...] | None = None

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that leave `rank`: none. What is asked for leaves the servers."""
        return 0

    def sent_nbytes_by_rank(self) -> list[int]:
        """Bytes that leave each rank."""
        return _by_rank(self)

    def includes(self, rank: int) -> bool:
        """Whether `rank` takes part."""
        return self.ranks is None or rank in self.ranks


def _by_rank(served: Push | Pull) -> list[int]:
    each = served.sent_nbytes(0 if served.ranks is None else served.ranks[0])
    return [each if served.includes(rank) else 0 for rank in range(served.world_size)]


Round = AllToAll | AllGather | AllReduce | SendRecv | NodeRound | Push | Pull


@dataclass(frozen=True, slots=True)
class Transfer:
    """One round with the buffers of one rank.

    AllToAll: `send` holds the blocks for rank 0, 1, ... one after another, `receive` gets world_size blocks of
    nbytes[rank] bytes, by source. AllGather: `send` holds the rank's own block, `receive` gets all blocks by source.
    AllReduce: `send` is combined in place and `receive` is the same tensor. SendRecv and NodeRound: moves are cut from
    `send`, and `receive` gets what arrives. Push: `send` holds the blocks for server 0, 1, ..., and must stay as it is
    until the pull of the same contents is done. Pull: `receive` gets the blocks of servers 0, 1, .... Who takes no
    part in one of these two has empty buffers.
    """

    round: Round
    send: Tensor
    receive: Tensor


Exchange = Generator[Transfer, None, None]
"""What an aggregator runs on one rank: yields its rounds in the order of its schedule and resumes when each is done."""


def buffer_sizes(round_: Round, rank: int) -> tuple[int, int]:
    """Return the bytes of the buffers that a rank sends from and receives into in a round; 0 where there is none."""
    match round_:
        case AllToAll(nbytes):
            return sum(nbytes), len(nbytes) * nbytes[rank]
        case AllGather(nbytes):
            return nbytes[rank], sum(nbytes)
        case AllReduce():
            return round_.numel * round_.dtype.itemsize, 0
        case SendRecv() | NodeRound():
            # Where several get the same bytes these lie there once.
            return max((stop for _, _, stop in round_.sends(rank)), default=0), round_.received_nbytes(rank)
        case Push(nbytes):
            return (sum(nbytes) if round_.includes(rank) else 0), 0
        case Pull(nbytes):
            return 0, (sum(nbytes) if round_.includes(rank) else 0)


def cut(transfer: Transfer, moves: SendRecv | NodeRound, rank: int) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Cut the moves of a rank out of its buffers: what it sends, by target, and where what arrives goes, by source.

    Raises:
        ScheduleError: the buffers have another size.
    """
    pieces: dict[int, list[Tensor]] = {}
    sizes = [0] * moves.world_size
    leaving = moves.sends(rank)
    for target, start, stop in leaving:
        pieces.setdefault(target, []).append(transfer.send[start:stop])
    for source, nbytes in moves.receives(rank):
        sizes[source] += nbytes
    wanted = max((stop for _, _, stop in leaving), default=0), sum(sizes)
    if transfer.send.nbytes < wanted[0] or transfer.receive.nbytes != wanted[1]:
        raise ScheduleError(
            f"expected at least {wanted[0]} bytes to send and {wanted[1]} to receive into, got {transfer.send.nbytes} "
            f"and {transfer.receive.nbytes}"
        )
    sends = {target: parts[0] if len(parts) == 1 else torch.cat(parts) for target, parts in pieces.items()}
    return sends, split(transfer.receive, sizes)
