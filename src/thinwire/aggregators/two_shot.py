"""Two-way compressed exchange through owners: all-to-all of C(g + e), then all-gather of the owners' C(mean + e')."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.aggregators.base import (
    MEAN,
    Aggregator,
    Message,
    MessageLayout,
    Partition,
    header_nbytes,
    read_header,
    write_header,
)
from thinwire.aggregators.checks import check_feedback
from thinwire.comm.rounds import AllGather, AllToAll, Exchange, Transfer
from thinwire.compressors import Compressor
from thinwire.feedback import ErrorFeedback


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoShot(Aggregator):
    r"""Compresses both ways; every partition has one owner that forms its mean.

    With worker residuals e_i, owner residual e', and n ranks:

        rank i:  sends C_up(g_i + e_i) to the owner;           e_i <- g_i + e_i - decoded
        owner:   m = (1/n) sum_i decode_i + e', in rank order;  sends C_down(m) to all;  e' <- m - decoded
        all, the owner included: the mean is decode(C_down(m)), from the same bytes, so replicas stay bit-identical.

    Sums are in float32 and rank order, and the division happens once. Bytes per rank: (n-1)/n of the encoded model up,
    and as much down, whatever n.

    Args:
        up: what ranks send.
        down: what owners send back.
        feedback: required where a compressor's contraction is below 0.9 or has no contract; refused for unbiased kinds.

    Raises:
        RecipeError: feedback is missing where it is required, or given where it diverges.

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
    feedback: ErrorFeedback | None = None

    def __post_init__(self) -> None:
        check_feedback(self.up, self.feedback)
        check_feedback(self.down, self.feedback)

    def recipe(self) -> str:
        """The compressor's name, or `up+down` where they differ."""
        return self.up.recipe() if self.up == self.down else f"{self.up.recipe()}+{self.down.recipe()}"

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Per owner one block: a header, then its partitions."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
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
            rounds=(AllToAll(tuple(up_nbytes)), AllGather(tuple(down_nbytes))),
            names=names,
            header_nbytes=header,
            up=tuple(up),
            down=tuple(down),
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode for the owners, mean what one owns, encode it once, decode everyone's."""
        layout, rank, world_size = message.layout, message.rank, message.layout.world_size
        push, pull = layout.rounds
        assert isinstance(push, AllToAll)
        assert isinstance(pull, AllGather)
        partitions, header = layout.partitions, layout.header_nbytes
        every = range(len(partitions))
        owned = [i for i in every if partitions[i].owner == rank]
        up_nbytes = [p.aggregator.up.nbytes(p.spec) for p in partitions]
        down_nbytes = [p.aggregator.down.nbytes(p.spec) for p in partitions]

        # Up: C(g + e) to the owners. Every block, also to ranks that own nothing here, carries the header.
        starts = [sum(push.nbytes[:d]) for d in range(world_size)]
        send = message.buffers.take(sum(push.nbytes))
        received = message.buffers.take(world_size * push.nbytes[rank])
        places = [starts[partitions[i].owner] + layout.up[i] for i in every]
        bad = message.encode(every, [send[places[i] : places[i] + up_nbytes[i]] for i in every])
        used = {block.partition.name for block in message.blocks if block.used}
        for start in starts:
            write_header(send[start : start + header], layout.names, used, {partitions[i].name for i in bad})
        yield Transfer(push, send, received)
        message.buffers.give(send)

        # Mean, in rank order, into the values of the partitions owned here: they have been sent.
        block_nbytes = push.nbytes[rank]
        sources = [received[s * block_nbytes : (s + 1) * block_nbytes] for s in range(world_size)]
        message.unused = set(layout.names)
        for source, data in enumerate(sources):
            used, nonfinite = read_header(data, layout.names)
            message.unused -= used
            message.nonfinite |= {(source, name) for name in nonfinite}
        own = message.buffers.take(pull.nbytes[rank])
        gathered = message.buffers.take(sum(pull.nbytes))
        bad = []
        if not message.nonfinite:
            for source, data in enumerate(sources):
                pieces = [data[layout.up[i] : layout.up[i] + up_nbytes[i]] for i in owned]
                message.decode(owned, pieces, accumulate=source > 0)
            for i in owned:
                message.blocks[i].value.div_(world_size)
            outs = [own[layout.down[i] : layout.down[i] + down_nbytes[i]] for i in owned]
            bad = message.encode(owned, outs, down=True)
        write_header(own[:header], layout.names, set(), {partitions[i].name for i in bad})
        message.buffers.give(received)
        yield Transfer(pull, own, gathered)
        message.buffers.give(own)

        # Down: everyone, the owner included, decodes the same bytes.
        starts = [sum(pull.nbytes[:s]) for s in range(world_size)]
        for start in starts:
            _, nonfinite = read_header(gathered[start : start + header], layout.names)
            message.nonfinite |= {(MEAN, name) for name in nonfinite}
        if not message.nonfinite:
            places = [starts[partitions[i].owner] + layout.down[i] for i in every]
            message.decode(every, [gathered[places[i] : places[i] + down_nbytes[i]] for i in every], down=True)
        message.buffers.give(gathered)
        message.finish()
