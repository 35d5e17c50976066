"""Dense inside a node, then through parameter servers: one leader a node pushes, pulls, and hands on what comes."""

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.header import bitmap, header_nbytes, read_header
from thinwire.aggregators.hierarchical import Hierarchical, sum_in_node
from thinwire.aggregators.message import Message, Section
from thinwire.aggregators.owners import places_of_all
from thinwire.aggregators.push_pull import PushPull, lay_out_for_servers, read_headers, write_headers
from thinwire.comm.nodes import Nodes
from thinwire.comm.rounds import Exchange, Pull, Push, SendRecv, Transfer
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback, Slot
from thinwire.wire import split


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePushPull(Aggregator):
    r"""`Hierarchical` with servers as owners: the same rule, with the first rank of a node as its representative.

    With ranks i, n in all, residuals e_i and the server's e':

        rank i:  sends D(g_i + e_i) to its node's leader;                               e_i <- g_i + e_i - decoded
        leader:  s = sum of its node's gradients, in rank order; pushes C_up(s + e_l);  e_l <- s + e_l - decoded
        server:  m = (1/n) sum over nodes of decode + e', in node order;                e' <- m - decoded
        leader:  pulls C_down(m), and hands the same bytes to its node, which decodes them

    D sends values as they are, or in 16 bits (`inner_dtype`). A node sends the encoded model once and receives it once,
    whatever the number of its ranks, and of nodes. Without `inner_dtype` the bits are those of `Hierarchical` for the
    same partitions; with it, if there, too, the first rank of each node represents it.

    Args:
        up: what leaders push; float16 must hold the *sum* over a node.
        down: what servers answer.
        feedback: None or `ErrorFeedback`, as in `Hierarchical`.
        inner_dtype: what gradients are rounded to inside a node, as in `Hierarchical`.
        node_sizes: ranks of each node, as in `Hierarchical`.
        num_servers: over which partitions are dealt, by estimated work.

    Raises:
        RecipeError: as `Hierarchical`.

    Example:
        >>> NodePushPull(up=BlockQuant(bits=8), down=BlockQuant(bits=8), num_servers=2).recipe()
        'hier/int8'

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021, whose nodes have one worker that talks to servers. Differs: servers divide, once; the
        bytes of the mean travel inside the node, too.
    """

    up: Compressor
    down: Compressor
    feedback: Feedback | None = None
    inner_dtype: torch.dtype | None = None
    node_sizes: int | tuple[int, ...] | None = None
    num_servers: int = 1

    def __post_init__(self) -> None:
        assert self.between is not None  # making it checks the settings

    @property
    def between(self) -> Hierarchical:
        """The same exchange without servers."""
        return _between(self)

    @property
    def inner(self) -> Compressor:
        """What ranks of one node send their leader."""
        return self.between.inner

    @property
    def slots(self) -> frozenset[Slot]:
        """What ranks keep; what an owner does is at the servers."""
        return frozenset(slot for slot in self.between.slots if not slot.owned)

    @property
    def kept_by_servers(self) -> frozenset[Slot]:
        """What servers keep."""
        return frozenset(slot for slot in self.between.slots if slot.owned)

    def recipe(self) -> str:
        """What `Hierarchical` calls it."""
        return self.between.recipe()

    def for_world(self, world_size: int) -> Self:
        """Fill in the size of every node."""
        return replace(self, node_sizes=self.between.for_world(world_size).node_sizes)

    def nodes(self, world_size: int) -> Nodes:
        """Return which ranks share a node."""
        return self.between.nodes(world_size)

    def together(self, dtype: torch.dtype) -> Hashable:
        """Partitions of one message take one way."""
        return self.node_sizes

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Inside nodes a header and gradients, to leaders; blocks of servers as in `PushPull`, which they hand on."""
        first = partitions[0].aggregator
        assert isinstance(first, NodePushPull)
        nodes = first.nodes(world_size)
        num_servers = max(p.aggregator.num_servers for p in partitions if isinstance(p.aggregator, NodePushPull))
        served = lay_out_for_servers(partitions, world_size, num_servers, nodes)
        push, pull = served.rounds
        assert isinstance(pull, Pull)
        leaders = [nodes.firsts[node] for node in nodes.of]
        led = [(leader, rank) for rank, leader in enumerate(leaders) if rank != leader]
        inside, means = _inside(partitions, len(served.names))[1], sum(pull.nbytes)
        gather = SendRecv(tuple((rank, leader, 0, inside) for leader, rank in led), world_size)
        spread = SendRecv(tuple((leader, rank, 0, means) for leader, rank in led), world_size)
        return replace(served, rounds=(gather, push, pull, spread))

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Sum at the leader, which alone meets the servers; then all of the node decode what they answered."""
        layout, rank, buffers = message.layout, message.rank, message.buffers
        gather, push, pull, spread = layout.rounds
        assert isinstance(gather, SendRecv)
        assert isinstance(push, Push)
        assert isinstance(pull, Pull)
        settings = layout.partitions[0].aggregator
        assert isinstance(settings, NodePushPull)
        nodes = settings.nodes(layout.world_size)
        node, header = nodes.of[rank], header_nbytes(len(layout.names))
        if not message.sections:
            message.sections = _sections(layout, push, pull, node)
        inside, up, down = message.sections
        nothing = torch.empty(0, dtype=torch.uint8)

        if rank != nodes.firsts[node]:
            send = buffers.take(gather.sent_nbytes(rank))
            bad = message.encode(inside, send)
            message.write_header(send[:header], bad, used=True)
            yield Transfer(gather, send, nothing)
            buffers.give(send)
            yield Transfer(push, nothing, nothing)
            yield Transfer(pull, nothing, nothing)
            means = buffers.take(sum(pull.nbytes))
            yield Transfer(spread, nothing, means)
        else:
            received, headers = buffers.take(gather.received_nbytes(rank)), buffers.take(header)
            with message.timed_encode():
                finite = message.all_finite(up.places)
            names = (partition.name for partition in layout.partitions)
            message.write_header(headers, {n for n, ok in zip(names, finite, strict=True) if not ok}, used=True)
            yield Transfer(gather, nothing, received)
            mates = nodes.sizes[node] - 1
            blocks = [headers, *split(received, [received.numel() // mates] * mates if mates else [])]
            send = buffers.take(sum(push.nbytes))
            _push(message, inside, up, blocks, split(send, push.nbytes), send)
            buffers.give(headers)
            buffers.give(received)
            yield Transfer(push, send, nothing)
            means = buffers.take(sum(pull.nbytes))
            yield Transfer(pull, nothing, means)
            buffers.give(send)  # not before: see `PushPull`
            yield Transfer(spread, means, nothing)
        read_headers(message, [block for block in split(means, pull.nbytes) if block.numel()])
        if not message.nonfinite:
            message.decode(down, means)
        buffers.give(means)
        message.finish()


ThroughServers = PushPull | NodePushPull  # the exchanges whose owners are servers


@functools.lru_cache(maxsize=1024)
def _between(settings: NodePushPull) -> Hierarchical:
    """Make it once: every exchange asks for it."""
    return Hierarchical(
        up=settings.up,
        down=settings.down,
        feedback=settings.feedback,
        inner_dtype=settings.inner_dtype,
        node_sizes=settings.node_sizes,
    )


def between_nodes_nbytes(layout: MessageLayout) -> list[int]:
    """Return, per node, the bytes of a message that leave its ranks for other nodes, or for servers."""
    aggregator = layout.partitions[0].aggregator
    assert isinstance(aggregator, Hierarchical | NodePushPull)
    nodes = aggregator.nodes(layout.world_size)
    sent = [0] * len(nodes.sizes)
    for between in layout.rounds[1:3]:
        for rank, nbytes in enumerate(between.sent_nbytes_by_rank()):
            sent[nodes.of[rank]] += nbytes
    return sent


def _push(
    message: Message, inside: Section, up: Section, blocks: Sequence[Tensor], pushed: Sequence[Tensor], send: Tensor
) -> None:
    """Encode the sum of the node's blocks, this leader's first, and write the headers of what is pushed."""
    names, rank = message.layout.names, message.rank
    headers = [read_header(block[: header_nbytes(len(names))], len(names)) for block in blocks]
    used = nonfinite = who = 0
    for mate, (reached, bad, _) in enumerate(headers):
        used, nonfinite, who = used | reached, nonfinite | bad, who | (bad > 0) << (rank + mate)
    mixed = len({scale for _, _, scale in headers}) > 1
    if nonfinite or mixed:
        message.hold(up)  # what is pushed besides its header is not read
    else:
        sum_in_node(message, inside, blocks, 0)
        nonfinite = bitmap(names, message.encode(up, send))
    write_headers(message, pushed, used=used, nonfinite=nonfinite, who=who, mixed=mixed)


def _inside(partitions: Sequence[Partition], num_names: int) -> tuple[list[int], int]:
    """Return where gradients begin in what a rank sends its leader, and the size of it."""
    sizes = (p.aggregator.inner.nbytes(p.spec) for p in partitions)
    *starts, end = itertools.accumulate(sizes, initial=header_nbytes(num_names))
    return starts, end


def _sections(layout: MessageLayout, push: Push, pull: Pull, node: int) -> tuple[Section, ...]:
    """Where blocks lie: inside the node; the node's sums, to the servers; their means."""
    every = range(len(layout.partitions))
    return (
        Section(every, _inside(layout.partitions, len(layout.names))[0], inside=True),
        # Drawn by the node, as in `Hierarchical`.
        Section(every, places_of_all(layout.partitions, push.nbytes, layout.up), stream=node),
        Section(every, places_of_all(layout.partitions, pull.nbytes, layout.down), down=True),
    )
