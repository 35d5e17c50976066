"""What a message costs the processors: core-seconds of kernels before, between and after its rounds, rank by rank."""

from collections.abc import Callable

import numpy as np

from thinwire.advisor.occupancy import Numbers
from thinwire.advisor.profile import KernelOperation, Kernels
from thinwire.advisor.traffic import by_place
from thinwire.aggregators import (
    Dense,
    Gather,
    Hierarchical,
    MessageLayout,
    NodePushPull,
    Partition,
    PowerSGD,
    PushPull,
    SumOnWire,
    ThroughServers,
    TreeReduce,
    TwoShot,
)
from thinwire.comm.rounds import Push, SendRecv
from thinwire.compressors import Compressor, Identity
from thinwire.errors import ProfileError


def work(layout: MessageLayout, kernels: Kernels) -> list[Numbers]:
    """Return one more than there are rounds: (world_size,) core-seconds before each round, and after the last.

    A two-shot exchange encodes all, decodes `world_size` contributions to what a rank owns and encodes their mean, and
    decodes all; a gathering one decodes `world_size` contributions to everything; a tree merges what arrives; with
    nodes, representatives, or leaders, add up their node; what servers do counts for a rank of their host. As
    `thinwire.codec` measures it. A statistic counts with its encode.

    Raises:
        ProfileError: the profile has no speed of a kind.
    """
    kind = type(layout.partitions[0].aggregator)
    cost = _Cost(layout, kernels)
    agreement = [cost.nothing] if layout.shared else []
    if kind is Dense:
        settings = layout.partitions[0].aggregator
        return [cost.all("encode", settings.up), cost.all("decode", settings.down)]
    if kind is PowerSGD:
        stages = len(layout.rounds) + 1
        return [cost.exchange() / stages] * stages  # products before, between and after take about the same
    if kind is TwoShot:
        owned = layout.world_size * cost.owned("accumulate", _up) + cost.owned("encode", _down)
        return [*agreement, cost.all_of("encode", _up), owned, cost.all_of("decode", _down)]
    if kind is PushPull:
        return [cost.all_of("encode", _up), cost.at_servers(), cost.all_of("decode", _down)]
    if kind is NodePushPull:
        return cost.led()
    if kind is Gather:
        return [*agreement, cost.all_of("encode", _up), layout.world_size * cost.all_of("accumulate", _up)]
    if kind is SumOnWire:
        return [*agreement, cost.all_of("encode", _up), cost.all_of("decode", _up)]
    if kind is TreeReduce:
        merged = [cost.merged(r) for r in layout.rounds if isinstance(r, SendRecv)]
        return [*agreement, cost.all_of("encode", _up), *merged, cost.all_of("decode", _up)]
    if kind is Hierarchical:
        return cost.in_nodes()
    raise ProfileError(f"the simulator knows no exchange of kind {kind.__name__}")


def _up(partition: Partition) -> Compressor:
    return partition.aggregator.up


def _down(partition: Partition) -> Compressor:
    return partition.aggregator.down


