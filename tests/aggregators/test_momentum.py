"""Momentum correction against torch's SGD where nothing is held back, and against the paper in NumPy where it is."""

import numpy as np
import pytest
import torch
from world import SHAPES, World, bits, gradients

from thinwire import Gather, Identity, MomentumCorrection, OneBit, RandomK, TopK, TwoShot
from thinwire.aggregators import Aggregator, Dense
from thinwire.errors import PlanError, RecipeError
from thinwire.feedback import Slot
from thinwire.plan import build_plan
from thinwire.recipes import parse_recipe

NUM_STEPS = 8


def sgd_updates(nesterov: bool, momentum: float = 0.9) -> list[dict[str, bytes]]:
    """Return what torch's momentum SGD subtracts from the weights of one rank, by step."""
    updates = []
    params = {name: torch.zeros(g.numel(), requires_grad=True) for name, g in gradients(0, 0).items()}
    optimizer = torch.optim.SGD(params.values(), lr=1.0, momentum=momentum, nesterov=nesterov)
    for step in range(NUM_STEPS):
        for name, g in gradients(0, step).items():
            params[name].data.zero_()
            params[name].grad = g.clone()
        optimizer.step()
        updates.append(bits({name: -p.detach() for name, p in params.items()}))
    return updates


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", [Identity(), TopK(density=1.0, value_dtype=torch.float32)], ids=["identity", "topk"])
def test_where_all_is_sent_it_is_momentum_sgd_to_the_bit(kind, nesterov: bool) -> None:
    feedback = MomentumCorrection(nesterov=nesterov)
    for aggregator in (TwoShot(up=kind, down=kind, feedback=feedback), Gather(up=kind, feedback=feedback)):
        world = World(aggregator, 1)
        for expected in sgd_updates(nesterov):
            delivered = world.run()[0]
            if not nesterov:
                assert bits(delivered) == expected
            for name, update in expected.items():  # torch may fuse the look ahead: one rounding less
                update = torch.frombuffer(bytearray(update), dtype=torch.float32)
                torch.testing.assert_close(delivered[name], update, rtol=1e-5, atol=1e-6)


def test_density_1_in_float16_loses_no_momentum() -> None:
    """Nothing is held back, so nothing is masked."""
    kind = TopK(density=1.0)
    world = World(TwoShot(up=kind, down=kind, feedback=MomentumCorrection()), 1)
    total = {name: torch.zeros(g.numel()) for name, g in gradients(0, 0).items()}
    for expected in sgd_updates(False):
        delivered = world.run()[0]
        for name, update in expected.items():
            total[name] += torch.frombuffer(bytearray(update), dtype=torch.float32) - delivered[name]
    for name, owed in world.owed().items():
        torch.testing.assert_close(total[name].double(), owed, rtol=1e-3, atol=1e-5)


