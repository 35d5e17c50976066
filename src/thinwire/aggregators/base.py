"""Aggregators form the mean over ranks. This file holds their interface, and partitions and layouts as arithmetic.

A *partition* is the unit of compression and of ownership: a slice of one parameter. A *message* is the partitions that
travel together; its layout is fixed once, from arithmetic alone, and run every step. Message layouts list the rounds
with exact sizes, and `exchange` yields exactly those.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from thinwire.aggregators.checks import owes_nothing
from thinwire.comm.rounds import Exchange, Round
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback, Slot
from thinwire.spec import BlockSpec

if TYPE_CHECKING:
    from thinwire.aggregators.message import Message


class Aggregator(ABC):
    """How the mean over ranks is formed. Frozen settings; knows nothing of torch.distributed, threads or sockets."""

    __slots__ = ()

    up: Compressor  # what ranks send
    down: Compressor  # what owners send back
    feedback: Feedback | None
    has_owners: ClassVar[bool] = True  # that lose something on the way back; else every rank forms the same mean

    @property
    def inner(self) -> Compressor:
        """What ranks of one node send each other, where an exchange knows of nodes."""
        return self.up

    @property
    def cuts_show(self) -> bool:
        """Whether sums are rounded in the backend's order, so that, with three ranks or more, buckets show."""
        return False

    @property
    def slots(self) -> frozenset[Slot]:
        """What must be kept of a parameter between steps."""
        if self.feedback is None:
            return frozenset()
        return self.feedback.slots(
            exact_up=owes_nothing(self.up), exact_down=owes_nothing(self.down), owners=self.has_owners
        )

    @abstractmethod
    def recipe(self) -> str:
        """Return the recipe as the command line spells it."""

    def sent_once_nbytes(self, spec: BlockSpec) -> int:
        """Return what a rank sends for a block, if it sent it once."""
        return self.up.nbytes(spec)

    def factor_numel(self, shape: Sequence[int]) -> int:
        """Return how many numbers `Slot.FACTOR` holds of a parameter of this shape, in memory order."""
        return 0

    def for_world(self, world_size: int) -> Self:
        """Return the settings for so many ranks. Raises `RecipeError` where there is no room for them."""
        return self

    def together(self, dtype: torch.dtype) -> Hashable:
        """Return what must be equal, beside the class, for partitions of parameters of `dtype` to share a message."""
        return self.up.statistic_reduction

    @staticmethod
    @abstractmethod
    def lay_out(partitions: Sequence["Partition"], world_size: int) -> "MessageLayout":
        """Place partitions, each with settings of this class, in one message."""

    @staticmethod
    @abstractmethod
    def exchange(message: "Message") -> Exchange:
        """Run one step of a message on one rank: gradients in `message.blocks` become their mean."""

    @classmethod
    def schedule(cls, partitions: Sequence["Partition"], world_size: int) -> tuple[Round, ...]:
        """Return the rounds of a message, with exact sizes."""
        return cls.lay_out(partitions, world_size).rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A slice of one parameter, or all of it, with what is done to it.

    Attributes:
        name: qualified name of the parameter.
        dtype: dtype of the parameter.
        offset: first element, in the parameter's memory order.
        numel: number of elements.
        owner: the rank that forms its mean.
        aggregator: compressors and feedback.
        key: Philox key of the parameter.
        shape: the parameter's sizes in memory order, where a compressor must see it whole; None for slices.
    """

    name: str
    dtype: torch.dtype
    offset: int
    numel: int
    owner: int
    aggregator: Aggregator
    key: int = 0
    shape: tuple[int, ...] | None = None

    @property
    def spec(self) -> BlockSpec:
        """What compressors see of it."""
        return BlockSpec(shape=self.shape or (self.numel,), dtype=self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageLayout:
    """Where every partition of a message lies in every buffer.

    Attributes:
        partitions: in the order of the message.
        world_size: number of ranks.
        rounds: what the exchange yields.
        names: the parameters of the message, each once.
        header_nbytes: bytes of a header (see aggregators/header.py).
        up: per partition, first byte of C(g) in the block it travels in.
        down: per partition, first byte in its owner's block on the way back.
        shared: per partition, the first of its numbers in the vector of statistics, whose flags come first.
        details: what else the aggregator has worked out, for every step of every message; its own business.
    """

    partitions: tuple[Partition, ...]
    world_size: int
    rounds: tuple[Round, ...]
    names: tuple[str, ...]
    header_nbytes: int
    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    details: object = field(default=None, compare=False, repr=False)
