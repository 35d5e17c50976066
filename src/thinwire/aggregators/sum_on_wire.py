"""One all-reduce of encoded numbers, which add up as they are."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import check_feedback, feedback_suffix
from thinwire.aggregators.division import divide_
from thinwire.aggregators.header import num_flags
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.statistic import agree, statistic_round
from thinwire.comm.rounds import AllReduce, Exchange, Transfer
from thinwire.compressors import Compressor, Identity
from thinwire.errors import RecipeError
from thinwire.feedback import Feedback


@dataclass(frozen=True, kw_only=True, slots=True)
class SumOnWire(Aggregator):
    r"""Adds encoded numbers up on their way, for linear kinds.

    With residuals e_i and n ranks: mean = (1/n) decode(sum_i C(g_i + e_i)), since decode is linear; only the ranks' own
    compression is lossy. Kinds whose scale all ranks share first reduce one vector of statistics: its maximum, or its
    sum.

    One all-reduce, or two, whatever n; each rank sends 2 (n-1)/n of its bytes. Sums of float32 and 16-bit values are
    rounded in the backend's order, equally on all ranks, as DDP's own are: with three ranks or more they depend on
    buckets and messages. Sums of whole numbers do not, where their scale is a maximum. What 16-bit sums are rounded by
    is lost, since no residual holds it: ask for float32 values where that counts.

    Args:
        up: what ranks send; a linear kind: `RandomK`, `GlobalLinear` without halving, `TopKC`.
        feedback: as for `Gather`.

    Raises:
        RecipeError: the kind is not linear, or has no room for the sum over all ranks; feedback is missing where it is
            required, or given where it diverges.

    Example:
        >>> SumOnWire(up=RandomK(density=0.01), feedback=ErrorFeedback()).recipe()
        'sum/randomk:0.01'

    References:
        Jihao Xin, Marco Canini, Peter Richtarik, Samuel Horvath, "Global-QSGD: Practical Floatless Quantization for
        Distributed Learning with Theoretical Guarantees", 2023. Wenchen Han, Shay Vargaftik, Michael Mitzenmacher,
        Brad Karp, Ran Ben Basat, "Beyond Throughput and Compression Ratios: Towards High End-to-end Utility of Gradient
        Compression", 2024.
    """

    up: Compressor
    feedback: Feedback | None = None
    down: Compressor = field(default=Identity(), init=False, repr=False)  # nothing is sent back
    has_owners: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.up.linear is None:
            raise RecipeError(
                f"{self.up.recipe()}: what ranks send cannot be added up on the wire; expected a linear kind, as "
                "'randomk:0.01', 'global:8' or 'topkc:0.01', or another exchange"
            )
        check_feedback(self.up, self.feedback)

    def recipe(self) -> str:
        """The compressor's name, after `sum/` where the kind alone means another exchange."""
        prefix = "" if self.up.statistic_reduction else "sum/"
        return f"{prefix}{self.up.recipe()}{feedback_suffix(self.feedback, self.up)}"

    @property
    def cuts_show(self) -> bool:
        """Where values, or the statistics behind their scale, are rounded as they are added up."""
        return self.up.statistic_reduction == "sum" or self.up.linear != torch.int8

    def for_world(self, world_size: int) -> Self:
        """Leave room in codes for the sum."""
        return replace(self, up=self.up.with_summands(world_size))

    def together(self, dtype: torch.dtype) -> Hashable:
        """One all-reduce adds numbers of one dtype."""
        return self.up.linear, self.up.statistic_reduction

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Every partition's numbers; before them the flags, where no round of statistics has brought them."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        agreement, shared = statistic_round(partitions, len(names), world_size)
        dtype = partitions[0].aggregator.up.linear
        assert dtype is not None
        nbytes = 0 if agreement else num_flags(len(names), "sum") * dtype.itemsize
        up: list[int] = []
        for partition in partitions:
            up.append(nbytes)
            nbytes += partition.aggregator.up.nbytes(partition.spec)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(*agreement, AllReduce(nbytes // dtype.itemsize, dtype, world_size)),
            names=names,
            header_nbytes=up[0],
            up=tuple(up),
            shared=shared,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Agree on scales, encode, add up, decode once."""
        layout, reduce = message.layout, message.layout.rounds[-1]
        assert isinstance(reduce, AllReduce)
        if not message.sections:
            message.sections = (Section(range(len(layout.partitions)), layout.up),)
        (section,) = message.sections
        data = message.buffers.take(reduce.numel * reduce.dtype.itemsize)
        numbers, flags = data.view(reduce.dtype), data[: layout.header_nbytes].view(reduce.dtype)
        yield from agree(message, section, data)

        bad: set[str] = set()
        if message.nonfinite:
            numbers.zero_()  # it travels all the same: ranks keep to one schedule
        else:
            bad = message.encode(section, data)
        if not layout.shared:
            message.write_flags(flags, bad, "sum")
        elif bad:  # within the scale and yet beyond the wire dtype, which sums of nan tell everyone
            assert reduce.dtype.is_floating_point, "codes within a scale always fit"
            numbers.fill_(float("nan"))
        yield Transfer(reduce, numbers, numbers)

        if not layout.shared:
            message.read_flags(flags, "sum")
        if not message.nonfinite:
            message.decode(section, data)
            for block in message.blocks:
                divide_(block.value, layout.world_size)
            message.settle()
            message.note_nonfinite_means()
        message.buffers.give(data)
        message.finish()
