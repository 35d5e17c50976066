"""Gradients to their owners and no further: an all-to-all of C(g + e), summed by the rank that keeps the shard."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import check_feedback, check_no_vote, feedback_suffix
from thinwire.aggregators.header import header_nbytes
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.statistic import agree, statistic_round
from thinwire.comm.rounds import AllToAll, Exchange, Transfer
from thinwire.compressors import Compressor, Identity
from thinwire.feedback import Feedback
from thinwire.wire import split


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatter(Aggregator):
    r"""The way up of `TwoShot` alone: what an owner has summed stays with it, as sharded training wants it.

    With residuals e_i and n ranks, for every partition:

        rank i:  sends C(g_i + e_i) to the owner;  e_i <- g_i + e_i - decoded
        owner:   sum_i decode_i, in float32 and rank order.

    Unlike other aggregators it leaves the *sum*, in the values of the partitions owned, and nothing of use in the
    others: who asks for a reduce-scatter says whether it wants a sum or a mean, and divides once.

    Args:
        up: what ranks send.
        feedback: as for `TwoShot`.

    Raises:
        RecipeError: feedback is missing where it is required, or given where it diverges; signs without a scale.

    Example:
        >>> from thinwire.compressors import BlockQuant
        >>> ReduceScatter(up=BlockQuant(bits=8)).recipe()
        'int8'
    """

    up: Compressor
    feedback: Feedback | None = None
    down: Compressor = field(default=Identity(), init=False, repr=False)  # nothing is sent back
    has_owners: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_no_vote(self.up, "ReduceScatter")
        check_feedback(self.up, self.feedback)

    def recipe(self) -> str:
        """The compressor's name, with the feedback where it is not the default."""
        return self.up.recipe() + feedback_suffix(self.feedback, self.up)

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Per owner one block: a header, then its partitions."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        agreement, shared = statistic_round(partitions, len(names), world_size)
        header = header_nbytes(len(names))
        nbytes = [header] * world_size
        up: list[int] = []
        for partition in partitions:
            up.append(nbytes[partition.owner])
            nbytes[partition.owner] += partition.aggregator.up.nbytes(partition.spec)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(*agreement, AllToAll(tuple(nbytes))),
            names=names,
            header_nbytes=header,
            up=tuple(up),
            shared=shared,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode for the owners, sum what one owns. Every rank sees every header, so that all know of inf and nan."""
        layout, rank, world_size = message.layout, message.rank, message.layout.world_size
        push = layout.rounds[-1]
        assert isinstance(push, AllToAll)
        if not message.sections:
            message.sections = _sections(layout, push, rank)
        everything, own = message.sections
        buffers, header = message.buffers, layout.header_nbytes

        send = buffers.take(sum(push.nbytes))
        received = buffers.take(world_size * push.nbytes[rank])
        yield from agree(message, everything, send)
        bad = set[str]() if message.nonfinite else message.encode(everything, send)
        for block in split(send, push.nbytes):
            message.write_header(block[:header], bad, used=True)
        yield Transfer(push, send, received)
        buffers.give(send)

        sources = split(received, [push.nbytes[rank]] * world_size)
        message.read_headers(sources)
        if message.nonfinite:
            message.finish()  # nan everywhere, and residuals as they were
        else:
            for source, data in enumerate(sources):
                message.decode(own, data, accumulate=source > 0)
        buffers.give(received)


def _sections(layout: MessageLayout, push: AllToAll, rank: int) -> tuple[Section, Section]:
    """Where blocks lie: in what is sent to the owners, and in what comes from one rank."""
    owners = [partition.owner for partition in layout.partitions]
    own = [place for place, owner in enumerate(owners) if owner == rank]
    starts = list(itertools.accumulate(push.nbytes, initial=0))
    every = [starts[owner] + start for owner, start in zip(owners, layout.up, strict=True)]
    return Section(range(len(owners)), every), Section(own, [layout.up[place] for place in own])
