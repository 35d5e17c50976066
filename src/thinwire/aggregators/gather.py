"""One all-gather of every rank's bytes; each rank forms the mean itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import check_feedback, feedback_suffix
from thinwire.aggregators.header import header_nbytes
from thinwire.aggregators.message import MEAN, Message, Section
from thinwire.comm.rounds import AllGather, Exchange, Transfer
from thinwire.compressors import Compressor, Identity
from thinwire.feedback import Feedback
from thinwire.kernels import active
from thinwire.wire import split


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Aggregator):
    r"""Every rank sends C(g + e) to every other and decodes all of them.

    With residuals e_i and n ranks: mean = (1/n) sum_i decode(C(g_i + e_i)), in float32 and rank order; only the ranks'
    own compression is lossy. One round instead of two, but each rank sends its bytes n - 1 times: for few ranks, or
    bytes so few that latency decides.

    Args:
        up: what ranks send.
        feedback: `ErrorFeedback`, `MomentumCorrection` or `EF21`; required where the contraction is below 0.9 or there
            is no contract; refused for unbiased kinds.

    Raises:
        RecipeError: feedback is missing where it is required, or given where it diverges.

    Example:
        >>> Gather(up=OneBit(), feedback=ErrorFeedback()).recipe()
        'gather/onebit'
    """

    up: Compressor
    feedback: Feedback | None = None
    down: Compressor = field(default=Identity(), init=False, repr=False)  # nothing is sent back
    has_owners: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_feedback(self.up, self.feedback)

    def recipe(self) -> str:
        """`gather/` and the compressor's name, with the feedback where it is not the default."""
        return f"gather/{self.up.recipe()}{feedback_suffix(self.feedback, self.up)}"

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """A header, then every partition; the same on every rank."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        nbytes = header = header_nbytes(len(names))
        up: list[int] = []
        for partition in partitions:
            up.append(nbytes)
            nbytes += partition.aggregator.up.nbytes(partition.spec)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(AllGather((nbytes,) * world_size),),
            names=names,
            header_nbytes=header,
            up=tuple(up),
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode once, decode every rank's bytes in rank order."""
        layout, world_size = message.layout, message.layout.world_size
        (gather,) = layout.rounds
        assert isinstance(gather, AllGather)
        if not message.sections:
            message.sections = (Section(range(len(layout.partitions)), layout.up),)
        (section,) = message.sections
        nbytes = gather.nbytes[message.rank]

        own = message.buffers.take(nbytes)
        gathered = message.buffers.take(world_size * nbytes)
        bad = message.encode(section, own)
        message.write_header(own[: layout.header_nbytes], bad, used=True)
        yield Transfer(gather, own, gathered)
        message.buffers.give(own)

        sources = split(gathered, gather.nbytes)
        message.read_headers(sources)
        if not message.nonfinite:
            for source, data in enumerate(sources):
                message.decode(section, data, accumulate=source > 0)
            # Equal on all ranks, since all form the same sum: the sum may overflow where no contribution did.
            for block in message.blocks:
                block.value.div_(world_size)
            message.settle()
            values = [block.value for block in message.blocks]
            finite = active().all_finite(values, threads=message.threads)
            pairs = zip(layout.partitions, finite, strict=True)
            message.nonfinite = {(MEAN, partition.name) for partition, ok in pairs if not ok}
        message.buffers.give(gathered)
        message.finish()
