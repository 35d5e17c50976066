"""Resolves recipes against a sharded model: gradients, weights, and shards between replicas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from thinwire.aggregators import Aggregator, Dense, Partition, ReduceScatter, ShardAllGather, ThroughServers, TwoShot
from thinwire.compressors import Cast, Compressor, Identity
from thinwire.errors import PlanError, RecipeError
from thinwire.feedback import ErrorFeedback, Slot
from thinwire.integrations.fsdp_groups import ShardedParam, ShardGroup
from thinwire.integrations.fsdp_plan import ShardPhases, ShardPlan
from thinwire.phases import Phases, build_phases
from thinwire.plan import Plan, PlannedParam, build_plan
from thinwire.policy import ParamInfo, Patterns, PlanOptions, Policy
from thinwire.random import parameter_key
from thinwire.recipes import parse_compressor
from thinwire.schedule import Phase, Schedule
from thinwire.spec import COMPRESSIBLE_DTYPES

Recipe = Phase | Schedule
WeightRecipe = str | Compressor | Mapping[str, str | Compressor] | Callable[[ParamInfo], str | Compressor | None]


def build_shard_phases(
    groups: Sequence[ShardGroup],
    recipe: Recipe,
    world_size: int,
    options: PlanOptions | None,
    *,
    start_after: int = 0,
    weights: WeightRecipe | None = None,
    gathered: Sequence[ShardGroup] = (),
    every_group: bool = False,
) -> ShardPhases:
    """Resolve a recipe, or a schedule of them, against a sharded model; with `every_group` none is left to FSDP2.

    Raises:
        RecipeError: a kind or feedback that has no one-way form.
        PlanError: as `build_phases`; or two roundings to 16 bits one after the other.
    """
    whole = build_phases(_named(groups), recipe, world_size, options, start_after=start_after, all_reduce=False)
    by_name = {param.name: param for group in groups for param in group.params}
    plans = tuple(
        (start, replace(plan, params=tuple(_sharded(param, by_name[param.info.name], plan) for param in plan.params)))
        for start, plan in whole.plans
    )
    every = tuple(tuple(param.name for param in group.params) for group in groups) if every_group else None
    compressed = [_compressed(groups, plan) if every is None else every for _, plan in plans]
    weight_plan, takes = None, ()
    if weights is not None:
        weight_plan = _plan_weights(gathered, weights, world_size, options)
        takes = _compressed(gathered, weight_plan)
        if any(param.aggregator.down.stochastic for param in weight_plan.params) and not any(compressed):
            raise RecipeError(
                f"weights={weights!r} draws random numbers by the step, which only reductions through thinwire count, "
                "and no gradient is compressed; expected a kind that rounds to nearest, as 'int8', or another recipe"
            )
    return ShardPhases(
        tuple(
            (start, ShardPlan(plan, names, weight_plan, takes))
            for (start, plan), names in zip(plans, compressed, strict=True)
        ),
        Phases(plans).kept,
    )


def build_replica_phases(
    groups: Sequence[ShardGroup],
    recipe: Recipe,
    rank: int,
    world_size: int,
    num_replicas: int,
    options: PlanOptions | None,
    *,
    start_after: int = 0,
) -> Phases:
    """Resolve a recipe against the shards that one rank keeps, which are exchanged with the same rank of each replica.

    Raises:
        RecipeError: another feedback than `ErrorFeedback`.
        PlanError: as `build_phases`, gradients that no compressor takes, or an exchange through servers.
    """
    params = [param for group in groups for param in group.params]
    for group in groups:
        if group.dtype not in COMPRESSIBLE_DTYPES:
            raise PlanError(f"{group.params[0].name}: {group.dtype} gradients cannot be exchanged between replicas")
    # What was summed for a shard is float32, whatever came.
    named = [(param.name, torch.empty(param.shard_shape(rank, world_size), device="meta")) for param in params]
    first = {param.name: param.chunk(rank, world_size)[0] for param in params}
    phases = build_phases(named, recipe, num_replicas, options, start_after=start_after, all_reduce=False)

    def keyed(planned: PlannedParam) -> PlannedParam:
        name = planned.info.name
        _check_feedback(name, planned.aggregator)
        if isinstance(planned.aggregator, ThroughServers):
            raise PlanError(f"{name}: replicas exchange without parameter servers: expected a recipe, as 'int8'")
        # Neither what the way to the shard draws, nor what other shards of the parameter do.
        key = parameter_key(phases.final.options.seed, f"{name}[{first[name]}:]")
        return replace(planned, partitions=tuple(replace(p, key=key) for p in planned.partitions))

    return Phases(tuple((start, replace(plan, params=tuple(map(keyed, plan.params)))) for start, plan in phases.plans))


def _named(groups: Sequence[ShardGroup]) -> list[tuple[str, torch.Tensor]]:
    return [(p.name, torch.empty(p.shape, dtype=g.dtype, device="meta")) for g in groups for p in g.params]


def _compressed(groups: Sequence[ShardGroup], plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the names of the groups in which anything is compressed, or owed. FSDP2 itself serves the others."""
    names = (tuple(param.name for param in group.params) for group in groups)
    sent = {param.info.name for param in plan.params if not param.reason or param.slots}
    return tuple(ns for ns in names if not sent.isdisjoint(ns))


