"""Two-way compressed exchange through parameter servers: push C(g + e), pull the servers' C(mean + e')."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.checks import (
    check_feedback,
    check_no_vote,
    check_one_mask,
    check_own_scale,
    feedback_suffix,
    typical_contract,
)
from thinwire.aggregators.header import MANY, bitmap, names_in
from thinwire.aggregators.message import MEAN, Message, Section
from thinwire.aggregators.owners import fill, places_of_all
from thinwire.aggregators.push_pull_header import (
    MIXED,
    SCALES_DIFFER,
    PushHeader,
    pull_header_nbytes,
    push_header_nbytes,
    ranks_in,
    read_pull_header,
    write_push_header,
)
from thinwire.comm.nodes import Nodes
from thinwire.comm.rounds import Exchange, Pull, Push, Transfer
from thinwire.compressors import Compressor, is_exact
from thinwire.errors import RecipeError
from thinwire.feedback import EF21, Feedback, Slot
from thinwire.wire import split

_COMPRESSED_WEIGHT = 2  # of a partition's work at its server, beside one that arrives as it is


@dataclass(frozen=True, kw_only=True, slots=True)
class PushPull(Aggregator):
    r"""`TwoShot` with servers as owners: the same rule, the same bits.

    With worker residuals e_i, the server's residual e', and n workers:

        worker i:  pushes C_up(g_i + e_i);                          e_i <- g_i + e_i - decoded
        server:    m = (1/n) sum_i decode_i + e', in rank order;    all pull C_down(m);  e' <- m - decoded

    A worker sends the encoded model once and receives it once, whatever n.

    Args:
        up: what workers push.
        down: what servers answer.
        feedback: as in `TwoShot`.
        num_servers: over which partitions are dealt, by estimated work.

    Raises:
        RecipeError: as `TwoShot`; `up` waits for a scale that ranks agree on; or `EF21`, whose owners would have to
            keep what was delivered, which servers do not.

    Example:
        >>> PushPull(up=TopK(density=0.01), down=TopK(density=0.01), feedback=ErrorFeedback(), num_servers=2).recipe()
        'topk:0.01'

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021 (algorithms 3 and 4). Differs from the paper: servers divide, once; workers do not
        scale beforehand.
    """

    up: Compressor
    down: Compressor
    feedback: Feedback | None = None
    num_servers: int = 1

    def __post_init__(self) -> None:
        for compressor in (self.up, self.down):
            check_no_vote(compressor, "PushPull")
            check_own_scale(compressor, "a worker or a server, each of which encodes alone")
        if isinstance(self.feedback, EF21):
            raise RecipeError("PushPull: EF21 needs owners that keep what was delivered; pass feedback=ErrorFeedback()")
        check_feedback(self.up, self.feedback)
        check_feedback(self.down, self.feedback)
        check_one_mask(self.up, self.down)

    @property
    def slots(self) -> frozenset[Slot]:
        """What workers keep; what an owner does is at the servers."""
        return frozenset(slot for slot in super(PushPull, self).slots if not slot.owned)

    @property
    def kept_by_servers(self) -> frozenset[Slot]:
        """What servers keep."""
        return frozenset(slot for slot in super(PushPull, self).slots if slot.owned)

    def recipe(self) -> str:
        """What `TwoShot` calls it."""
        names = self.up.recipe() if self.up == self.down else f"{self.up.recipe()}+{self.down.recipe()}"
        return names + feedback_suffix(self.feedback, self.up, self.down)

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Per server one block each way: a header, then its partitions; nothing for a server that owns none of them."""
        return lay_out_for_servers(partitions, world_size, max(_settings(p).num_servers for p in partitions))

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Encode for the servers, then decode what they answer."""
        layout, buffers = message.layout, message.buffers
        push, pull = layout.rounds
        assert isinstance(push, Push)
        assert isinstance(pull, Pull)
        if not message.sections:
            every = range(len(layout.partitions))
            message.sections = (
                Section(every, places_of_all(layout.partitions, push.nbytes, layout.up)),
                Section(every, places_of_all(layout.partitions, pull.nbytes, layout.down), down=True),
            )
        up, down = message.sections
        send = buffers.take(sum(push.nbytes))
        bad = message.encode(up, send)
        write_headers(
            message,
            split(send, push.nbytes),
            used=bitmap(layout.names, {block.partition.name for block in message.blocks if block.used}),
            nonfinite=bitmap(layout.names, bad),
            who=1 << message.rank if bad else 0,
        )
        yield Transfer(push, send, send[:0])

        means = buffers.take(sum(pull.nbytes))
        yield Transfer(pull, send[:0], means)
        buffers.give(send)  # not before: whoever moves it may read it until the answer shows that it has arrived
        read_headers(message, [block for block in split(means, pull.nbytes) if block.numel()])
        if not message.nonfinite:
            message.decode(down, means)
            message.settle()
        buffers.give(means)
        message.finish()


def server_work(partition: Partition) -> int:
    """Return a server's work with a partition: its raw bytes, more where they have to be decoded and encoded."""
    hops = partition.aggregator.up, partition.aggregator.down
    exact = all(is_exact(typical_contract(compressor)) for compressor in hops)
    return partition.spec.raw_nbytes * (1 if exact else _COMPRESSED_WEIGHT)


