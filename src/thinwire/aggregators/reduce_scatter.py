"""Gradients to their owners and no further: an all-to-all of C(g + e), summed by the rank that keeps the shard."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import check_feedback, check_no_vote, feedback_suffix
from thinwire.aggregators.header import header_nbytes
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.owners import fill, places_of_all, places_owned, send_to_owners
from thinwire.aggregators.statistic import statistic_round
from thinwire.comm.rounds import AllToAll, Exchange
from thinwire.compressors import Compressor, Identity
from thinwire.feedback import Feedback


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
        nbytes, up = fill(partitions, world_size, lambda p: p.aggregator.up.nbytes(p.spec), header=header)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(*agreement, AllToAll(nbytes)),
            names=names,
            header_nbytes=header,
            up=up,
            shared=shared,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode for the owners, sum what one owns. Every rank sees every header, so that all know of inf and nan."""
        layout = message.layout
        push = layout.rounds[-1]
        assert isinstance(push, AllToAll)
        if not message.sections:
            message.sections = _sections(layout, push, message.rank)
        everything, own = message.sections
        sources = yield from send_to_owners(message, everything, push)
        if message.nonfinite:
            message.finish()  # nan everywhere, and residuals as they were
        else:
            for source, data in enumerate(sources):
                message.decode(own, data, accumulate=source > 0)
        message.buffers.give(sources[0])


def _sections(layout: MessageLayout, push: AllToAll, rank: int) -> tuple[Section, Section]:
    """Where blocks lie: in what is sent to the owners, and in what comes from one rank."""
    own = places_owned(layout.partitions, rank)
    every = places_of_all(layout.partitions, push.nbytes, layout.up)
    return Section(range(len(every)), every), Section(own, [layout.up[place] for place in own])
