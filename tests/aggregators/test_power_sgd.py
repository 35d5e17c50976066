"""PowerSGD: the paper's algorithm, warm starts, both forms of the error, and what rides along."""

import pytest
import torch
from world import SHAPES, World, gradients

from thinwire import PlanOptions, PowerSGD
from thinwire.aggregators.header import num_flags
from thinwire.bench.lock_step import LockStep
from thinwire.feedback import Slot
from thinwire.kernels.low_rank import effective_rank, matrix_shape
from thinwire.plan import build_plan


def _orthonormal(x):
    return torch.linalg.qr(x)[0]


@pytest.mark.parametrize("error", ["local", "aggregated"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_papers_algorithm(error, world_size):
    """Beside a plain version in float64 with LAPACK's QR: only the span of a factor matters."""
    world = World(PowerSGD(rank=2, error=error), world_size)
    owed = [
        {name: torch.zeros(g.numel(), dtype=torch.float64) for name, g in gradients(0, 0).items()}
        for _ in range(world_size)
    ]
    starts = {}
    for step in range(5):
        own = [gradients(rank, step) for rank in range(world_size)]
        before = {name: factor.clone() for name, factor in world.states[0].whole[Slot.FACTOR].items()}
        delivered = world.run(own)[0]
        for name, shape in SHAPES.items():
            (m, n), r = matrix_shape(shape), effective_rank(shape, 2)
            matrices = [(own[i][name].double() + owed[i][name]).view(m, n) for i in range(world_size)]
            if step == 0:  # the start is drawn: take the span that was found for it
                q = None
                mean = delivered[name].double().view(m, n)
                p = _orthonormal(
                    mean @ torch.randn(n, r, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
                )
            else:
                q = _orthonormal(before[name].double().view(r, n).mT)
                p = _orthonormal(sum(matrix @ q for matrix in matrices))
                mean = p @ (sum(matrix.mT @ p for matrix in matrices) / world_size).mT
            got = delivered[name].double().view(m, n)
            assert float((got - mean).norm()) <= 1e-4 * float(mean.norm())
            for i, matrix in enumerate(matrices):
                left = matrix - p @ (p.mT @ matrix) if error == "local" else matrix - mean
                owed[i][name] = world.states[i].worker[name].double()
                assert float((owed[i][name].view(m, n) - left).norm()) <= 1e-4 * float(matrix.norm())
        starts = before
    assert all(bool(factor.any()) for factor in starts.values())


@pytest.mark.parametrize("error", ["local", "aggregated"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_alternating_sides(error, world_size):
    """Beside a plain version: the factor of the last step is known, the other one is the ranks' mean."""
    shapes = {"w": (12, 20)}
    world = World(PowerSGD(rank=2, alternating=True, error=error), world_size, shapes=shapes)
    sides = set()
    for step in range(6):
        own = [gradients(rank, step, shapes)["w"] for rank in range(world_size)]
        owed = [state.worker["w"].double() for state in world.states]
        known = world.states[0].whole[Slot.FACTOR]["w"].clone()
        delivered = world.run([{"w": g} for g in own])[0]["w"].double().view(12, 20)
        matrices = [(g.double() + e).view(12, 20) for g, e in zip(own, owed, strict=True)]
        transposed = (step + world.plan.by_name["w"].partitions[0].key) % 2 == 1
        sides.add(transposed)
        if transposed:
            matrices, delivered = [m.mT for m in matrices], delivered.mT
        if step == 0:  # the start is drawn
            continue
        q = _orthonormal(known[: 2 * matrices[0].shape[1]].double().view(2, -1).mT)
        mean = sum(m @ q for m in matrices) / world_size @ q.mT
        assert float((delivered - mean).norm()) <= 1e-4 * float(mean.norm())
        for m, state in zip(matrices, world.states, strict=True):
            left = m - m @ q @ q.mT if error == "local" else m - mean
            kept = state.worker["w"].double().view(12, 20)
            assert float(((kept.mT if transposed else kept) - left).norm()) <= 1e-4 * float(m.norm())
    assert sides == {False, True}


def test_a_warm_start_finds_what_a_fixed_matrix_holds():
    """The same gradients again and again, their residuals taken away: the error falls to that of the best rank."""
    shapes = {"w": (24, 40)}
    world = World(PowerSGD(rank=2), 3, shapes=shapes)
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(24, 2, generator=generator), torch.randn(2, 40, generator=generator)
    noise = [0.05 * torch.randn(24, 40, generator=generator) for _ in range(3)]
    own = [{"w": (left @ right + noise[rank]).view(-1)} for rank in range(3)]
    mean = torch.stack([g["w"] for g in own]).mean(dim=0).view(24, 40)
    singular = torch.linalg.svdvals(mean)
    best = float(singular[2:].square().sum().sqrt() / singular.square().sum().sqrt())
    errors = []
    for _ in range(6):
        for state in world.states:
            state.worker["w"].zero_()
        delivered = world.run(own)[0]["w"].view(24, 40)
        errors.append(float((delivered - mean).norm() / mean.norm()))
    assert errors[-1] < 1.02 * best <= 1.02 * errors[0]


@pytest.mark.parametrize("alternating", [False, True])
def test_a_factor_that_vanished_is_drawn_anew(alternating):
    world = World(PowerSGD(rank=2, alternating=alternating), 2, shapes={"w": (12, 20)})
    zeros = [{"w": torch.zeros(240)}] * 2
    for _ in range(3):
        assert not world.run(zeros)[0]["w"].any()
    for state in world.states:
        assert not state.whole[Slot.FACTOR]["w"].any()
    for _ in range(4):
        found = world.run([{"w": torch.arange(240.0)}] * 2)[0]["w"]
    assert bool(found.any())
    assert all(bool(state.whole[Slot.FACTOR]["w"].any()) for state in world.states)


def test_aggregated_errors_wander_and_local_ones_do_not():
    """Ranks whose gradients differ by noise: the difference from the mean piles up in the paper's form."""
    norms = {}
    for error in ("local", "aggregated"):
        world = World(PowerSGD(rank=2, error=error), 4, shapes={"w": (16, 24)})
        for step in range(200):
            world.run([gradients(rank, step, world.shapes) for rank in range(4)])
            if step in (19, 199):
                norms[error, step] = sum(float(state.worker["w"].norm()) for state in world.states) / 4
    assert norms["local", 199] < 1.5 * norms["local", 19]
    assert norms["aggregated", 199] > 2 * norms["aggregated", 19]


def test_what_stays_dense_rides_in_the_same_messages():
    shapes = {"a": (64, 64), "bias": (64,), "b": (64, 64), "scale": ()}
    params = {name: torch.empty(shape) for name, shape in shapes.items()}
    plan = build_plan(params.items(), "powersgd:2", 3, PlanOptions(min_nbytes=1024))
    assert [param.reason for param in plan.params] == ["", "one-dimensional", "", "one-dimensional"]
    (message,) = plan.messages(list(shapes))
    flags = num_flags(4, "sum")
    assert [r.numel for r in message.rounds] == [flags + 2 * 2 * 64 + 65, 2 * 2 * 64]
    own = [gradients(rank, 0, shapes) for rank in range(3)]
    delivered = LockStep(plan, shapes).run([{n: g.view(shapes[n]) for n, g in each.items()} for each in own])
    for name in ("bias", "scale"):
        assert torch.allclose(delivered[name], torch.stack([g[name] for g in own]).mean(dim=0))
    for names in (["bias"], ["a"]):  # a bucket may hold nothing but either
        (message,) = plan.messages(names)
        assert len(message.rounds) == (1 if names == ["bias"] else 2)
    assert plan.sent_nbytes(0) == round(4 / 3 * 4 * (flags + 2 * 2 * 64 + 65)) + round(4 / 3 * 4 * 2 * 2 * 64)


def test_alternating_sends_one_side_a_step():
    world = World(PowerSGD(rank=2, alternating=True), 2, shapes={"w": (12, 20)})
    (message,) = world.plan.messages(["w"])
    assert [r.numel for r in message.rounds] == [num_flags(1, "sum") + 2 * 20]


def test_a_factor_has_no_units_and_a_step_that_is_not_finite_leaves_it_to_the_bit():
    world = World(PowerSGD(rank=2), 2, shapes={"w": (12, 20)})
    world.run()
    before = [state.whole[Slot.FACTOR]["w"].clone() for state in world.states]
    owed = [state.worker["w"].clone() for state in world.states]
    own = [gradients(rank, 1, world.shapes) for rank in range(2)]
    own[1]["w"][3] = float("inf")
    world.run(own, unit_ratio=0.3)
    for state, factor, residual in zip(world.states, before, owed, strict=True):
        assert torch.equal(state.whole[Slot.FACTOR]["w"], factor)
        assert torch.equal(state.worker["w"], residual * 0.3)