def num_rates(partitions: Sequence[Partition]) -> int:
    """Return how many learning rates travel with these partitions of one server: all or none."""
    needed = any(p.aggregator.feedback is not None and p.aggregator.feedback.needs_learning_rate for p in partitions)
    return len(partitions) if needed else 0


def lay_out_for_servers(
    partitions: Sequence[Partition], world_size: int, num_servers: int, nodes: Nodes | None = None
) -> MessageLayout:
    """Place partitions in one block per server and direction; with `nodes` the first rank of each takes part alone."""
    names = tuple(dict.fromkeys(partition.name for partition in partitions))
    owned = [[p for p in partitions if p.owner == server] for server in range(num_servers)]
    up_header = [push_header_nbytes(len(names), num_rates(own), world_size) for own in owned]
    down_header = pull_header_nbytes(len(names), world_size)
    up_nbytes, up = fill(partitions, num_servers, lambda p: p.aggregator.up.nbytes(p.spec))
    down_nbytes, down = fill(partitions, num_servers, lambda p: p.aggregator.down.nbytes(p.spec))
    contents = tuple(describe(own, names, world_size, nodes) if own else "" for own in owned)
    push_nbytes = tuple(
        header + nbytes if own else 0 for own, header, nbytes in zip(owned, up_header, up_nbytes, strict=True)
    )
    pull_nbytes = tuple(down_header + nbytes if own else 0 for own, nbytes in zip(owned, down_nbytes, strict=True))
    ranks = None if nodes is None else nodes.firsts
    return MessageLayout(
        partitions=tuple(partitions),
        world_size=world_size,
        rounds=(Push(push_nbytes, contents, world_size, ranks), Pull(pull_nbytes, contents, world_size, ranks)),
        names=names,
        header_nbytes=down_header,
        up=tuple(up_header[p.owner] + start for p, start in zip(partitions, up, strict=True)),
        down=tuple(down_header + start for start in down),
        details=tuple(map(tuple, owned)),
    )


def describe(partitions: Sequence[Partition], names: Sequence[str], world_size: int, nodes: Nodes | None = None) -> str:
    """Return a text from which a server knows all about its block of a message: JSON, equal on all workers."""
    return json.dumps(
        {
            "world_size": world_size,
            "nodes": None if nodes is None else nodes.sizes,
            "num_names": len(names),
            "partitions": [
                {
                    "name": p.name,
                    "place": names.index(p.name),
                    "key": p.key,
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "offset": p.offset,
                    "numel": p.numel,
                    "shape": p.shape,
                    "up": p.aggregator.up.recipe(),
                    "down": p.aggregator.down.recipe(),
                    "feedback": None if p.aggregator.feedback is None else p.aggregator.feedback.recipe(),
                }
                for p in partitions
            ],
        },
        separators=(",", ":"),
    )


def write_headers(
    message: Message, blocks: Sequence[Tensor], *, used: int, nonfinite: int, who: int, mixed: bool = False
) -> None:
    """Write the header of every server's block; see `PushHeader` for the bitmaps, and `MIXED`."""
    names, world_size = message.layout.names, message.layout.world_size
    owned: tuple[tuple[Partition, ...], ...] = message.layout.details  # type: ignore[assignment]
    rates = {block.partition.name: block.learning_rate for block in message.blocks}
    for own, out in zip(owned, blocks, strict=True):
        if own:
            header = PushHeader(
                step=message.step,
                flags=MIXED if mixed else 0,
                used=used,
                nonfinite=nonfinite,
                who=who,
                loss_scale=message.loss_scale,
                rates=tuple(rates[p.name] for p in own) if num_rates(own) else (),
            )
            nbytes = push_header_nbytes(len(names), len(header.rates), world_size)
            write_push_header(out[:nbytes], len(names), world_size, header)


def read_headers(message: Message, blocks: Sequence[Tensor]) -> None:
    """Note what the servers say of all workers' contributions, and of the means."""
    names = message.layout.names
    headers = [read_pull_header(data[: message.layout.header_nbytes], len(names)) for data in blocks]
    used = 0
    for header in headers:
        used |= header.used
        message.nonfinite |= {(MEAN, name) for name in names_in(header.mean_nonfinite, names)}
        whose = ranks_in(header.who)
        rank = whose[0] if len(whose) == 1 else MANY  # which of several was not finite in what has not travelled
        message.nonfinite |= {(rank, name) for name in names_in(header.nonfinite, names)}
    message.num_present = min(header.num_present for header in headers)  # one server may know of a loss before others
    message.unused = names_in(((1 << len(names)) - 1) & ~used, names)
    if any(header.flags & SCALES_DIFFER for header in headers):
        message.refuse()


def _settings(partition: Partition) -> PushPull:
    assert isinstance(partition.aggregator, PushPull)
    return partition.aggregator
