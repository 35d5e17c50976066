"""One all-gather of every rank's bytes; each rank forms the mean itself, or counts votes."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import check_feedback, check_votes, feedback_suffix
from thinwire.aggregators.division import divide_
from thinwire.aggregators.header import header_nbytes
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.statistic import agree, statistic_round
from thinwire.comm.rounds import AllGather, Exchange, Transfer
from thinwire.compressors import Compressor, Identity, Sign
from thinwire.feedback import Feedback
from thinwire.random import SHARED_STREAM, Key
from thinwire.wire import split


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Aggregator):
    r"""Every rank sends C(g + e) to every other and decodes all of them.

    With residuals e_i and n ranks: mean = (1/n) sum_i decode(C(g_i + e_i)), in float32 and rank order; only the ranks'
    own compression is lossy. One round instead of two, but each rank sends its bytes n - 1 times: for few ranks, or
    bytes so few that latency decides. Kinds whose scale all ranks share first reduce one vector of statistics.

    With `up=Sign()` ranks vote: what is delivered of every value is +1 or -1, whichever most ranks sent, counted on
    packed bits. It says nothing of a gradient's size: the learning rate alone is the length of a step, for parameters
    whose gradients are all 0, too. What stays dense is still a mean; `PlanOptions(min_nbytes=0, compress_1d=True)`
    makes all parameters vote. A majority vote takes no feedback.

    Args:
        up: what ranks send.
        feedback: `ErrorFeedback`, `MomentumCorrection` or `EF21`; required where the contraction is below 0.9 or there
            is no contract; refused for unbiased kinds, and for votes.

    Raises:
        RecipeError: feedback is missing where it is required, or given where it diverges.

    Example:
        >>> Gather(up=OneBit(), feedback=ErrorFeedback()).recipe(), Gather(up=Sign()).recipe()
        ('gather/onebit', 'sign')

    References:
        Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Animashree Anandkumar, "signSGD: Compressed
        Optimisation for Non-Convex Problems", 2018 (majority vote). Differs from the paper: all ranks count, so that
        nothing is sent back.
    """

    up: Compressor
    feedback: Feedback | None = None
    down: Compressor = field(default=Identity(), init=False, repr=False)  # nothing is sent back
    has_owners: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.votes:
            check_votes(self.up, self.feedback)
        else:
            check_feedback(self.up, self.feedback)

    @property
    def votes(self) -> bool:
        """Whether what is delivered is a majority, not a mean."""
        return isinstance(self.up, Sign)

    def recipe(self) -> str:
        """`gather/` and the compressor's name, with the feedback where it is not the default; of votes the name."""
        if self.votes:
            return self.up.recipe()
        return f"gather/{self.up.recipe()}{feedback_suffix(self.feedback, self.up)}"

    def together(self, dtype: torch.dtype) -> Hashable:
        """Votes and means have messages of their own."""
        return self.votes, self.up.statistic_reduction

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """A header, then every partition; the same on every rank."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        agreement, shared = statistic_round(partitions, len(names), world_size)
        nbytes = header = header_nbytes(len(names))
        up: list[int] = []
        for partition in partitions:
            up.append(nbytes)
            nbytes += partition.aggregator.up.nbytes(partition.spec)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(*agreement, AllGather((nbytes,) * world_size)),
            names=names,
            header_nbytes=header,
            up=tuple(up),
            shared=shared,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode once; decode every rank's bytes in rank order, or count them."""
        layout, world_size = message.layout, message.layout.world_size
        gather = layout.rounds[-1]
        assert isinstance(gather, AllGather)
        if not message.sections:
            message.sections = (Section(range(len(layout.partitions)), layout.up),)
        (section,) = message.sections
        nbytes = gather.nbytes[message.rank]

        own = message.buffers.take(nbytes)
        gathered = message.buffers.take(world_size * nbytes)
        yield from agree(message, section, own)
        bad = set[str]() if message.nonfinite else message.encode(section, own)
        message.write_header(own[: layout.header_nbytes], bad, used=True)
        yield Transfer(gather, own, gathered)
        message.buffers.give(own)

        sources = split(gathered, gather.nbytes)
        message.read_headers(sources)
        if not message.nonfinite and _votes(layout):
            _count(message, sources)
            message.decode(section, sources[0])
        elif not message.nonfinite:
            for source, data in enumerate(sources):
                message.decode(section, data, accumulate=source > 0)
            for block in message.blocks:
                divide_(block.value, world_size)
            message.settle()
            message.note_nonfinite_means()
        message.buffers.give(gathered)
        message.finish()


def _votes(layout: MessageLayout) -> bool:
    settings = layout.partitions[0].aggregator
    return isinstance(settings, Gather) and settings.votes


def _count(message: Message, sources: Sequence[Tensor]) -> None:
    """Put what most ranks sent in the place of what rank 0 did."""
    for partition, start in zip(message.layout.partitions, message.layout.up, strict=True):
        up = partition.aggregator.up
        assert isinstance(up, Sign)
        stop = start + up.nbytes(partition.spec)
        key = Key(partition.key, message.step, SHARED_STREAM, partition.offset)
        winner = up.vote([data[start:stop] for data in sources], partition.spec, key)
        sources[0][start:stop].copy_(winner)