class _Cost:
    """Core-seconds over the ranks of one message."""

    def __init__(self, layout: MessageLayout, kernels: Kernels) -> None:
        self._layout, self._kernels = layout, kernels
        self._owners = np.array([p.owner for p in layout.partitions])
        self.nothing = np.zeros(layout.world_size)

    def all(self, operation: KernelOperation, compressor: Compressor) -> Numbers:
        """Of one compressor over all partitions, on every rank."""
        return self.nothing + sum(self._seconds(p, operation, compressor) for p in self._layout.partitions)

    def all_of(self, operation: KernelOperation, choose: Callable[[Partition], Compressor]) -> Numbers:
        """Of every partition's own compressor, on every rank."""
        return self.nothing + self._each(operation, choose).sum()

    def owned(self, operation: KernelOperation, choose: Callable[[Partition], Compressor]) -> Numbers:
        """Of every partition's own compressor, on its owner."""
        return by_place(self._owners, self._each(operation, choose), self._layout.world_size)

    def at_servers(self) -> Numbers:
        """Of servers, which do for their partitions what owners do, by the rank that shares their processor."""
        layout = self._layout
        push = next(one for one in layout.rounds if isinstance(one, Push))
        num = layout.world_size if push.ranks is None else len(push.ranks)
        seconds = num * self._each("accumulate", _up) + self._each("encode", _down)
        first = layout.partitions[0].aggregator
        assert isinstance(first, ThroughServers)
        return by_place(self._owners * layout.world_size // first.num_servers, seconds, layout.world_size)

    def merged(self, moves: SendRecv) -> Numbers:
        """Of what arrives in one step of a tree, by the share of all bytes."""
        arriving = np.zeros(self._layout.world_size)
        for _, target, start, stop in moves.moves:
            arriving[target] += stop - start
        total = sum(p.aggregator.up.nbytes(p.spec) for p in self._layout.partitions)
        return arriving / max(total, 1) * self._each("accumulate", _up).sum()

    def exchange(self) -> Numbers:
        """Of all that a kind without a compressor does."""
        return self.nothing + sum(self._exchange(p) for p in self._layout.partitions)

    def in_nodes(self) -> list[Numbers]:
        """Inside a node, between nodes, back to them, and inside again."""
        layout = self._layout
        settings = layout.partitions[0].aggregator
        assert isinstance(settings, Hierarchical)
        nodes = settings.nodes(layout.world_size)
        inside, decode_inside = (self._each(op, lambda p: p.aggregator.inner) for op in ("encode", "decode"))
        up, accumulate = self._each("encode", _up), self._each("accumulate", _up)
        sizes, firsts, places = np.array(nodes.sizes), np.array(nodes.firsts), nodes.places[self._owners]
        # (num_partitions, num_nodes): who stands for each node; in the owner's the owner itself.
        chosen = firsts + places[:, None] % sizes
        own = by_place(chosen.ravel(), np.repeat(inside, len(sizes)), layout.world_size)
        away = inside.sum() - own
        summed = (sizes - 1) * decode_inside[:, None] + up[:, None]
        stands = by_place(chosen.ravel(), summed.ravel(), layout.world_size)
        owned = by_place(self._owners, len(nodes.sizes) * accumulate + self._each("encode", _down), layout.world_size)
        return [away, stands, owned, self.nothing, self.all_of("decode", _down)]

    def led(self) -> list[Numbers]:
        """Inside a node, at its leader, at servers, back to the leader, and inside again."""
        settings = self._layout.partitions[0].aggregator
        assert isinstance(settings, NodePushPull)
        nodes = settings.nodes(self._layout.world_size)
        leads = nodes.places == 0
        inside, decode_inside = (self._each(op, lambda p: p.aggregator.inner).sum() for op in ("encode", "decode"))
        at_leader = (nodes.mates - 1) * decode_inside + self.all_of("encode", _up)
        return [inside * ~leads, at_leader * leads, self.at_servers(), self.nothing, self.all_of("decode", _down)]

    def _each(self, operation: KernelOperation, choose: Callable[[Partition], Compressor]) -> Numbers:
        return np.array([self._seconds(p, operation, choose(p)) for p in self._layout.partitions])

    def _seconds(self, partition: Partition, operation: KernelOperation, compressor: Compressor) -> float:
        if isinstance(compressor, Identity) and isinstance(partition.aggregator, Dense):
            return 0.0
        if operation == "encode" and partition.aggregator.feedback is not None:
            operation = "encode_feedback"
        return self._speed(compressor.recipe(), operation, partition)

    def _exchange(self, partition: Partition) -> float:
        settings = partition.aggregator
        assert isinstance(settings, PowerSGD)
        if settings.rank is None:
            return self._speed(Identity().recipe(), "encode", partition)
        return self._speed(settings.recipe(), "exchange", partition)

    def _speed(self, recipe: str, operation: KernelOperation, partition: Partition) -> float:
        speed = self._kernels.speed(recipe, operation)
        if speed is None:
            raise ProfileError(
                f"kernels: expected how fast {recipe!r} does {operation!r} with one thread, got nothing; measure it "
                "with thinwire probe"
            )
        return speed.s_per_nbyte * 4 * partition.numel + speed.partition_s
