"""Choosing recipes under a budget: the choice against all there are, and plans of mixed candidates."""

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "aggregators"))
from world import SHAPES, Values, World, bits, gradients

from thinwire import Allocate, Dense, PlanOptions, Schedule, TopK, TwoShot, parse_recipe
from thinwire.allocate import NUM_BINS, choose
from thinwire.errors import PlanError, RecipeError
from thinwire.feedback import EF21, Slot
from thinwire.phases import build_phases
from thinwire.state import State

OPTIONS = PlanOptions(partition_numel=200, min_nbytes=0, compress_1d=True)

# --- the choice -----------------------------------------------------------------------------------------------------


@st.composite
def tables(draw, errors):
    """Errors and sizes of up to 5 rows and 4 candidates."""
    num_rows, num = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.lists(errors, min_size=num, max_size=num)
    sizes = st.lists(st.integers(0, 50), min_size=num, max_size=num)
    return [draw(row) for _ in range(num_rows)], [draw(sizes) for _ in range(num_rows)]


def total(table, choice):
    return sum(row[candidate] for row, candidate in zip(table, choice, strict=True))


def best(errors, sizes, budget):
    """Try all choices: the fewest bytes within the budget, or None."""
    choices = itertools.product(range(len(errors[0])), repeat=len(errors))
    return min((total(sizes, c) for c in choices if total(errors, c) <= budget), default=None)