class Paper:
    """The paper's momentum correction and factor masking, for one rank and partition, in float64.

    But that nothing is masked where everything is sent, as in partitions of one element.
    """

    def __init__(self, numel: int, k: int, momentum: float) -> None:
        self.u, self.v, self.k, self.momentum = np.zeros(numel), np.zeros(numel), k, momentum

    def step(self, g: np.ndarray) -> np.ndarray:
        self.u = self.momentum * self.u + g
        self.v = self.v + self.u
        kept = np.lexsort((np.arange(len(g)), -np.abs(self.v)))[: self.k]
        mask = np.zeros(len(g), bool)
        mask[kept] = True
        sent = np.where(mask, self.v, 0.0)
        self.v = np.where(mask, 0.0, self.v)
        self.u = self.u if mask.all() else np.where(mask, 0.0, self.u)
        return sent


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("gather", [False, True])
def test_it_is_the_papers_algorithm(world_size: int, gather: bool) -> None:
    kind, feedback = TopK(density=0.05, value_dtype=torch.float32), MomentumCorrection(momentum=0.8)
    aggregator = Gather(up=kind, feedback=feedback) if gather else TwoShot(up=kind, down=Identity(), feedback=feedback)
    world = World(aggregator, world_size)
    partitions = [p for param in world.plan.params for p in param.partitions]
    papers = {
        (rank, p.name, p.offset): Paper(p.numel, kind.num_kept(p.numel), 0.8)
        for rank in range(world_size)
        for p in partitions
    }
    for step in range(NUM_STEPS):
        delivered = world.run()[0]
        for p in partitions:
            place = slice(p.offset, p.offset + p.numel)
            grads = [gradients(rank, step)[p.name][place].double().numpy() for rank in range(world_size)]
            sent = [papers[rank, p.name, p.offset].step(g) for rank, g in enumerate(grads)]
            np.testing.assert_allclose(delivered[p.name][place].numpy(), np.mean(sent, axis=0), rtol=2e-5, atol=2e-6)
            for rank, state in enumerate(world.states):
                paper = papers[rank, p.name, p.offset]
                for slot, expected in ((Slot.WORKER, paper.v), (Slot.MOMENTUM, paper.u)):
                    kept = state.whole[slot][p.name][place].numpy()
                    np.testing.assert_allclose(kept, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", [OneBit(), parse_recipe("int4").up], ids=["onebit", "int4"])
def test_kinds_that_send_all_keep_their_momentum(kind) -> None:
    """What is delivered plus what is owed is the sum of momentum SGD's steps."""
    world = World(TwoShot(up=kind, down=kind, feedback=MomentumCorrection()), 1)
    due = {name: torch.zeros(g.numel()) for name, g in gradients(0, 0).items()}
    for expected in sgd_updates(False):
        delivered = world.run()[0]
        for name, update in expected.items():
            due[name] += torch.frombuffer(bytearray(update), dtype=torch.float32) - delivered[name]
    for name, owed in world.owed().items():
        torch.testing.assert_close(due[name].double(), owed, rtol=1e-3, atol=1e-4)


def test_masking_under_a_shared_mask() -> None:
    kind = RandomK(density=0.25, block=4, value_dtype=torch.float32)
    world = World(TwoShot(up=kind, down=kind, feedback=MomentumCorrection()), 2)
    world.run()
    for state in world.states:
        u, v = (state.whole[slot]["layer.weight"] for slot in (Slot.MOMENTUM, Slot.WORKER))
        assert torch.equal(u == 0, v == 0)
        assert 0.2 < float((u == 0).float().mean()) < 0.3


def test_what_composed_kinds_send_is_masked() -> None:
    kind = parse_recipe("topk:0.1~int8").up
    world = World(TwoShot(up=kind, down=kind, feedback=MomentumCorrection()), 2)
    world.run()
    for state in world.states:
        assert 0.08 < float((state.whole[Slot.MOMENTUM]["layer.weight"] == 0).float().mean()) < 0.11


# --- without masking ------------------------------------------------------------------------------------------------


class PaperNag:
    """The momentum of CLAN's system, for one rank and partition, in float64: m <- mu m + g, and g + mu m is sent."""

    def __init__(self, numel: int, k: int, momentum: float) -> None:
        self.m, self.e, self.k, self.momentum = np.zeros(numel), np.zeros(numel), k, momentum

    def step(self, g: np.ndarray) -> np.ndarray:
        self.m = self.momentum * self.m + g
        q = g + self.momentum * self.m + self.e
        sent = np.zeros_like(q)
        kept = np.lexsort((np.arange(len(q)), -np.abs(q)))[: self.k]
        sent[kept] = q[kept]
        self.e = q - sent
        return sent


@pytest.mark.parametrize("world_size", [1, 3])
def test_nag_is_the_papers_momentum_of_workers(world_size: int) -> None:
    kind = TopK(density=0.05, value_dtype=torch.float32)
    world = World(TwoShot(up=kind, down=Identity(), feedback=parse_recipe("topk:0.05@nag:0.8").feedback), world_size)
    papers = {
        (rank, p.name, p.offset): PaperNag(p.numel, kind.num_kept(p.numel), 0.8)
        for rank in range(world_size)
        for param in world.plan.params
        for p in param.partitions
    }
    for step in range(NUM_STEPS):
        delivered = world.run()[0]
        for p in (p for param in world.plan.params for p in param.partitions):
            place = slice(p.offset, p.offset + p.numel)
            sent = [
                papers[rank, p.name, p.offset].step(gradients(rank, step)[p.name][place].double().numpy())
                for rank in range(world_size)
            ]
            np.testing.assert_allclose(delivered[p.name][place].numpy(), np.mean(sent, axis=0), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["topk:0.1:fp32", "onebit", "randomk:0.25:fp32"])
def test_without_masking_what_is_delivered_and_owed_is_the_sum_of_nesterovs_steps(kind: str) -> None:
    world = World(parse_recipe(f"{kind}@nag"), 1)
    due = {name: torch.zeros(g.numel()) for name, g in gradients(0, 0).items()}
    for expected in sgd_updates(True):
        delivered = world.run()[0]
        for name, update in expected.items():
            due[name] += torch.frombuffer(bytearray(update), dtype=torch.float32) - delivered[name]
    for name, owed in world.owed().items():
        torch.testing.assert_close(due[name].double(), owed, rtol=1e-3, atol=1e-4)


def test_unbiased_kinds_keep_the_momentum_and_nothing_else() -> None:
    for recipe in ("linear:5@nag", "natural:3@nag", "fp16@nag"):
        lossy = {Slot.WORKER, Slot.OWNER} if recipe.startswith("fp16") else set()
        assert parse_recipe(recipe).slots == lossy | {Slot.MOMENTUM}
    with pytest.raises(RecipeError, match="unbiased kinds diverge"):
        parse_recipe("linear:5@dgc")
    world, exact = World(parse_recipe("linear:8@nag"), 3), World(parse_recipe("identity@nag"), 3)
    for _ in range(NUM_STEPS):
        ours, theirs = world.run()[0], exact.run()[0]
        for name, mean in theirs.items():
            error = float((ours[name] - mean).norm() / mean.norm()) if mean.numel() > 1 else 0.0
            assert error < 0.05


# --- clipping -------------------------------------------------------------------------------------------------------


def test_the_bound_is_the_papers() -> None:
    """Of a rank's share g/n of the mean, it is c n^-1/2."""
    feedback = MomentumCorrection(clip=2.0)
    for world_size in (1, 4, 9):
        largest = feedback.largest_norm(world_size)
        assert largest is not None
        assert largest / world_size == pytest.approx(2.0 * world_size**-0.5)
    assert MomentumCorrection().largest_norm(4) is None


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_momentum_out_of_range(momentum: float) -> None:
    with pytest.raises(RecipeError, match=r"momentum in \[0, 1\)"):
        MomentumCorrection(momentum=momentum)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_clip_out_of_range(clip: float) -> None:
    with pytest.raises(RecipeError, match="clip above 0"):
        MomentumCorrection(clip=clip)


def planned(policy, shapes=SHAPES, dtype=torch.float32):
    return build_plan([(name, torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()], policy, 2)


def test_what_stays_dense_gets_the_momentum_too() -> None:
    dgc = MomentumCorrection(momentum=0.8)
    kind = TopK(density=0.1)
    compressed = TwoShot(up=kind, down=kind, feedback=dgc)
    through_owners: Aggregator = TwoShot(up=Identity(), down=Identity(), feedback=dgc)
    plan = planned(lambda info: compressed if info.name == "head.weight" else None)
    for param in plan.params:
        assert param.aggregator == (compressed if param.info.name == "head.weight" else through_owners)
        assert Slot.MOMENTUM in param.slots
        assert (Slot.WORKER in param.slots) == (param.info.name == "head.weight")
    assert all(param.reason for param in planned("topk:0.1@dgc").params)  # all are too small
    assert {param.aggregator.feedback for param in planned("topk:0.1@dgc").params} == {None}


def test_momentum_for_some_is_refused() -> None:
    for policy in (
        {"head.*": "topk:0.1@dgc", "*": "int8"},
        lambda info: parse_recipe("topk:0.1@dgc" if info.name == "gain" else "int8"),
    ):
        with pytest.raises(PlanError, match=r"expected MomentumCorrection.*as for other parameters.*got None"):
            planned(policy, dict.fromkeys(SHAPES, (300, 300)))
    with pytest.raises(PlanError, match="expected one momentum"):
        planned({"head.*": "topk:0.1@dgc:0.8", "*": "topk:0.1@dgc"}, dict.fromkeys(SHAPES, (300, 300)))


def test_a_dtype_that_gets_no_momentum_is_refused() -> None:
    params = [("a", torch.zeros(300, 300)), ("b", torch.zeros(300, 300, dtype=torch.float64))]
    with pytest.raises(PlanError, match=r"b: expected Momentum.*got torch.float64"):
        build_plan(params, "topk:0.1@dgc", 2)
    assert build_plan(params, "topk:0.1", 2).by_name["b"].aggregator == Dense()
