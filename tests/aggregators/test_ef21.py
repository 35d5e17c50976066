"""EF21, one and two ways, against an independent NumPy version in float64; and what it is for."""

import numpy as np
import pytest
import torch
from world import SHAPES, World, gradients

from thinwire import EF21, ErrorFeedback, Gather, Identity, OneBit, TopK, TwoShot
from thinwire.feedback import Slot

TOP_K = TopK(density=0.05, value_dtype=torch.float32)


def top_k(v: np.ndarray) -> np.ndarray:
    kept = np.lexsort((np.arange(len(v)), -np.abs(v)))[: TOP_K.num_kept(len(v))]
    sent = np.zeros_like(v)
    sent[kept] = v[kept]
    return sent


def exact(v: np.ndarray) -> np.ndarray:
    return v


class Paper:
    """EF21-BC for one partition; with an exact way down it is EF21."""

    def __init__(self, world_size: int, numel: int, up, down) -> None:
        self.up, self.down = up, down
        self.g = np.zeros((world_size, numel))
        self.delivered = np.zeros(numel)

    def step(self, grads: np.ndarray) -> np.ndarray:
        self.g = self.g + np.stack([self.up(row) for row in grads - self.g])
        self.delivered = self.delivered + self.down(self.g.mean(axis=0) - self.delivered)
        return self.delivered


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize(
    ("aggregator", "up", "down"),
    [
        (TwoShot(up=TOP_K, down=TOP_K, feedback=EF21()), top_k, top_k),
        (TwoShot(up=TOP_K, down=Identity(), feedback=EF21()), top_k, exact),
        (TwoShot(up=Identity(), down=TOP_K, feedback=EF21()), exact, top_k),
        (Gather(up=TOP_K, feedback=EF21()), top_k, exact),
    ],
    ids=["two-way", "up", "down", "gather"],
)
def test_it_is_the_papers_algorithm(aggregator, up, down, world_size: int) -> None:
    world = World(aggregator, world_size)
    partitions = [p for param in world.plan.params for p in param.partitions]
    papers = {(p.name, p.offset): Paper(world_size, p.numel, up, down) for p in partitions}
    for step in range(8):
        delivered = world.run()[0]
        for p in partitions:
            place, paper = slice(p.offset, p.offset + p.numel), papers[p.name, p.offset]
            grads = [gradients(rank, step)[p.name][place].double().numpy() for rank in range(world_size)]
            expected = paper.step(np.stack(grads))
            np.testing.assert_allclose(delivered[p.name][place].numpy(), expected, rtol=2e-5, atol=2e-6)
            for rank, state in enumerate(world.states):
                if Slot.ESTIMATE in aggregator.slots:
                    estimate = state.whole[Slot.ESTIMATE][p.name][place].numpy()
                    np.testing.assert_allclose(estimate, paper.g[rank], rtol=2e-5, atol=2e-6)
                if (p.name, p.offset) in state.owned[Slot.MEAN]:
                    mean = state.owned[Slot.MEAN][p.name, p.offset].numpy()
                    np.testing.assert_allclose(mean, paper.g.mean(axis=0), rtol=2e-5, atol=2e-6)


def test_what_is_kept_follows_from_what_is_lost() -> None:
    cases = {
        TwoShot(up=TOP_K, down=TOP_K, feedback=EF21()): {Slot.ESTIMATE, Slot.MEAN, Slot.DELIVERED},
        TwoShot(up=TOP_K, down=Identity(), feedback=EF21()): {Slot.ESTIMATE, Slot.MEAN},
        TwoShot(up=Identity(), down=OneBit(), feedback=EF21()): {Slot.DELIVERED},
        TwoShot(up=Identity(), down=Identity(), feedback=EF21()): set(),
        Gather(up=TOP_K, feedback=EF21()): {Slot.ESTIMATE, Slot.DELIVERED},
    }
    for aggregator, slots in cases.items():
        assert aggregator.slots == slots


@pytest.mark.parametrize("kind", [TopK(density=0.2, value_dtype=torch.float32), OneBit()], ids=["topk", "onebit"])
def test_the_error_of_steady_gradients_goes_to_zero(kind) -> None:
    """Where error feedback's does not: it delivers each value now and then, and more than it is then."""
    same = [gradients(rank, 0) for rank in range(3)]
    means = {name: torch.stack([own[name] for own in same]).mean(dim=0) for name in SHAPES}
    last = {}
    for feedback in (EF21(), ErrorFeedback()):
        world = World(TwoShot(up=kind, down=kind, feedback=feedback), 3)
        delivered = [world.run(same)[0] for _ in range(60)][-1]
        last[feedback] = float(torch.cat([delivered[name] - means[name] for name in SHAPES]).norm())
    norm = float(torch.cat(list(means.values())).norm())
    assert last[ErrorFeedback()] > 0.3 * norm
    assert last[EF21()] < 0.05 * norm


def test_a_receivers_sum_is_a_senders_estimate_to_the_bit() -> None:
    world = World(TwoShot(up=OneBit(), down=Identity(), feedback=EF21()), 1)
    for step in range(20):
        delivered = world.run()[0]
        for name, estimate in world.states[0].whole[Slot.ESTIMATE].items():
            assert torch.equal(delivered[name], estimate), (step, name)


def test_a_change_of_the_loss_scale_does_not_show() -> None:
    plain, scaled = (World(TwoShot(up=TOP_K, down=TOP_K, feedback=EF21()), 3) for _ in range(2))
    for step in range(4):
        grads = [gradients(rank, step) for rank in range(3)]
        scale, ratio = 2.0 ** (step // 2), 2.0 if step == 2 else 1.0
        expected = plain.run(grads)[0]
        delivered = scaled.run([{n: g * scale for n, g in own.items()} for own in grads], unit_ratio=ratio)[0]
        for name in SHAPES:
            assert torch.equal(delivered[name] / scale, expected[name])
