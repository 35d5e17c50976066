"""A plan for sharded models: partitions lie inside one rank's chunk of one parameter, and that rank owns them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.aggregators import Dense, MessageLayout, Partition, ReduceScatter, ShardAllGather, TwoShot
from thinwire.compressors import Cast, Compressor, Identity
from thinwire.errors import PlanError, RecipeError
from thinwire.feedback import ErrorFeedback
from thinwire.integrations.fsdp_groups import ShardedParam, ShardGroup
from thinwire.plan import Plan, PlannedParam, build_plan
from thinwire.policy import Patterns, PlanOptions, Policy
from thinwire.random import parameter_key
from thinwire.recipes import parse_compressor
from thinwire.schedule import Phase
from thinwire.spec import COMPRESSIBLE_DTYPES

Recipe = str | TwoShot | Dense | dict[str, str] | Patterns | Policy


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
            f"than their reduce-scatters; residuals take {self.residual_nbytes:,} bytes a rank"
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


def build_shard_plan(
    groups: Sequence[ShardGroup],
    recipe: Recipe,
    world_size: int,
    options: PlanOptions | None,
    *,
    weights: str | Compressor | None = None,
    gathered: Sequence[ShardGroup] = (),
    every_group: bool = False,
) -> ShardPlan:
    """Resolve a recipe against a sharded model; with `every_group` no gradients are left to FSDP2.

    Raises:
        RecipeError: a kind or feedback that has no one-way form.
        PlanError: as `build_plan`; or two roundings to 16 bits one after the other.
    """
    if isinstance(recipe, str) and " then " in recipe:
        raise RecipeError(f"recipe {recipe!r}: schedules are not supported with FSDP2; expected one recipe")
    whole = build_plan(_named(groups), recipe, world_size, options, all_reduce=False)
    by_name = {param.name: param for group in groups for param in group.params}
    params = tuple(_sharded(param, by_name[param.info.name], whole) for param in whole.params)
    plan = Plan(params, world_size, whole.options)
    compressed = _compressed(groups, plan)
    if every_group:
        compressed = tuple(tuple(param.name for param in group.params) for group in groups)
    if weights is None:
        return ShardPlan(plan, compressed)
    weight_plan = _plan_weights(gathered, weights, world_size, options)
    draws = any(param.aggregator.down.stochastic for param in weight_plan.params)
    if draws and not compressed:
        raise RecipeError(
            f"weights={weights!r} draws random numbers by the step, which only reductions through thinwire count, and "
            "no gradient is compressed; expected a kind that rounds to nearest, as 'int8', or another recipe"
        )
    return ShardPlan(plan, compressed, weight_plan, _compressed(gathered, weight_plan))


def build_replica_plan(
    groups: Sequence[ShardGroup],
    recipe: Phase,
    rank: int,
    world_size: int,
    num_replicas: int,
    options: PlanOptions | None,
) -> Plan:
    """Resolve a recipe against the shards that one rank keeps, which are exchanged with the same rank of each replica.

    Raises:
        RecipeError: a schedule, or another feedback than `ErrorFeedback`.
        PlanError: as `build_plan`, or gradients that no compressor takes.
    """
    if isinstance(recipe, str) and " then " in recipe:
        raise RecipeError(f"recipe {recipe!r}: schedules are not supported with FSDP2; expected one recipe")
    params = [param for group in groups for param in group.params]
    for group in groups:
        if group.dtype not in COMPRESSIBLE_DTYPES:
            raise PlanError(f"{group.params[0].name}: {group.dtype} gradients cannot be exchanged between replicas")
    # What was summed for a shard is float32, whatever came.
    named = [(param.name, torch.empty(param.shard_shape(rank, world_size), device="meta")) for param in params]
    first = {param.name: param.chunk(rank, world_size)[0] for param in params}
    plan = build_plan(named, recipe, num_replicas, options, all_reduce=False)

    def keyed(planned: PlannedParam) -> PlannedParam:
        name, feedback = planned.info.name, planned.aggregator.feedback
        if feedback is not None and (not isinstance(feedback, ErrorFeedback) or feedback.lr_correction):
            raise RecipeError(f"{name}: expected ErrorFeedback or none with FSDP2, got {feedback.recipe()!r}")
        # Neither what the way to the shard draws, nor what other shards of the parameter do.
        key = parameter_key(plan.options.seed, f"{name}[{first[name]}:]")
        return replace(planned, partitions=tuple(replace(p, key=key) for p in planned.partitions))

    return Plan(tuple(map(keyed, plan.params)), num_replicas, plan.options)


def _named(groups: Sequence[ShardGroup]) -> list[tuple[str, torch.Tensor]]:
    return [(p.name, torch.empty(p.shape, dtype=g.dtype, device="meta")) for g in groups for p in g.params]


def _compressed(groups: Sequence[ShardGroup], plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the names of the groups in which anything is compressed. FSDP2 goes on to serve the others itself."""
    names = (tuple(param.name for param in group.params) for group in groups)
    return tuple(ns for ns in names if any(not plan.by_name[name].reason for name in ns))


