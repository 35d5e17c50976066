"""Pairwise reduction of encoded blocks: recursive halving, then one all-gather."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.division import divide_
from thinwire.aggregators.halving import Merge, halving
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.owners import fill, places_of_all
from thinwire.aggregators.statistic import agree, statistic_round
from thinwire.comm.rounds import AllGather, Exchange, SendRecv, Transfer
from thinwire.compressors import Compressor, Identity
from thinwire.errors import RecipeError
from thinwire.feedback import Feedback
from thinwire.kernels import ReduceJob
from thinwire.random import MERGE_STREAM, Key
from thinwire.wire import split


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeReduce(Aggregator):
    r"""Merges encoded blocks in pairs, without decoding them, for reducible kinds.

    After one all-reduce of a vector of statistics, which gives all ranks one scale, every rank encodes all it has. By
    recursive halving each partition's blocks are merged (`Compressor.reduce_`) in a tree until its owner holds the one
    block that stands for all; the owner sends that block's bytes to all, so that replicas stay bit-identical though
    merging draws random numbers. Everyone decodes, and divides by n in float32 where the block stands for a sum.

    The tree has depth ceil(log2 n) and is the same whoever owns. ceil(log2 n) + 2 rounds, and any n; each rank sends
    (n-1)/n of its bytes up and as much down, where owners have equal shares and n is a power of two, else a little more
    or less.

    Args:
        up: what ranks send; a reducible kind: `GlobalExponential`, or `GlobalLinear` with halving.

    Raises:
        RecipeError: the kind is not reducible, or has no room for so many ranks.

    Example:
        >>> TreeReduce(up=GlobalExponential()).recipe()
        'globalexp'

    References:
        Jihao Xin, Marco Canini, Peter Richtarik, Samuel Horvath, "Global-QSGD: Practical Floatless Quantization for
        Distributed Learning with Theoretical Guarantees", 2023. Differs from the paper's code: halving sends log2 n
        times fewer bytes than its tree of whole tensors, any number of ranks takes part, and no rank reduces what it
        does not own.
    """

    up: Compressor
    down: Compressor = field(default=Identity(), init=False, repr=False)  # bytes go on as they are
    feedback: Feedback | None = field(default=None, init=False, repr=False)
    has_owners: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.up.reducible is None:
            raise RecipeError(
                f"{self.up.recipe()}: encoded blocks cannot be merged; expected a reducible kind, 'globalexp' or "
                "'global:8:halving', or another exchange"
            )

    def recipe(self) -> str:
        """The compressor's name."""
        return self.up.recipe()

    def for_world(self, world_size: int) -> Self:
        """Leave room in codes for the merges."""
        return replace(self, up=self.up.with_summands(world_size))

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Per owner one block of its partitions; moves are runs of owners' blocks."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        agreement, shared = statistic_round(partitions, len(names), world_size)
        owned, places = fill(partitions, world_size, lambda p: p.aggregator.up.nbytes(p.spec))
        starts = list(itertools.accumulate(owned, initial=0))
        moves = [
            tuple((m.source, m.target, starts[m.first], starts[m.last]) for m in merges)
            for merges in halving(world_size)
        ]
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(*agreement, *(SendRecv(step, world_size) for step in moves), AllGather(owned)),
            names=names,
            header_nbytes=0,
            up=tuple(places_of_all(partitions, owned, places)),
            shared=shared,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Agree on scales, encode, merge on the way to the owners, gather their bytes, decode once."""
        layout, rank, world_size = message.layout, message.rank, message.layout.world_size
        if not message.sections:
            message.sections = (Section(range(len(layout.partitions)), layout.up),)
        (section,) = message.sections
        *_, gather = layout.rounds
        assert isinstance(gather, AllGather)
        data, gathered = (message.buffers.take(sum(gather.nbytes)) for _ in range(2))
        yield from agree(message, section, data)
        if not message.nonfinite:
            message.encode(section, data)

        rounds = [r for r in layout.rounds if isinstance(r, SendRecv)]
        for merges, moves in zip(halving(world_size), rounds, strict=True):
            received = message.buffers.take(moves.received_nbytes(rank))
            yield Transfer(moves, data, received)
            if not message.nonfinite:
                own = [merge for merge in merges if merge.target == rank]
                sizes = [stop - start for _, target, start, stop in moves.moves if target == rank]
                for merge, block in zip(own, split(received, sizes), strict=True):
                    _merge(message, merge, data, block)
            message.buffers.give(received)
        yield Transfer(gather, split(data, gather.nbytes)[rank], gathered)

        if not message.nonfinite:
            message.decode(section, gathered)
            for block in message.blocks:
                if block.partition.aggregator.up.reducible == "sum":
                    divide_(block.value, world_size)
        message.buffers.give(data)
        message.buffers.give(gathered)
        message.finish()


def _merge(message: Message, merge: Merge, data: Tensor, received: Tensor) -> None:
    """Merge what came for a run of owners into what lies in `data` for them."""
    jobs: dict[Compressor, tuple[list[ReduceJob], list[Partition]]] = {}
    places = [i for i, p in enumerate(message.layout.partitions) if merge.first <= p.owner < merge.last]
    first = min((message.layout.up[place] for place in places), default=0)
    for place in places:
        partition, start = message.layout.partitions[place], message.layout.up[place]
        up = partition.aggregator.up
        stop = start + up.nbytes(partition.spec)
        key = Key(partition.key, message.step, MERGE_STREAM + merge.number, partition.offset)
        job = ReduceJob(data[start:stop], received[start - first : stop - first], partition.numel, key, merge.counts)
        ours = jobs.setdefault(up, ([], []))
        ours[0].append(job)
        ours[1].append(partition)
    for up, (group, partitions) in jobs.items():
        up.reduce_jobs(group, [partition.spec for partition in partitions], threads=message.threads)
