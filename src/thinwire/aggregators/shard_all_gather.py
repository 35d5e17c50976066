"""What owners hold to all ranks: an all-gather of C(w), decoded from the same bytes by everyone, the owner too."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import typical_contract
from thinwire.aggregators.header import header_nbytes
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.owners import fill, places_of_all, places_owned
from thinwire.comm.rounds import AllGather, Exchange, Transfer
from thinwire.compressors import Compressor, Contract, Contractive, Unbiased
from thinwire.errors import RecipeError
from thinwire.feedback import Feedback
from thinwire.spec import BlockSpec
from thinwire.wire import split

LEAST_DELTA, MOST_OMEGA = 0.25, 2.0  # 4 bits pass: int4 has a delta of 0.277, int4:stochastic an omega of 1.19


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardAllGather(Aggregator):
    r"""The way down of `TwoShot` alone, of weights: the rank that keeps a shard sends it, encoded, to all.

    For every partition: all ranks, the owner among them, end with decode(C(w)), where w is what the owner holds.

    There is no feedback: a weight is a state, not an increment, and the owner's own w stays exact. So the error of one
    all-gather is not carried into the next, and none must be so large that the model computed with is another one.

    Args:
        down: what owners send.

    Raises:
        RecipeError: a kind that leaves values out, needs statistics of all ranks or whole matrices, or whose contract
            is weaker than a contraction of 0.25 or an omega of 2.

    Example:
        >>> from thinwire.compressors import BlockQuant
        >>> ShardAllGather(down=BlockQuant(bits=8)).recipe()
        'int8'

    References:
        Guanhua Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023
        (quantised weight all-gather). Differs from the paper: the backward pass gathers again, there is no second copy.
    """

    down: Compressor
    up: Compressor = field(init=False, repr=False)  # the same: what plans count
    feedback: Feedback | None = field(default=None, init=False, repr=False)
    has_owners: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self.down)
        object.__setattr__(self, "up", self.down)

    def recipe(self) -> str:
        """The compressor's name."""
        return self.down.recipe()

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Per owner one block: a header, then its partitions."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        header = header_nbytes(len(names))
        nbytes, down = fill(partitions, world_size, lambda p: p.aggregator.down.nbytes(p.spec), header=header)
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=(AllGather(nbytes),),
            names=names,
            header_nbytes=header,
            down=down,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode what one owns, decode everyone's. Every rank sees every header, so that all know of inf and nan."""
        layout, rank = message.layout, message.rank
        (gather,) = layout.rounds
        assert isinstance(gather, AllGather)
        if not message.sections:
            message.sections = _sections(layout, gather, rank)
        own, everything = message.sections

        send = message.buffers.take(gather.nbytes[rank])
        gathered = message.buffers.take(sum(gather.nbytes))
        bad = message.encode(own, send)
        message.write_header(send[: layout.header_nbytes], bad, used=True)
        yield Transfer(gather, send, gathered)
        message.buffers.give(send)

        message.read_headers(split(gathered, gather.nbytes))
        if not message.nonfinite:
            message.decode(everything, gathered)
        message.buffers.give(gathered)
        message.finish()


def _sections(layout: MessageLayout, gather: AllGather, rank: int) -> tuple[Section, Section]:
    """Where blocks lie: in what this rank sends, and in what all ranks get."""
    own = places_owned(layout.partitions, rank)
    every = places_of_all(layout.partitions, gather.nbytes, layout.down)
    return (
        Section(own, [layout.down[place] for place in own], down=True),
        Section(range(len(every)), every, down=True),
    )


def _check(compressor: Compressor) -> None:
    """Raise `RecipeError` for kinds by which a model would compute with other weights than it has."""
    name, spec = compressor.recipe(), BlockSpec(shape=(65536,))
    if compressor.unit != "slice":
        raise RecipeError(f"{name} must see whole matrices, and a shard has some rows only; expected 'int8' or 'int4'")
    if compressor.statistic_reduction is not None:
        raise RecipeError(
            f"{name}: all ranks must agree on its scale, and one holds a shard; expected 'int8' or 'int4'"
        )
    contract = typical_contract(compressor)
    if compressor.holds_back(spec) or compressor.shared_key or not _close(contract):
        raise RecipeError(
            f"{name} leaves out or coarsens so much ({contract}) that only feedback makes it train, and weights have "
            f"none: expected a contraction of at least {LEAST_DELTA} or an omega of at most {MOST_OMEGA:g}, as of "
            "'int8', 'int4', 'fp16'"
        )


def _close(contract: Contract) -> bool:
    match contract:
        case Contractive(delta):
            return delta >= LEAST_DELTA
        case Unbiased(omega):
            return omega <= MOST_OMEGA
        case _:
            return False