def _plan_weights(
    groups: Sequence[ShardGroup], weights: WeightRecipe, world_size: int, options: PlanOptions | None
) -> Plan:
    """Resolve a kind for every weight, but for those that stay exact by the rules of `PlanOptions`."""
    policy: Aggregator | Patterns | Policy
    if isinstance(weights, Mapping):
        policy = Patterns({pattern: _gathering(kind, f"weights={pattern!r}: ") for pattern, kind in weights.items()})
    elif isinstance(weights, str | Compressor):
        policy = _gathering(weights, f"weights={weights!r}: ")
    elif callable(weights):

        def resolve(info: ParamInfo) -> Aggregator | None:
            kind = weights(info)
            return None if kind is None else _gathering(kind, f"weights({info.name!r}): ")

        policy = resolve
    else:
        raise PlanError(f"weights: expected a compressor, its recipe, patterns or a function, got {weights!r}")
    whole = build_plan(_named(groups), policy, world_size, options, all_reduce=False)
    by_name = {param.name: param for group in groups for param in group.params}
    params: list[PlannedParam] = []
    for planned in whole.params:
        kind = planned.aggregator.down
        if not isinstance(planned.aggregator, Dense):  # of a dtype that no compressor takes: so is its whole group
            if not planned.reason:
                _check_cast(planned, kind, f"weights={kind.recipe()!r}", "weights", "param_dtype")
            aggregator = ShardAllGather(down=Identity() if planned.reason else kind)
            partitions = _cut(by_name[planned.info.name], planned, aggregator, whole)
            planned = replace(planned, aggregator=aggregator, partitions=partitions, slots=aggregator.slots)
        params.append(planned)
    return Plan(tuple(params), world_size, whole.options)


def _gathering(kind: str | Compressor, where: str) -> Aggregator:
    """Return the settings of an all-gather; `where` is for errors."""
    if kind == "dense":
        return Dense()
    try:
        return ShardAllGather(down=parse_compressor(kind) if isinstance(kind, str) else kind)
    except RecipeError as error:
        raise RecipeError(f"{where}{error}") from None


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
    if settings.up.unit != "slice":
        raise RecipeError(f"{info.name}: {settings.recipe()!r} must see whole matrices, and FSDP2 cuts them by rows")
    _check_feedback(info.name, settings)
    _check_cast(planned, settings.up, repr(settings.recipe()), "gradients", "reduce_dtype")
    aggregator = ReduceScatter(up=settings.up, feedback=settings.feedback)
    partitions = _cut(param, planned, aggregator, plan)
    # Also what an earlier phase of a schedule left to be sent. Nothing is sent back, so that owners owe nothing.
    slots = aggregator.slots | (planned.slots & {Slot.WORKER})
    return replace(planned, aggregator=aggregator, partitions=partitions, slots=slots)


def _check_feedback(name: str, aggregator: Aggregator) -> None:
    feedback = aggregator.feedback
    if feedback is not None and (not isinstance(feedback, ErrorFeedback) or feedback.lr_correction):
        raise RecipeError(f"{name}: expected ErrorFeedback or none with FSDP2, got {feedback.recipe()!r}")


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
