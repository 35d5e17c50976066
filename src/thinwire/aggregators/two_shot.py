"""Two-way compressed exchange through owners: all-to-all of C(g + e), then all-gather of the owners' C(mean + e')."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import check_feedback, check_no_vote, check_one_mask, check_own_scale, feedback_suffix
from thinwire.aggregators.header import header_nbytes
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.statistic import agree, statistic_round
from thinwire.comm.rounds import AllGather, AllToAll, Exchange, Transfer
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback
from thinwire.wire import split


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoShot(Aggregator):
    r"""Compresses both ways; every partition has one owner that forms its mean.

    With worker residuals e_i, owner residual e', and n ranks:

        rank i:  sends C_up(g_i + e_i) to the owner;           e_i <- g_i + e_i - decoded
        owner:   m = (1/n) sum_i decode_i + e', in rank order;  sends C_down(m) to all;  e' <- m - decoded
        all, the owner included: the mean is decode(C_down(m)), from the same bytes, so replicas stay bit-identical.

    Sums are in float32 and rank order, and the division happens once. Bytes per rank: (n-1)/n of the encoded model up,
    and as much down, whatever n. Kinds whose scale all ranks share first reduce one vector of statistics.

    Args:
        up: what ranks send.
        down: what owners send back.
        feedback: `ErrorFeedback`, whose rule is above, `MomentumCorrection` or `EF21`, whose rules they hold; required
            where a compressor's contraction is below 0.9 or has no contract; refused for unbiased kinds.

    Raises:
        RecipeError: feedback is missing where it is required, or given where it diverges; one mask, shared by both
            hops, would be scaled for twice; signs without a scale; or `down` waits for a scale that ranks agree on.

    Example:
        >>> TwoShot(up=TopK(density=0.01), down=TopK(density=0.01), feedback=ErrorFeedback()).recipe()
        'topk:0.01'

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021 (algorithm 4, through a parameter server). Differs from the paper: owners are the
        ranks themselves, and the mean is divided once instead of scaling gradients beforehand.
    """

    up: Compressor
    down: Compressor
    feedback: Feedback | None = None

    def __post_init__(self) -> None:
        for compressor in (self.up, self.down):
            check_no_vote(compressor, "TwoShot")
        check_own_scale(self.down, "an owner, which encodes alone")
        check_feedback(self.up, self.feedback)
        check_feedback(self.down, self.feedback)
        check_one_mask(self.up, self.down)

    def recipe(self) -> str:
        """The compressor's name, or `up+down` where they differ, with the feedback where it is not the default."""
        names = self.up.recipe() if self.up == self.down else f"{self.up.recipe()}+{self.down.recipe()}"
        return names + feedback_suffix(self.feedback, self.up, self.down)

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Per owner one block: a header, then its partitions."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        agreement, shared = statistic_round(partitions, len(names), world_size)
        header = header_nbytes(len(names))
        up_nbytes, down_nbytes = [header] * world_size, [header] * world_size
        up: list[int] = []
        down: list[int] = []
        for partition in partitions:
            up.append(up_nbytes[partition.owner])
            down.append(down_nbytes[partition.owner])
            up_nbytes[partition.owner] += partition.aggregator.up.nbytes(partition.spec)
            down_nbytes[partition.owner] += partition.aggregator.down.nbytes(partition.spec)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(*agreement, AllToAll(tuple(up_nbytes)), AllGather(tuple(down_nbytes))),
            names=names,
            header_nbytes=header,
            up=tuple(up),
            down=tuple(down),
            shared=shared,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode for the owners, mean what one owns, encode it once, decode everyone's."""
        layout, rank, world_size = message.layout, message.rank, message.layout.world_size
        push, pull = layout.rounds[-2:]
        assert isinstance(push, AllToAll)
        assert isinstance(pull, AllGather)
        if not message.sections:
            message.sections = _sections(layout, push, pull, rank)
        all_up, own_up, own_down, all_down = message.sections
        buffers, header = message.buffers, layout.header_nbytes

        # Up: C(g + e) to the owners. Every block, also to ranks that own nothing here, carries the header.
        send = buffers.take(sum(push.nbytes))
        received = buffers.take(world_size * push.nbytes[rank])
        yield from agree(message, all_up, send)
        bad = set[str]() if message.nonfinite else message.encode(all_up, send)
        for block in split(send, push.nbytes):
            message.write_header(block[:header], bad, used=True)
        yield Transfer(push, send, received)
        buffers.give(send)

        # Mean, in rank order, into the values of the partitions owned here: they have been sent.
        sources = split(received, [push.nbytes[rank]] * world_size)
        message.read_headers(sources)
        own = buffers.take(pull.nbytes[rank])
        gathered = buffers.take(sum(pull.nbytes))
        bad = set[str]()
        if not message.nonfinite:
            for source, data in enumerate(sources):
                message.decode(own_up, data, accumulate=source > 0)
            for place in own_up.places:
                message.blocks[place].value.div_(world_size)
            bad = message.encode(own_down, own)
        else:
            message.hold(own_down)
        message.write_header(own[:header], bad, used=False)
        buffers.give(received)
        yield Transfer(pull, own, gathered)
        buffers.give(own)

        # Down: everyone, the owner included, decodes the same bytes.
        message.read_mean_headers(split(gathered, pull.nbytes))
        if not message.nonfinite:
            message.decode(all_down, gathered)
            message.settle()
        buffers.give(gathered)
        message.finish()


def _sections(layout: MessageLayout, push: AllToAll, pull: AllGather, rank: int) -> tuple[Section, ...]:
    """Where blocks lie: in what is sent to the owners, what comes from one rank, one's own means, everyone's means."""
    owners = [partition.owner for partition in layout.partitions]
    every = range(len(owners))
    own = [place for place in every if owners[place] == rank]
    up_starts, down_starts = (list(itertools.accumulate(r.nbytes, initial=0)) for r in (push, pull))
    return (
        Section(every, [up_starts[owners[i]] + layout.up[i] for i in every]),
        Section(own, [layout.up[i] for i in own]),
        Section(own, [layout.down[i] for i in own], down=True),
        Section(every, [down_starts[owners[i]] + layout.down[i] for i in every], down=True),
    )
