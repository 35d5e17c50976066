"""The plan of an exchange of differences: parameters by the recipe, buffers as they are."""

import dataclasses
from collections.abc import Sequence

import torch

from thinwire.aggregators import ThroughServers
from thinwire.algorithms.tracked import Tracked
from thinwire.allocate import Allocate
from thinwire.auto import Auto, read_auto
from thinwire.errors import AttachError, PlanError
from thinwire.feedback import MomentumCorrection
from thinwire.plan import Plan, build_plan
from thinwire.policy import PlanOptions
from thinwire.schedule import Phase, Schedule


def plan_differences(found: Sequence[Tracked], recipe: Phase, world_size: int, options: PlanOptions) -> Plan:
    """Resolve a recipe against what is kept equal. Differences are float32 whatever the parameter is.

    Raises:
        AttachError: a schedule, `Allocate`, `Auto`, or an exchange through servers.
        PlanError: feedback that is a momentum, or follows a learning rate; and as `build_plan` does.
        RecipeError: as `build_plan` does.
    """
    if isinstance(recipe := read_auto(recipe), Allocate | Auto):
        raise AttachError(f"{type(recipe).__name__}: expected one recipe, or patterns; local methods choose nothing")
    options = dataclasses.replace(options, num_servers=0)
    if isinstance(recipe, Schedule) or (isinstance(recipe, str) and len(recipe.split()) > 1):
        raise AttachError(f"expected one recipe, got {recipe!r}: local methods have no schedules")
    shapes = {one.name: torch.empty(one.local().shape, device="meta") for one in found}
    params = [(one.name, shapes[one.name]) for one in found if one.trained]
    plan = build_plan(params, recipe, world_size, options, all_reduce=False)
    for param in plan.params:
        if isinstance(param.aggregator, ThroughServers):
            kind = type(param.aggregator).__name__
            raise AttachError(f"{param.info.name}: expected an exchange between ranks, got {kind}, which needs servers")
        feedback = param.aggregator.feedback
        if isinstance(feedback, MomentumCorrection) or (feedback is not None and feedback.needs_learning_rate):
            raise PlanError(
                f"{param.info.name}: expected error feedback or none, since outer steps have momentum of their own "
                f"(outer_momentum) and a constant rate, got {param.aggregator.recipe()!r}"
            )
    buffers = [(one.name, shapes[one.name]) for one in found if not one.trained]
    if not buffers:
        return plan
    exact = build_plan(buffers, "dense", world_size, options, all_reduce=False)
    return dataclasses.replace(plan, params=(*plan.params, *exact.params))
