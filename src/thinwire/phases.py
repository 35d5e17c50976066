"""A schedule resolved once against a model: one plan for every phase, with the same partitions and owners.

Since owners stay, residuals need not move when a phase begins.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.aggregators import Aggregator, Dense, Hierarchical, NodePushPull, ThroughServers, typical_contract
from thinwire.allocate import Allocate
from thinwire.auto import Auto, read_auto
from thinwire.compressors import Unbiased
from thinwire.errors import PlanError, RecipeError
from thinwire.feedback import EF21, MomentumCorrection, Slot
from thinwire.plan import Plan, PlannedParam, build_plan
from thinwire.policy import PlanOptions
from thinwire.schedule import Phase, Schedule, parse_schedule

_RESIDUALS = frozenset({Slot.WORKER, Slot.OWNER})


@dataclass(frozen=True, slots=True)
class Choices:
    """The candidates of an `Allocate` resolved: a plan for each, any of which, and any mix, may follow any other."""

    settings: Allocate
    plans: tuple[Plan, ...]  # one per candidate, with the same partitions and owners

    @property
    def default(self) -> Plan:
        """The plan until the first choice."""
        return self.plans[self.settings.default_index]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are chosen for: those that some candidate compresses."""
        by_name = zip(*(plan.params for plan in self.plans), strict=True)
        return tuple(params[0].info.name for params in by_name if any(not param.reason for param in params))

    def mixed(self, chosen: Mapping[str, int]) -> Plan:
        """Return the plan that has the given candidate for every parameter; the default for those not named."""
        default = self.settings.default_index
        params = (self.plans[chosen.get(p.info.name, default)].by_name[p.info.name] for p in self.default.params)
        return dataclasses.replace(self.default, params=tuple(params))


@dataclass(frozen=True)
class Candidates:
    """The candidates of an `Auto` resolved: a plan for each.

    Plans with feedback deliver what any other owes. Those of one all-reduce, as DDP's own is, leave it where it is;
    `settling` then delivers it, through the owners that have it, and nothing is owed any more.
    """

    settings: Auto
    plans: tuple[Plan, ...]
    settling: Plan

    @functools.cached_property
    def owing(self) -> tuple[bool, ...]:
        """Of every plan, whether something may be owed after a step by it that was not before."""
        return tuple(any(_owed(param) for param in plan.params) for plan in self.plans)


