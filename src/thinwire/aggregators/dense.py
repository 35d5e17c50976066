"""No compression: DDP's own arithmetic, one all-reduce."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.message import MEAN, Message
from thinwire.comm.rounds import AllReduce, Exchange
from thinwire.compressors import Cast, Compressor, Identity
from thinwire.errors import RecipeError
from thinwire.feedback import Feedback


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense(Aggregator):
    r"""Scales by 1/n, then all-reduces.

    mean = sum_i g_i / n, in the parameter's dtype and the backend's order of summation: bit for bit what DDP computes
    for the same buckets. With `wire_dtype` the scaled gradient is rounded to 16 bits, summed so, and widened; scaling
    first keeps the sum from overflowing.

    Args:
        wire_dtype: None, torch.float16 or torch.bfloat16. Prefer `TwoShot` with `Cast`, which sends the same bytes and
            sums in float32.

    Raises:
        RecipeError: another wire_dtype.

    Example:
        >>> Dense().recipe()
        'dense'
    """

    wire_dtype: torch.dtype | None = None
    up: Compressor = field(init=False, repr=False)  # what travels, seen as a compressor
    down: Compressor = field(init=False, repr=False)
    feedback: Feedback | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.wire_dtype not in (None, torch.float16, torch.bfloat16):
            raise RecipeError(f"Dense: expected wire_dtype None, float16 or bfloat16, got {self.wire_dtype}")
        compressor = Identity() if self.wire_dtype is None else Cast(dtype=self.wire_dtype)
        object.__setattr__(self, "up", compressor)
        object.__setattr__(self, "down", compressor)

    def recipe(self) -> str:
        """`dense`, `dense:fp16` or `dense:bf16`."""
        return "dense" if self.wire_dtype is None else f"dense:{self.up.recipe()}"

    @property
    def cuts_show(self) -> bool:
        """As of DDP's own sums."""
        return True

    def together(self, dtype: torch.dtype) -> Hashable:
        """One all-reduce adds numbers of one dtype."""
        return dtype

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """One all-reduce of all elements, in the dtype of the first partition's wire."""
        settings = partitions[0].aggregator
        assert isinstance(settings, Dense)
        dtype = settings.wire_dtype or partitions[0].dtype
        numel = sum(partition.numel for partition in partitions)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(AllReduce(numel, dtype, world_size),),
            names=tuple(dict.fromkeys(partition.name for partition in partitions)),
            header_nbytes=0,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """All-reduce `message.flat` in place. inf and nan reach every rank by themselves, and are noted there."""
        (reduce,) = message.layout.rounds
        assert isinstance(reduce, AllReduce)
        assert message.flat is not None
        message.flat.mul_(1.0 / message.layout.world_size)  # as DDP: a product, not a division
        if message.flat.dtype == reduce.dtype:
            yield from message.all_reduce(reduce, message.flat)
        else:
            narrow = message.flat.to(reduce.dtype)
            yield from message.all_reduce(reduce, narrow)
            message.flat.copy_(narrow)
        # Equal on all ranks, since all hold the same sum. The extremes are nan where any value is: one pass, no memory.
        if message.flat.numel() and not all(bool(x.isfinite()) for x in message.flat.aminmax()):
            message.nonfinite = {(MEAN, message.layout.names[0])}
