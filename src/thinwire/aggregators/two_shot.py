"""Two-way compressed exchange through owners: all-to-all of C(g + e), then all-gather of the owners' C(mean + e')."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import check_feedback, check_no_vote, check_one_mask, check_own_scale, feedback_suffix
from thinwire.aggregators.division import divide_
from thinwire.aggregators.header import header_nbytes
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.owners import fill, places_of_all, places_owned, send_to_owners
from thinwire.aggregators.statistic import statistic_round
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
        up_nbytes, up = fill(partitions, world_size, lambda p: p.aggregator.up.nbytes(p.spec), header=header)
        down_nbytes, down = fill(partitions, world_size, lambda p: p.aggregator.down.nbytes(p.spec), header=header)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(*agreement, AllToAll(up_nbytes), AllGather(down_nbytes)),
            names=names,
            header_nbytes=header,
            up=up,
            down=down,
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

        # Up: C(g + e) to the owners.
        sources = yield from send_to_owners(message, all_up, push)

        # Mean, in rank order, into the values of the partitions owned here: they have been sent.
        own = buffers.take(pull.nbytes[rank])
        gathered = buffers.take(sum(pull.nbytes))
        bad = set[str]()
        if not message.nonfinite:
            for source, data in enumerate(sources):
                message.decode(own_up, data, accumulate=source > 0)
            for place in own_up.places:
                divide_(message.blocks[place].value, world_size)
            bad = message.encode(own_down, own)
        else:
            message.hold(own_down)
        message.write_header(own[:header], bad, used=False)
        buffers.give(sources[0])
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
    partitions, own = layout.partitions, places_owned(layout.partitions, rank)
    every = range(len(partitions))
    return (
        Section(every, places_of_all(partitions, push.nbytes, layout.up)),
        Section(own, [layout.up[i] for i in own]),
        Section(own, [layout.down[i] for i in own], down=True),
        Section(every, places_of_all(partitions, pull.nbytes, layout.down), down=True),
    )
