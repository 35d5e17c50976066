"""Dense inside a node, compressed between nodes, then back inside the node: for machines with several ranks each."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
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
from thinwire.aggregators.division import divide_
from thinwire.aggregators.header import header_nbytes, read_header
from thinwire.aggregators.message import MEAN, Message, Section
from thinwire.comm.node_round import NodeRound
from thinwire.comm.nodes import Nodes, sizes_for
from thinwire.comm.rounds import Exchange, Transfer
from thinwire.compressors import Cast, Compressor, Identity, is_exact
from thinwire.errors import RecipeError
from thinwire.feedback import ErrorFeedback, Feedback, Slot
from thinwire.wire import split

_DTYPES = {None: "", torch.float16: ":fp16", torch.bfloat16: ":bf16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchical(Aggregator):
    r"""`TwoShot` between nodes, with plain sums inside them; only compressed bytes cross the slow network.

    For every partition one rank of each node *represents* it; the owner represents its own. With ranks i, n in all,
    residuals e_i and the owner's e':

        rank i:          sends D(g_i + e_i) to the representative in its node;   e_i <- g_i + e_i - decoded
        representative:  s = sum of its node's gradients, in rank order; sends C_up(s + e_r) to the owner;
                         e_r <- s + e_r - decoded
        owner:           m = (1/n) sum over nodes of decode + e', in node order; sends C_down(m) to the representatives,
                         which hand the same bytes to their nodes;  e' <- m - decoded
        all:             the mean is decode(C_down(m)), so replicas stay bit-identical.

    D sends values as they are, or in 16 bits (`inner_dtype`). Nodes send sums and the owner divides by n, once: so the
    mean is that over all ranks, whatever the sizes of nodes, and what is owed is the mean over ranks of e_i, plus e',
    as for `TwoShot`. Without `inner_dtype` e_i stays 0 where rank i does not represent.

    Bytes that leave a node of k ranks: (n-k)/n of the encoded model up, and k/n of it down to each other node; of
    `TwoShot` k times as many, where nodes are equal. Four rounds.

    Args:
        up: what nodes send; float16 must hold the *sum* over a node.
        down: what owners send back.
        feedback: None or `ErrorFeedback`, required as for `TwoShot`. Momentum and the estimates of EF21 belong to one
            rank's gradients, which are not what is compressed here.
        inner_dtype: what gradients are rounded to inside a node: None (the parameter's own dtype), torch.float16 or
            torch.bfloat16. What a representative adds of its own is not rounded, so that with 16 bits the last bits
            depend on who represents; with feedback what is rounded away is kept.
        node_sizes: ranks of each node, in rank order; or one number for all, of which the last node may have fewer;
            or None, to be filled in by `attach(..., nodes=...)`.

    Raises:
        RecipeError: what `TwoShot` refuses; other feedback; a kind whose scale all ranks agree on; another dtype; or
            nodes that do not add up to the world size.

    Example:
        >>> Hierarchical(up=BlockQuant(bits=8), down=BlockQuant(bits=8), inner_dtype=torch.float16).recipe()
        'hier:fp16/int8'

    References:
        Guanhua Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, for
        sums inside nodes before the slow hop. Differs: full precision inside, residuals, the same bytes to everyone.
    """

    up: Compressor
    down: Compressor
    feedback: Feedback | None = None
    inner_dtype: torch.dtype | None = None
    node_sizes: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for compressor in (self.up, self.down):
            check_no_vote(compressor, "Hierarchical")
            check_own_scale(compressor, "a node's representative, which encodes alone")
            check_feedback(compressor, self.feedback)
        check_one_mask(self.up, self.down)
        if not (self.feedback is None or isinstance(self.feedback, ErrorFeedback)):
            raise RecipeError(
                f"Hierarchical: expected no feedback or ErrorFeedback, got {self.feedback}: a rank's own gradients, to "
                "which momentum and estimates belong, are summed over its node before they are compressed"
            )
        if self.inner_dtype not in _DTYPES:
            raise RecipeError(
                f"Hierarchical: expected inner_dtype None, torch.float16 or torch.bfloat16, got {self.inner_dtype}"
            )

    @property
    def inner(self) -> Compressor:
        """What ranks of one node send each other."""
        return Identity() if self.inner_dtype is None else Cast(dtype=self.inner_dtype)

    @property
    def slots(self) -> frozenset[Slot]:
        """A residual for whoever rounds: ranks for their node, representatives, owners."""
        if self.feedback is None:
            return frozenset()
        inner, up, down = (is_exact(typical_contract(c)) for c in (self.inner, self.up, self.down))
        return self.feedback.slots(exact_up=inner and up, exact_down=down, owners=True)

    def recipe(self) -> str:
        """`hier/` and what a two-shot exchange would be called."""
        names = self.up.recipe() if self.up == self.down else f"{self.up.recipe()}+{self.down.recipe()}"
        return f"hier{_DTYPES[self.inner_dtype]}/{names}{feedback_suffix(self.feedback, self.up, self.down)}"

    def for_world(self, world_size: int) -> Self:
        """Fill in the size of every node."""
        return replace(self, node_sizes=self.nodes(world_size).sizes)

    def nodes(self, world_size: int) -> Nodes:
        """Return which ranks share a node."""
        if self.node_sizes is None:
            raise RecipeError(
                f"{self.recipe()}: expected to be told which ranks share a node; pass attach(..., nodes='auto'), "
                "nodes=8 for eight ranks a node, or the size of each node"
            )
        sizes = sizes_for(self.node_sizes, world_size)
        if sizes is None:
            raise RecipeError(
                f"{self.recipe()}: expected positive node sizes that add up to the {world_size} ranks, got "
                f"{self.node_sizes}"
            )
        return Nodes.sized(sizes)

    def together(self, dtype: torch.dtype) -> Hashable:
        """Partitions of one message take one way."""
        return self.node_sizes

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Blocks for representatives, owners, representatives again, and the ranks of a node. Each has a header."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        way = _Way.of(partitions, header_nbytes(len(names)), world_size)
        nodes = way.nodes
        inner, up, down = (tuple(sizes) for sizes in (way.inner_nbytes, way.up_nbytes, way.down_nbytes))
        own = np.array(down)
        held = tuple((own + nodes.over_represented(own)).tolist())
        headers = tuple((way.header * (nodes.mates + 1)).tolist())  # as in `up_block`
        rounds = (
            NodeRound(nodes, "mates", (0,) * world_size, inner),
            NodeRound(nodes, "represented", headers, up, own_first=True),
            NodeRound(nodes, "representatives", down),
            NodeRound(nodes, "mates", held),
        )
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=rounds,
            names=names,
            header_nbytes=header_nbytes(len(names)),
            up=way.up,
            down=way.down,
            details=way,
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Sum inside the node, mean between representatives, hand the owners' bytes on."""
        layout, rank, world_size = message.layout, message.rank, message.layout.world_size
        gather, push, pull, spread = layout.rounds
        assert isinstance(gather, NodeRound)
        assert isinstance(push, NodeRound)
        assert isinstance(spread, NodeRound)
        way = layout.details
        assert isinstance(way, _Way)
        if not message.sections:
            message.sections = _sections(way, layout.partitions, rank)
        inside, arriving, represented, own_up, own_down, held_down, other_down = message.sections
        buffers, header, nodes = message.buffers, layout.header_nbytes, way.nodes
        node, own = nodes.of[rank], nodes.represented(rank)
        mates = nodes.ranks(node)

        # Inside the node: gradients to representatives. Every rank hears every other, if only its header.
        sizes = [way.inner_nbytes[r] for r in mates if r != rank]
        send, received = buffers.take(sum(sizes)), buffers.take(gather.received_nbytes(rank))
        bad = message.encode(inside, send)
        with message.timed_encode():
            finite = message.all_finite(represented.places)
        bad |= {layout.partitions[p].name for p, ok in zip(represented.places, finite, strict=True) if not ok}
        headers = buffers.take(header)
        message.write_header(headers, bad, used=True)
        for block in split(send, sizes):
            block[:header] = headers
        yield Transfer(gather, send, received)
        buffers.give(send)
        blocks = _with_own(split(received, [way.inner_nbytes[rank]] * (len(mates) - 1)), rank - mates[0], headers)
        all_headers = torch.cat([block[:header] for block in blocks])  # of the node, which go on to all owners
        buffers.give(headers)

        # Between nodes: the sum of the node, compressed, to the owners.
        sizes = [way.up_block(node, owner) for owner in own]
        send = buffers.take(sum(sizes))
        received_up = buffers.take(push.received_nbytes(rank))
        bad = set[str]()
        if any(read_header(one, len(layout.names))[1] for one in split(all_headers, [header] * len(mates))):
            message.hold(represented)
        else:
            sum_in_node(message, arriving, blocks, rank - mates[0])
            bad = message.encode(represented, send)
        buffers.give(received)
        for block in split(send, sizes):
            block[: all_headers.numel()] = all_headers
            message.write_header(block[all_headers.numel() :][:header], bad, used=False)
        yield Transfer(push, send, received_up)

        # Mean, in the order of nodes, into the values of the partitions owned here: they have been sent.
        others = [j for j in range(len(nodes.sizes)) if j != node]
        sums = split(received_up, [way.up_block(j, rank) for j in others])
        sums.insert(node, send[: sizes[0]])
        counts = [size + 1 for size in nodes.sizes]  # headers: of a node's ranks, and of its sum
        parts = [split(block[: header * n], [header] * n) for block, n in zip(sums, counts, strict=True)]
        message.read_headers([one for part in parts for one in part[:-1]])
        message.read_mean_headers([part[-1] for part in parts])
        held = buffers.take(sum(way.down_nbytes[owner] for owner in own))
        mine = held[: way.down_nbytes[rank]]
        bad = {name for who, name in message.nonfinite if who == MEAN}  # a node's sum: other owners may not know
        if not message.nonfinite:
            for j, block in enumerate(sums):
                message.decode(own_up, block[header * counts[j] :], accumulate=j > 0)
            for place in own_up.places:
                divide_(message.blocks[place].value, world_size)
            bad = message.encode(own_down, mine)
        else:
            message.hold(own_down)
        message.write_header(mine[:header], bad, used=False)
        buffers.give(send)
        buffers.give(received_up)
        yield Transfer(pull, mine, held[mine.numel() :])

        # Inside the node again: the owners' bytes as they are. Everyone, the owner included, decodes the same.
        handed = buffers.take(spread.received_nbytes(rank))
        yield Transfer(spread, held, handed)
        message.read_mean_headers(split(held, [way.down_nbytes[owner] for owner in own]))
        rest = [owner for mate in mates if mate != rank for owner in nodes.represented(mate)]
        message.read_mean_headers(split(handed, [way.down_nbytes[owner] for owner in rest]))
        if not message.nonfinite:
            message.decode(held_down, held)
            message.decode(other_down, handed)
        buffers.give(held)
        buffers.give(handed)
        message.finish()


def _with_own(blocks: list[Tensor], place: int, own: Tensor) -> list[Tensor]:
    return [*blocks[:place], own, *blocks[place:]]


def sum_in_node(message: Message, arriving: Section, blocks: Sequence[Tensor], place: int) -> None:
    """Add up a node's gradients in rank order; this rank's own, the `place`-th, lie in the values."""
    values = [message.blocks[i].value for i in arriving.places]
    own = [value.clone() for value in values] if place else []
    for i, data in enumerate(blocks):
        if i != place:
            message.decode(arriving, data, accumulate=i > 0)
        elif own:
            with message.timed_decode():
                for value, addend in zip(values, own, strict=True):
                    value.add_(addend)


@dataclass(frozen=True, slots=True)
class _Way:
    """Sizes of blocks and places in them, of one message.

    Attributes:
        nodes: who shares a node.
        header: bytes of a header.
        inner_nbytes: per rank, of the block that every other rank of its node sends it: a header, then gradients.
        inner: per node and partition, first byte in that block.
        up_nbytes: per owner, of its partitions, encoded.
        up: per partition, first byte among them.
        down_nbytes: per owner, of the block it sends back: a header, then its partitions.
        down: per partition, first byte in that block.
    """

    nodes: Nodes
    header: int
    inner_nbytes: list[int]
    inner: list[list[int]]
    up_nbytes: list[int]
    up: tuple[int, ...]
    down_nbytes: list[int]
    down: tuple[int, ...]

    @staticmethod
    def of(partitions: Sequence[Partition], header: int, world_size: int) -> "_Way":
        """Fill blocks in the order of partitions."""
        first = partitions[0].aggregator
        assert isinstance(first, Hierarchical)
        nodes = first.nodes(world_size)
        inner_nbytes, up_nbytes, down_nbytes = [header] * world_size, [0] * world_size, [header] * world_size
        inner: list[list[int]] = [[] for _ in nodes.sizes]
        up: list[int] = []
        down: list[int] = []
        for p in partitions:
            nbytes = p.aggregator.inner.nbytes(p.spec)
            for node, starts in enumerate(inner):
                rank = nodes.representative(p.owner, node)
                starts.append(inner_nbytes[rank])
                inner_nbytes[rank] += nbytes
            up.append(up_nbytes[p.owner])
            down.append(down_nbytes[p.owner])
            up_nbytes[p.owner] += p.aggregator.up.nbytes(p.spec)
            down_nbytes[p.owner] += p.aggregator.down.nbytes(p.spec)
        return _Way(nodes, header, inner_nbytes, inner, up_nbytes, tuple(up), down_nbytes, tuple(down))

    def up_block(self, node: int, owner: int) -> int:
        """Bytes of what a node sends to an owner: headers of its ranks, one of its sum, and the owner's partitions."""
        return self.header * (self.nodes.sizes[node] + 1) + self.up_nbytes[owner]


def _sections(way: _Way, partitions: Sequence[Partition], rank: int) -> tuple[Section, ...]:
    """Where blocks lie: sent inside the node and arriving; the node's sums, sent; arriving at the owner; the owner's
    means; those among what is held for the node, and those handed over by its other ranks.
    """
    nodes = way.nodes
    node = nodes.of[rank]
    owners = [p.owner for p in partitions]
    every = range(len(owners))
    stands = [nodes.representative(owner, node) for owner in owners]
    mates = [r for r in nodes.ranks(node) if r != rank]
    to_mate = _starts({r: way.inner_nbytes[r] for r in mates})
    own = nodes.represented(rank)
    to_owner, held = _starts({o: way.up_block(node, o) for o in own}), _starts({o: way.down_nbytes[o] for o in own})
    rest = [owner for mate in mates for owner in nodes.represented(mate)]
    handed = _starts({o: way.down_nbytes[o] for o in rest})
    away, here = [i for i in every if stands[i] != rank], [i for i in every if stands[i] == rank]
    mine = [i for i in every if owners[i] == rank]
    headers = way.header * (nodes.sizes[node] + 1)
    return (
        Section(away, [to_mate[stands[i]] + way.inner[node][i] for i in away], inside=True),
        Section(here, [way.inner[node][i] for i in here], inside=True),
        # Drawn by the node, so that who represents does not show.
        Section(here, [to_owner[owners[i]] + headers + way.up[i] for i in here], stream=node),
        Section(mine, [way.up[i] for i in mine]),
        Section(mine, [way.down[i] for i in mine], down=True),
        Section(here, [held[owners[i]] + way.down[i] for i in here], down=True),
        Section(away, [handed[owners[i]] + way.down[i] for i in away], down=True),
    )


def _starts(sizes: dict[int, int]) -> dict[int, int]:
    """Return where blocks of these sizes begin, one after another."""
    return dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
