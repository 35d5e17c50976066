"""A plan for sharded models: partitions lie inside one rank's chunk of one parameter, and that rank owns them."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.aggregators import MessageLayout
from thinwire.comm.process_group import DEPTH
from thinwire.phases import Phases
from thinwire.plan import Plan


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Every partition of every gradient, and of weights if these are compressed, with compressor, owner and bytes.

    `print(plan)` shows a table; `digest` is equal on two ranks iff they would send the same bytes in the same order.

    Attributes:
        gradients: the partitions.
        groups: names of the parameters that FSDP2 reduces together, for the groups in which anything is compressed.
        weights: the partitions of the weights; None where FSDP2 gathers them itself.
        weight_groups: names of the parameters that FSDP2 gathers together, likewise.
        replicas: the partitions of this rank's shards, as they are exchanged between replicas; None where there are
            none. It differs between the ranks of one replica, and `digest` does not cover it.
    """

    gradients: Plan
    groups: tuple[tuple[str, ...], ...]
    weights: Plan | None = None
    weight_groups: tuple[tuple[str, ...], ...] = ()
    replicas: Plan | None = None

    def layouts(self, names: Sequence[str]) -> list[MessageLayout]:
        """Return the messages of one group's gradients."""
        return self.gradients.messages(names)

    def weight_layouts(self, names: Sequence[str]) -> list[MessageLayout]:
        """Return the messages of one group's weights."""
        assert self.weights is not None
        return self.weights.messages(names)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of all gradients, uncompressed."""
        return self.gradients.raw_nbytes

    def sent_nbytes(self, rank: int) -> int:
        """Return the payload bytes that `rank` sends in one reduction of all groups that are compressed."""
        return sum(r.sent_nbytes(rank) for names in self.groups for m in self.layouts(names) for r in m.rounds)

    @property
    def compression_ratio(self) -> float:
        """Bytes that FSDP2's reduce-scatters of these groups would send over those of the busiest rank."""
        world_size, by_name = self.gradients.world_size, self.gradients.by_name
        raw = sum(by_name[name].info.nbytes for names in self.groups for name in names)
        busiest = max(self.sent_nbytes(rank) for rank in range(world_size))
        return (world_size - 1) / world_size * raw / busiest if busiest else 1.0

    def sent_weight_nbytes(self, rank: int) -> int:
        """Return the payload bytes that `rank` sends when all groups of compressed weights are gathered once."""
        return sum(r.sent_nbytes(rank) for ns in self.weight_groups for m in self.weight_layouts(ns) for r in m.rounds)

    @property
    def weight_compression_ratio(self) -> float:
        """Bytes that FSDP2's all-gathers of these groups would send over those of the busiest rank."""
        if self.weights is None:
            return 1.0
        world_size, by_name = self.weights.world_size, self.weights.by_name
        raw = sum(by_name[name].info.nbytes for names in self.weight_groups for name in names)
        busiest = max(self.sent_weight_nbytes(rank) for rank in range(world_size))
        return (world_size - 1) / world_size * raw / busiest if busiest else 1.0

    @property
    def residual_nbytes(self) -> int:
        """Memory of the residuals on every rank: float32, of whole gradients, whatever the number of ranks."""
        return self.gradients.residual_nbytes(0)

    def work_nbytes(self, rank: int) -> int:
        """Return about the most work memory that exchanges take on `rank`, but for those between replicas.

        The largest group's gradients or weights, whole and in float32; buffers of as many messages as are under way at
        once, each as large as the largest of its group; and copies by which the group's residuals can be put back.
        With a GradScaler such copies are held of all groups, which this does not count.
        """
        flat, messages = 0, 0
        for plan, groups in ((self.gradients, self.groups), (self.weights, self.weight_groups)):
            for names in groups:
                assert plan is not None
                shapes = [plan.by_name[name].info.shape for name in names]
                rows = sum(-(-shape[0] // plan.world_size) * math.prod(shape[1:]) for shape in shapes)
                flat = max(flat, 4 * plan.world_size * rows)
                sizes = [plan.message_nbytes(layout, rank) for layout in plan.messages(names)]
                under_way = min(DEPTH, len(sizes)) * max(buffers for buffers, _ in sizes)
                messages = max(messages, under_way + sum(copies for _, copies in sizes))
        return flat + messages

    def lines(self) -> list[str]:
        """Return all that must agree between ranks, one fact a line."""
        weights = [] if self.weights is None else [f"weights: {line}" for line in self.weights.lines()]
        return [
            *self.gradients.lines(),
            *(f"group {', '.join(names)}" for names in self.groups),
            *weights,
            *(f"weights: group {', '.join(names)}" for names in self.weight_groups),
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of `lines`."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def __str__(self) -> str:
        table = str(self.gradients).rsplit("\n", 1)[0]
        busiest = max(self.sent_nbytes(rank) for rank in range(self.gradients.world_size))
        between = "" if self.replicas is None else f"\n\nbetween replicas, of this rank's shards\n{self.replicas}"
        gradients = (
            f"{table}\n{self.gradients.world_size} ranks; {self.raw_nbytes:,} bytes of gradient, {busiest:,} sent per "
            f"step by the busiest rank in {len(self.groups)} compressed groups: {self.compression_ratio:.1f}x less "
            f"than their reduce-scatters; residuals take {self.residual_nbytes:,} bytes a rank, "
            f"twice that during a step with a GradScaler; work memory up to about {self.work_nbytes(0):,}, for "
            f"{DEPTH} messages under way"
        )
        if self.weights is None:
            return gradients + between
        table = str(self.weights).rsplit("\n", 1)[0]
        busiest = max(self.sent_weight_nbytes(rank) for rank in range(self.weights.world_size))
        return (
            f"{gradients}\n\nweights\n{table}\n{self.weights.raw_nbytes:,} bytes of weights, {busiest:,} sent by the "
            f"busiest rank each time {len(self.weight_groups)} compressed groups are gathered: "
            f"{self.weight_compression_ratio:.1f}x less than their all-gathers{between}"
        )


@dataclass(frozen=True, slots=True)
class ShardPhases:
    """Plans by the step from which they are valid, in ascending order and from step 0 on.

    Attributes:
        plans: (first step, plan); weights are the same in all.
        kept: the last one's gradients, with all that must be kept of every parameter in any phase.
    """

    plans: tuple[tuple[int, ShardPlan], ...]
    kept: Plan

    def at(self, step: int) -> ShardPlan:
        """Return the plan that is valid at a step."""
        return [plan for start, plan in self.plans if start <= step][-1]

    @property
    def final(self) -> ShardPlan:
        """The plan of the last phase."""
        return self.plans[-1][1]

    def with_replicas(self, between: Phases) -> "ShardPhases":
        """Return these with the plans of the exchange between replicas; a phase begins where one of either does."""
        starts = sorted({start for start, _ in (*self.plans, *between.plans)})
        plans = ((start, replace(self.at(start), replicas=between.at(start))) for start in starts)
        return ShardPhases(tuple(plans), self.kept)

    @property
    def reduced(self) -> frozenset[tuple[str, ...]]:
        """Names of the parameters of every group that is compressed in some phase."""
        return frozenset(names for _, plan in self.plans for names in plan.groups)

    def lines(self) -> list[str]:
        """Return all that must agree between ranks, one fact a line."""
        lines = list[str]()
        for start, plan in self.plans:
            lines += [*([f"from step {start}"] if start else []), *plan.lines()]
        return lines

    @property
    def digest(self) -> str:
        """SHA-256 of `lines`."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def __str__(self) -> str:
        if len(self.plans) == 1:
            return str(self.final)
        return "\n\n".join(f"from step {start} on:\n{plan}" for start, plan in self.plans)