@given(tables(st.integers(0, NUM_BINS // 2)))
def test_errors_that_are_whole_bins_are_chosen_for_exactly(table):
    """In bins of 1 nothing is rounded: the choice is the best of all."""
    errors, sizes = table
    choice, least = choose(errors, sizes, float(NUM_BINS)), best(errors, sizes, NUM_BINS)
    if least is None:
        assert choice == [row.index(min(row)) for row in errors]
    else:
        assert total(errors, choice) <= NUM_BINS
        assert total(sizes, choice) == least


@given(tables(st.floats(0, 10) | st.just(math.inf)), st.floats(0, 20))
def test_the_budget_is_kept_and_no_more_is_lost_than_the_bins(table, budget):
    errors, sizes = table
    choice, least = choose(errors, sizes, budget), best(errors, sizes, budget)
    if least is None:
        assert choice == [row.index(min(row)) for row in errors]
        return
    found = total(errors, choice)
    if found > budget * (1 + 1e-12):  # none was found for the bins: the least errors there are
        assert choice == [row.index(min(row)) for row in errors]
    smaller = best(errors, sizes, budget * (1 - (len(errors) + 1e-6) / NUM_BINS))
    if smaller is not None:
        assert total(sizes, choice) <= smaller
        assert found <= budget * (1 + 1e-12)
    for uniform in ([candidate] * len(errors) for candidate in range(len(errors[0]))):
        if total(errors, uniform) <= budget:
            assert total(sizes, choice) <= total(sizes, uniform)


def test_layers_that_are_easily_compressed_pay_for_others():
    errors = [[1.0, 0.1, 0.0], [100.0, 10.0, 0.1], [0.1, 0.01, 0.0]]
    sizes = [[10, 20, 40], [1, 2, 4], [100, 200, 400]]
    assert choose(errors, sizes, budget=10.11) == [0, 2, 0]
    assert choose(errors, sizes, budget=0.0) == [2, 2, 2]
    assert choose(errors, sizes, budget=math.inf) == [0, 0, 0]
    assert choose([], [], budget=1.0) == []


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": ["int4"]}, "expected at least two candidates, each once, got int4"),
        ({"candidates": ["int4", "int4"]}, "each once, got int4, int4"),
        ({"default": "int3"}, "expected a default among int2, int4, got 'int3'"),
        ({"budget": 0.0}, "expected a finite budget above 0, got 0.0"),
        ({"budget": math.inf}, "expected a finite budget above 0, got inf"),
        ({"samples": 0}, "expected 1 <= samples <= every, got 0 and 10"),
        ({"samples": 11}, "expected 1 <= samples <= every, got 11 and 10"),
        ({"candidates": ["int4", "int5x"]}, "expected a kind of compressor"),
        ({"candidates": ["int4", {"*": "int8"}]}, "expected recipes or Aggregators"),
        ({"candidates": ["int4", "global:8"]}, "'global:8' has no error that a rank could measure"),
        ({"candidates": ["int4", "sign"]}, "'sign' has no error"),
        ({"candidates": ["int4", "topk:0.1@ef21"]}, "'topk:0.1@ef21' has no error"),
        ({"candidates": ["int4", TwoShot(up=TopK(), down=TopK(), feedback=EF21())]}, "has no error"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Allocate(**{"candidates": ["int2", "int4"], "default": "int4", "every": 10, **settings})


def test_recipes_and_settings_are_one_candidate():
    both = Allocate(candidates=["int2", parse_recipe("int4")], default="int4")
    assert both == Allocate(candidates=("int2", "int4"), default=parse_recipe("int4"))
    assert both.default_index == 1


def phases_of(recipe, world_size=3, **kwargs):
    params = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    return build_phases(params, recipe, world_size, OPTIONS, **kwargs)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (["topk:0.1", "int4:stochastic"], "cannot deliver"),
        (["topk:0.1", "gather/topk:0.2"], "would never do"),
        (["topk:0.1@dgc", "int4"], r"expected MomentumCorrection.*got"),
    ],
)
def test_candidates_that_cannot_deliver_what_others_owe_are_refused(candidates, message):
    with pytest.raises(PlanError, match=message):
        phases_of(Allocate(candidates=candidates, default=candidates[0]))


def test_a_schedule_holds_no_choice():
    allocate: Any = Allocate(candidates=["int2", "int4"], default="int4")
    with pytest.raises(PlanError, match="expected a recipe, an Aggregator, patterns or a function"):
        phases_of(Schedule([(0, "dense"), (5, allocate)]))


def test_the_digest_depends_on_all_settings():
    made = [
        Allocate(candidates=["int2", "int4"], default="int4", every=10),
        Allocate(candidates=["int2", "int4", "int8"], default="int4", every=10),
        Allocate(candidates=["int2", "int4"], default="int2", every=10),
        Allocate(candidates=["int2", "int4"], default="int4", every=10, budget=2.0),
        Allocate(candidates=["int2", "int4"], default="int4", every=10, samples=2),
        Allocate(candidates=["int2", "int4"], default="int4", every=11),
    ]
    assert len({phases_of(one).digest for one in made}) == len(made)
    assert phases_of(made[0], start_after=5).digest != phases_of(made[0]).digest


# --- any mix, after any other ---------------------------------------------------------------------------------------


class Mixing(World):
    """A world in which every step has another mix of the candidates."""

    def __init__(self, candidates, world_size=3, start_after=0):
        super().__init__(Dense(), world_size)
        allocate = Allocate(candidates=candidates, default=candidates[-1])
        self.phases = phases_of(allocate, world_size, start_after=start_after)
        params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.states = [State(self.phases.kept, params, rank) for rank in range(world_size)]
        self.generator = torch.Generator().manual_seed(7)

    @property
    def choices(self):
        assert self.phases.choices is not None
        return self.phases.choices

    def run(self, *args, **kwargs) -> list[Values]:
        choices = self.choices
        if self.phases.at(self.step) is not choices.default:
            self.plan = self.phases.at(self.step)
        else:
            drawn = torch.randint(len(choices.plans), (len(choices.names),), generator=self.generator).tolist()
            self.plan = choices.mixed(dict(zip(choices.names, drawn, strict=True)))
        return super().run(*args, **kwargs)


@pytest.mark.parametrize(
    "candidates",
    [
        ["int2", "int4", "int8"],
        ["topk:0.02", "topk:0.2", "dense"],
        ["powersgd:1", "powersgd:2", "powersgd:3"],
        ["powersgd:1:alternating", "powersgd:3:alternating"],
        ["lowrank:1", "onebit", "int4"],
        ["gather/topk:0.1", "gather/onebit"],
        ["topk:0.05@dgc", "topk:0.3@dgc"],
    ],
    ids=lambda candidates: candidates[0],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nothing_is_lost_whatever_follows_whatever(candidates, world_size):
    """Delivered + owed = due, and replicas are equal to the bit."""
    world = Mixing(candidates, world_size, start_after=1)
    delivered = [world.run() for _ in range(8)]
    for values in delivered:
        assert all(bits(own) == bits(values[0]) for own in values)
    if "dgc" in candidates[0]:
        return  # what is due then is momentum
    owed = world.owed()
    for name in SHAPES:
        due = sum(gradients(rank, step)[name].double() for rank in range(world_size) for step in range(8)) / world_size
        got = sum(values[0][name].double() for values in delivered)
        torch.testing.assert_close(got + owed[name], due, rtol=1e-4, atol=2e-5)


def test_a_rank_that_does_not_pay_delivers_what_a_lower_one_owes():
    """Of 5 x 70 numbers rank 3 would send more than half, so that they travel as they are."""
    world = Mixing(["powersgd:1", "powersgd:3"])
    choices = world.choices
    low, high = (plan.by_name["embed.weight"] for plan in choices.plans)
    assert (low.reason, high.reason) == ("", "lowrank:3:fp32 saves less than half")
    world.plan = choices.plans[0]
    World.run(world)
    assert all(bool(state.worker["embed.weight"].any()) for state in world.states)
    world.plan = choices.plans[1]
    World.run(world)
    assert not any(bool(state.worker["embed.weight"].any()) for state in world.states)


def test_partitions_owners_and_what_is_kept_are_those_of_all_candidates():
    phases = phases_of(Allocate(candidates=["int8", "lowrank:2", "topk:0.1"], default="topk:0.1"))
    cuts = [
        [(p.name, p.offset, p.numel, p.owner) for q in plan.params for p in q.partitions] for plan in phases.all_plans
    ]
    assert all(cut == cuts[0] for cut in cuts)
    assert all({Slot.WORKER, Slot.OWNER} <= param.slots for param in phases.kept.params)
    powers = phases_of(Allocate(candidates=["powersgd:1", "powersgd:4"], default="powersgd:1"))
    kept = powers.kept.by_name["layer.weight"].factor_numel
    assert kept == phases_of("powersgd:4").final.by_name["layer.weight"].factor_numel