@dataclass(frozen=True, slots=True)
class Phases:
    """Plans by the step from which they are valid, in ascending order and from step 0 on.

    With `choices` the last of them is the default, with `candidates` one of these; from its first step on others may
    take its place.
    """

    plans: tuple[tuple[int, Plan], ...]
    choices: Choices | None = None
    candidates: Candidates | None = None

    @property
    def all_plans(self) -> tuple[Plan, ...]:
        """Every plan that is valid at some step; of choices the unmixed ones."""
        others = self.choices.plans if self.choices else ()
        if self.candidates is not None:
            others = (*self.candidates.plans, self.candidates.settling)
        return (*(plan for _, plan in self.plans), *others)

    def at(self, step: int) -> Plan:
        """Return the plan that is valid at a step."""
        return [plan for start, plan in self.plans if start <= step][-1]

    @property
    def final(self) -> Plan:
        """The plan of the last phase."""
        return self.plans[-1][1]

    @property
    def kept(self) -> Plan:
        """The last plan, with all that must be kept of every parameter in any phase."""
        slots: dict[str, frozenset[Slot]] = {}
        numel: dict[str, int] = {}  # of factors: one of a lower rank is the first part of one of a higher
        for plan in self.all_plans:
            for param in plan.params:
                name = param.info.name
                slots[name] = slots.get(name, frozenset()) | param.slots
                numel[name] = max(numel.get(name, 0), param.factor_numel)
        params = (
            dataclasses.replace(param, slots=slots[param.info.name], factor_numel=numel[param.info.name])
            for param in self.final.params
        )
        return dataclasses.replace(self.final, params=tuple(params))

    def lines(self) -> list[str]:
        """Return all that must agree between ranks, one fact a line."""
        lines = list[str]()
        for start, plan in self.plans:
            lines += [*([f"from step {start}"] if start else []), *plan.lines()]
        if self.choices is not None:
            lines += [str(self.choices.settings), *(line for plan in self.choices.plans for line in plan.lines())]
        if self.candidates is not None:
            lines += [str(self.candidates.settings), *(line for p in self.candidates.plans for line in p.lines())]
        return lines

    def __str__(self) -> str:
        if self.candidates is not None:  # of which any may be valid
            named = zip(self.candidates.settings.names, self.candidates.plans, strict=True)
            return "\n\n".join(f"candidate {name}:\n{plan}" for name, plan in named)
        if len(self.plans) == 1:
            return str(self.final)
        return "\n\n".join(f"from step {start} on:\n{plan}" for start, plan in self.plans)

    @property
    def digest(self) -> str:
        """SHA-256 of `lines`."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()


def build_phases(
    named_parameters: Iterable[tuple[str, Tensor]],
    recipe: Phase | Schedule | Allocate | Auto,
    world_size: int,
    options: PlanOptions | None = None,
    *,
    start_after: int = 0,
    all_reduce: bool = True,
) -> Phases:
    """Plan every phase of a schedule, or the only one.

    Args:
        named_parameters: those that train, in order of registration.
        recipe: a schedule, a choice ("auto" among them), or what `build_plan` takes.
        world_size: number of ranks.
        options: cuts and thresholds.
        start_after: put as many dense steps before the phases.
        all_reduce: whether a schedule without compression may use DDP's own all-reduce; else owners form the mean.

    Raises:
        RecipeError: an unknown recipe or a setting out of range.
        PlanError: what `build_plan` raises, or a phase that could not deliver what is owed from those before.
    """
    named, recipe = list(named_parameters), read_auto(recipe)
    if isinstance(recipe, Allocate):
        return _choices(named, recipe, world_size, options, start_after)
    if isinstance(recipe, Auto):
        return _candidates(named, recipe, world_size, options, start_after)
    if isinstance(recipe, str):
        recipe = parse_schedule(recipe)
    phases = recipe.phases if isinstance(recipe, Schedule) else ((0, recipe),)
    if start_after:
        phases = ((0, Dense()), *((start_after + start, phase) for start, phase in phases))
    starts, policies = [start for start, _ in phases], [phase for _, phase in phases]
    plans = _plans(named, policies, world_size, options, all_reduce)  # type: ignore[arg-type]
    return Phases(tuple(zip(starts, _carried(plans), strict=True)))


def _choices(
    named: Sequence[tuple[str, Tensor]],
    recipe: Allocate,
    world_size: int,
    options: PlanOptions | None,
    start_after: int,
) -> Phases:
    """Plan every candidate, and the dense steps before there is a choice; owners are those of the default."""
    first, *plans, _ = _plans(named, [Dense(), *recipe.settings, recipe.default], world_size, options)  # type: ignore[list-item]
    choices = Choices(recipe, tuple(_interchangeable(plans)))
    dense = [(0, first)] if start_after else []
    return Phases((*dense, (start_after, choices.default)), choices)


def _candidates(
    named: Sequence[tuple[str, Tensor]],
    recipe: Auto,
    world_size: int,
    options: PlanOptions | None,
    start_after: int,
) -> Phases:
    """Plan every candidate; what is kept has the owners of the last that is not one all-reduce."""
    others = [one for one in recipe.settings if not isinstance(one, Dense)]
    settling, *owned = _interchangeable(_plans(named, [Dense(), *others], world_size, options))
    found = dict(zip(others, owned, strict=True))
    plans = tuple(found.get(one) or build_plan(named, one, world_size, options) for one in recipe.settings)
    dense = [(0, plans[0])] if start_after else []
    # The last of the phases says what is kept, and its partitions are cut.
    return Phases(
        (*dense, (start_after, owned[-1] if owned else plans[-1])), candidates=Candidates(recipe, plans, settling)
    )


def _plans(
    named: Sequence[tuple[str, Tensor]],
    policies: Sequence[Phase],
    world_size: int,
    options: PlanOptions | None,
    all_reduce: bool = True,
) -> list[Plan]:
    """Make plans that may follow each other: with the same partitions, and the owners of the last."""
    plans = [build_plan(named, policy, world_size, options, all_reduce=all_reduce) for policy in policies]  # type: ignore[arg-type]
    if len(plans) > 1 and any(not plan.is_dense for plan in plans):
        # Dense phases go through owners then, too: buckets do not show in the bits of any step.
        momentum = _momentum(plans)
        # A parameter that one phase must see whole is cut in none, so that partitions stay.
        whole = {p.name for plan in plans for param in plan.params for p in param.partitions if p.shape is not None}
        found = (param.aggregator for plan in plans for param in plan.params)
        nodes = next((one for one in found if isinstance(one, Hierarchical | NodePushPull)), None)
        both = {"momentum": momentum, "all_reduce": False, "whole": whole, "nodes": nodes}
        plans = [build_plan(named, policy, world_size, options, **both) for policy in policies]  # type: ignore[arg-type]
    return _with_same_owners(plans)


def _momentum(plans: Iterable[Plan]) -> MomentumCorrection | None:
    """Return the momentum of some phase; `build_plan` sees to it that it is that of all."""
    feedback = (param.aggregator.feedback for plan in plans for param in plan.params)
    return next((one for one in feedback if isinstance(one, MomentumCorrection)), None)


def _with_same_owners(plans: list[Plan]) -> list[Plan]:
    """Give every phase the owners of the last one: dealt by its bytes, which decide for longest."""
    owners = {(p.name, p.offset): p.owner for param in plans[-1].params for p in param.partitions}

    def like_the_last(param: PlannedParam) -> PlannedParam:
        partitions = (dataclasses.replace(p, owner=owners[p.name, p.offset]) for p in param.partitions)
        return dataclasses.replace(param, partitions=tuple(partitions))

    return [dataclasses.replace(plan, params=tuple(map(like_the_last, plan.params))) for plan in plans]


def _carried(plans: list[Plan]) -> list[Plan]:
    """Let every phase deliver what those before it owe."""
    owing: Mapping[str, PlannedParam] = {}
    carried = list[Plan]()
    for plan in plans:
        plan = dataclasses.replace(
            plan, params=tuple(_owing(param, owing.get(param.info.name)) for param in plan.params)
        )
        owing = {param.info.name: param for param in plan.params if _owed(param)}
        carried.append(plan)
    return carried


def _interchangeable(plans: list[Plan]) -> list[Plan]:
    """Let every plan deliver what any other owes."""

    def for_all(params: tuple[PlannedParam, ...], param: PlannedParam) -> PlannedParam:
        for before in params:
            if _owed(before):
                param = _owing(param, before)
        return param

    by_name = list(zip(*(plan.params for plan in plans), strict=True))
    return [
        dataclasses.replace(plan, params=tuple(for_all(params, params[place]) for params in by_name))
        for place, plan in enumerate(plans)
    ]


def _owed(param: PlannedParam) -> frozenset[Slot]:
    """Return the residuals that a phase leaves, those that servers keep among them."""
    elsewhere = param.aggregator.kept_by_servers if isinstance(param.aggregator, ThroughServers) else frozenset[Slot]()
    return (param.slots | elsewhere) & _RESIDUALS


def _diverges(aggregator: Aggregator, owed: frozenset[Slot]) -> bool:
    """Whether an unbiased kind would encode what is owed: its errors grow with what they are fed back into."""
    hops = ((Slot.WORKER, aggregator.up), (Slot.OWNER, aggregator.down))
    return any(slot in owed and isinstance(typical_contract(compressor), Unbiased) for slot, compressor in hops)


def _owing(param: PlannedParam, before: PlannedParam | None) -> PlannedParam:
    """Return a phase's parameter such that it also delivers what it owed in the phase before."""
    if before is None:
        return param
    owed, aggregator = _owed(before), param.aggregator
    what = (
        f"{param.info.name}: {before.aggregator.recipe()!r} leaves something to be sent, which {aggregator.recipe()!r}"
    )
    if isinstance(aggregator.feedback, EF21) or (Slot.OWNER in owed and not aggregator.has_owners):
        raise PlanError(f"{what} after it would never do; expected phases with the same feedback and aggregator")
    if aggregator.feedback is None:
        try:
            aggregator = dataclasses.replace(aggregator, feedback=before.aggregator.feedback)  # type: ignore[type-var]
        except (RecipeError, ValueError) as error:  # ValueError: a class whose settings have no feedback
            raise PlanError(f"{what} cannot deliver: {error}") from error
    if _diverges(aggregator, owed):
        raise PlanError(f"{what} cannot deliver: unbiased kinds diverge under error feedback")
    partitions = tuple(dataclasses.replace(p, aggregator=aggregator) for p in param.partitions)
    if isinstance(aggregator, ThroughServers):
        owed -= {Slot.OWNER}  # servers keep that
    return dataclasses.replace(param, aggregator=aggregator, partitions=partitions, slots=param.slots | owed)