def _plan_weights(
    groups: Sequence[ShardGroup], weights: str | Compressor, world_size: int, options: PlanOptions | None
) -> Plan:
    """Resolve one kind for all weights, but for those that stay exact by the rules of `PlanOptions`."""
    try:
        compressor = parse_compressor(weights) if isinstance(weights, str) else weights
        settings = ShardAllGather(down=compressor)
    except RecipeError as error:
        raise RecipeError(f"weights={weights!r}: {error}") from None
    whole = build_plan(_named(groups), settings, world_size, options, all_reduce=False)
    by_name = {param.name: param for group in groups for param in group.params}
    params: list[PlannedParam] = []
    for planned in whole.params:
        if not isinstance(planned.aggregator, Dense):  # of a dtype that no compressor takes: so is its whole group
            _check_cast(planned, compressor, f"weights={weights!r}", "weights", "param_dtype")
            aggregator = ShardAllGather(down=Identity() if planned.reason else compressor)
            partitions = _cut(by_name[planned.info.name], planned, aggregator, whole)
            planned = replace(planned, aggregator=aggregator, partitions=partitions)
        params.append(planned)
    return Plan(tuple(params), world_size, whole.options)


def _check_cast(planned: PlannedParam, compressor: Compressor, recipe: str, what: str, policy: str) -> None:
    info = planned.info
    if isinstance(compressor, Cast) and info.dtype.itemsize == 2 and compressor.dtype != info.dtype:
        raise PlanError(
            f"{info.name}: {what} are {info.dtype} already (MixedPrecisionPolicy) and {recipe} would round them a "
            f"second time; expected another recipe, or {policy}=torch.float32"
        )


def _sharded(planned: PlannedParam, param: ShardedParam, plan: Plan) -> PlannedParam:
    settings, info = planned.aggregator, planned.info
    if isinstance(settings, Dense):  # of a dtype that no compressor takes: so is its whole group
        return planned
    if not isinstance(settings, TwoShot):
        raise RecipeError(
            f"{info.name}: {settings.recipe()!r} has no reduce-scatter, in which every rank sums what it keeps; "
            "expected a two-shot kind, as 'int8', 'int4', 'topk:0.01' or 'onebit'"
        )
    if settings.down != settings.up:
        raise RecipeError(
            f"{info.name}: {settings.recipe()!r}: shards stay where they are summed and nothing is sent back; expected "
            f"{settings.up.recipe()!r}"
        )
    feedback = settings.feedback
    if settings.up.unit != "slice":
        raise RecipeError(f"{info.name}: {settings.recipe()!r} must see whole matrices, and FSDP2 cuts them by rows")
    if feedback is not None and (not isinstance(feedback, ErrorFeedback) or feedback.lr_correction):
        raise RecipeError(f"{info.name}: expected ErrorFeedback or none with FSDP2, got {feedback.recipe()!r}")
    _check_cast(planned, settings.up, repr(settings.recipe()), "gradients", "reduce_dtype")
    aggregator = ReduceScatter(up=settings.up, feedback=feedback)
    partitions = _cut(param, planned, aggregator, plan)
    return replace(planned, aggregator=aggregator, partitions=partitions, slots=aggregator.slots)


def _cut(
    param: ShardedParam, planned: PlannedParam, settings: ReduceScatter | ShardAllGather, plan: Plan
) -> tuple[Partition, ...]:
    """Cut every rank's chunk; first pieces first, so that a message holds about as much for every rank."""
    step = plan.options.partition_numel
    chunks = [param.chunk(rank, plan.world_size) for rank in range(plan.world_size)]
    return tuple(
        Partition(
            name=param.name,
            dtype=planned.info.dtype,
            offset=first + at,
            numel=min(step, numel - at),
            owner=rank,
            aggregator=settings,
            key=parameter_key(plan.options.seed, param.name),
        )
        for at in range(0, max(numel for _, numel in chunks), step)
        for rank, (first, numel) in enumerate(chunks)
        if at < numel
    )
