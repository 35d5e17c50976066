"""Schedules resolved against a model: partitions and owners that stay, and what is carried from phase to phase."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "aggregators"))
from world import SHAPES, Values, World, bits, gradients

from thinwire import (
    Dense,
    ErrorFeedback,
    Hierarchical,
    Identity,
    MomentumCorrection,
    PlanOptions,
    TwoShot,
    parse_recipe,
)
from thinwire.errors import PlanError
from thinwire.feedback import Slot
from thinwire.phases import Phases, build_phases
from thinwire.state import State

OPTIONS = PlanOptions(partition_numel=200, min_nbytes=0, compress_1d=True, node_sizes=2)


def phases_of(recipe, world_size: int = 3, **kwargs) -> Phases:
    params = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    return build_phases(params, recipe, world_size, OPTIONS, **kwargs)


def test_one_recipe_is_one_phase() -> None:
    phases = phases_of("topk:0.1")
    ((start, plan),) = phases.plans
    assert start == 0
    assert phases.final is plan
    assert phases.lines() == plan.lines()
    assert phases.kept == plan
    assert str(phases) == str(plan)
    assert str(phases_of("int8 until 5 then int4")).startswith("from step 0 on:\nparameter")


def test_start_after_is_a_dense_phase() -> None:
    assert phases_of("int4", start_after=5).lines() == phases_of("dense until 5 then int4").lines()
    late = phases_of("int8 until 2 then int4", start_after=5)
    assert [start for start, _ in late.plans] == [0, 5, 7]


def test_what_one_phase_needs_whole_is_cut_in_none() -> None:
    """Low-rank factors need matrices: what was left behind by slices before must still have its place."""
    for recipe in ("dense until 5 then lowrank:2", "int4 until 5 then lowrank:2", "lowrank:2 until 5 then int4"):
        plans = [plan for _, plan in phases_of(recipe).plans]
        cuts = [
            [(p.name, p.offset, p.numel, p.owner) for param in plan.params for p in param.partitions] for plan in plans
        ]
        assert cuts[0] == cuts[1]


@pytest.mark.parametrize("recipe", ["int8", "gather/onebit", {"gain": "int8", "*": "dense:fp16"}])
def test_dense_phases_are_exact_and_go_through_the_same_owners(recipe) -> None:
    (_, dense), (_, plan) = phases_of(recipe, start_after=5).plans
    for exact, param in zip(dense.params, plan.params, strict=True):
        assert exact.aggregator == TwoShot(up=Identity(), down=Identity())
        assert {p.aggregator for p in exact.partitions} == {exact.aggregator}
        assert [(p.offset, p.owner) for p in exact.partitions] == [(p.offset, p.owner) for p in param.partitions]


def test_dense_phases_beside_nodes_send_sums_of_nodes() -> None:
    (_, dense), (_, plan) = phases_of("hier:fp16/int4", start_after=5, world_size=4).plans
    assert {param.aggregator for param in dense.params} == {
        Hierarchical(up=Identity(), down=Identity(), node_sizes=(2, 2))
    }
    assert {param.aggregator.recipe() for param in plan.params} == {"hier:fp16/int4"}
    assert 0 < dense.between_nodes_nbytes < 1.1 * dense.raw_nbytes  # of a node of two, half up and half down: once


def test_dense_throughout_is_ddps_own() -> None:
    assert all(plan.is_dense for _, plan in phases_of("dense until 5 then dense:fp16").plans)
    assert phases_of("dense", start_after=3).at(0).params[0].aggregator == Dense()


def test_the_digest_depends_on_every_phase_and_its_first_step() -> None:
    texts = [
        "int4",
        "int8 until 5 then int4",
        "int8 until 6 then int4",
        "int6 until 5 then int4",
        "int8 until 5 then int3",
        "int8 until 5 then int4 until 6 then int4",
    ]
    assert len({phases_of(text).digest for text in texts}) == len(texts)
    assert phases_of(texts[1]).digest == phases_of(texts[1]).digest


# --- what is carried ------------------------------------------------------------------------------------------------


class Scheduled(World):
    """A world whose plan follows a schedule."""

    def __init__(self, recipe, world_size: int = 3) -> None:
        super().__init__(Dense(), world_size)
        self.phases = phases_of(recipe, world_size)
        params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.states = [State(self.phases.kept, params, rank) for rank in range(world_size)]

    def run(self, *args, **kwargs) -> list[Values]:
        self.plan = self.phases.at(self.step)
        return super().run(*args, **kwargs)


def total(num_steps: int, world_size: int = 3) -> dict[str, torch.Tensor]:
    return {
        name: sum(gradients(rank, step)[name].double() for rank in range(world_size) for step in range(num_steps))
        / world_size
        for name in SHAPES
    }


@pytest.mark.parametrize(
    "text",
    [
        "dense until 2 then topk:0.05",
        "topk:0.05 until 2 then dense",
        "topk:0.05 until 2 then int8 until 4 then dense until 5 then onebit",
        "onebit until 1 then topk:0.01 ramp 4",
        "int4 until 3 then topk:0.1+identity until 5 then fp16",
        "gather/onebit until 3 then gather/topk:0.1 until 5 then topk:0.1",
        "dense until 2 then hier/topk:0.1 until 5 then dense",
    ],
)
def test_nothing_is_lost_between_phases(text: str) -> None:
    world = Scheduled(text)
    delivered = [world.run() for _ in range(7)]
    for values in delivered:
        assert all(bits(own) == bits(values[0]) for own in values)
    owed = world.owed()
    for name, due in total(7).items():
        got = sum(values[0][name].double() for values in delivered)
        # Where int8 or fp16 go without feedback, they lose their rounding.
        torch.testing.assert_close(got + owed[name], due, rtol=1e-4, atol=1e-5)


def test_a_dense_phase_delivers_all_that_was_owed() -> None:
    world = Scheduled("topk:0.05 until 3 then dense")
    for _ in range(3):
        world.run()
    assert any(value.any() for value in world.owed().values())
    world.run()
    assert not any(value.any() for value in world.owed().values())


def test_momentum_runs_through_all_phases() -> None:
    """Dense steps of a schedule with momentum are momentum SGD: the optimizer has none."""
    world, plain = Scheduled("dense until 3 then topk:0.1@dgc"), World(parse_recipe("identity@dgc"), 3)
    for _ in range(3):
        assert bits(world.run()[0]) == bits(plain.run()[0])
    momentum = [state.whole[Slot.MOMENTUM]["layer.weight"].clone() for state in world.states]
    assert all(bool(u.any()) for u in momentum)
    world.run()
    for rank, (state, u) in enumerate(zip(world.states, momentum, strict=True)):
        now = state.whole[Slot.MOMENTUM]["layer.weight"]
        expected = u * 0.9 + gradients(rank, 3)["layer.weight"]
        assert torch.equal(now[now != 0], expected[now != 0])
        assert (now == 0).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "topk:0.1 until 5 then topk:0.1@ef21",
            r"'topk:0.1' leaves something.*'topk:0.1@ef21' after it would never do",
        ),
        ("topk:0.1 until 5 then gather/topk:0.1", r"'gather/topk:0.1' after it would never do"),
        ("topk:0.1 until 5 then int4:stochastic", r"cannot deliver: .*unbiased"),
        ("int8 until 5 then topk:0.1@dgc", r"expected MomentumCorrection.*got None"),
        ("topk:0.1 until 5 then topk:0.1@dgc", r"expected MomentumCorrection.*got ErrorFeedback"),
        ("topk:0.1@dgc:0.8 until 5 then topk:0.1@dgc", "expected one momentum"),
        ("int2@nag:0.5 until 4 then terngrad@nag:0.5", "cannot deliver: unbiased kinds diverge"),
    ],
)
def test_phases_that_do_not_go_together_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        phases_of(text)


@pytest.mark.parametrize("num_servers", [0, 2])
def test_what_servers_owe_goes_on_like_what_owners_owe(num_servers: int) -> None:
    params = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    options = dataclasses.replace(OPTIONS, num_servers=num_servers)
    with pytest.raises(PlanError, match=r"cannot deliver: .*unbiased"):
        build_phases(params, "identity+topk:0.1 until 5 then int8:stochastic", 3, options)
    phases = build_phases(params, "identity+topk:0.1 until 5 then dense", 3, options)
    assert all(param.aggregator.feedback is not None for param in phases.final.params)


def test_ef21_may_come_and_go() -> None:
    """It owes nothing, and its estimates stay those of senders and receivers alike."""
    world = Scheduled("topk:0.1@ef21 until 3 then dense until 5 then topk:0.2@ef21")
    for _ in range(8):
        values = world.run()
        assert all(bits(own) == bits(values[0]) for own in values)
    for name in SHAPES:
        estimates = torch.stack([state.whole[Slot.ESTIMATE][name] for state in world.states]).mean(dim=0)
        for (owned, offset), mean in (item for state in world.states for item in state.owned[Slot.MEAN].items()):
            if owned == name:
                torch.testing.assert_close(mean, estimates[offset : offset + mean.numel()], rtol=1e-4, atol=1e-5)


def test_what_is_kept_is_kept_from_the_start() -> None:
    phases = phases_of("dense until 3 then topk:0.1@dgc until 6 then int4@dgc")
    for param in phases.kept.params:
        assert param.slots == {Slot.MOMENTUM, Slot.WORKER, Slot.OWNER}
    assert phases.at(0).params[0].slots == {Slot.MOMENTUM}
    assert phases.at(0).params[0].aggregator.feedback == MomentumCorrection()
    carried = phases_of("topk:0.1 until 3 then dense").final.params[0]
    assert carried.aggregator.feedback == ErrorFeedback()
    assert carried.slots == {Slot.WORKER, Slot.OWNER}
