"""Kinds whose decoders draw too use one stream on all ranks and both hops; all others draw for themselves."""

import pytest
import torch
from world import SHAPES, World, gradients

from thinwire import BlockQuant, ErrorFeedback, Gather, RandomK, TwoShot
from thinwire.errors import RecipeError

EF = ErrorFeedback()


def random_k(**settings) -> TwoShot:
    compressor = RandomK(value_dtype=torch.float32, **settings)
    return TwoShot(up=compressor, down=compressor, feedback=EF)


@pytest.mark.parametrize("aggregator", [random_k(density=0.2), random_k(density=0.5, block=8, rotating=True)])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_second_hop_loses_nothing(aggregator: TwoShot, world_size: int) -> None:
    world = World(aggregator, world_size)
    values = world.run()
    for name in SHAPES:
        mean = sum(gradients(rank, 0)[name] for rank in range(world_size)) / world_size
        sent = values[0][name] != 0
        torch.testing.assert_close(values[0][name], torch.where(sent, mean, 0.0), rtol=1e-5, atol=1e-7)
    assert any(bool((values[0][name] != 0).any()) for name in SHAPES)
    for state in world.states:
        assert not any(bool(residual.any()) for residual in state.owner.values())


def test_ranks_share_the_mask() -> None:
    world = World(random_k(density=0.3), 3)
    world.run()
    masks = [{name: residual == 0 for name, residual in state.worker.items()} for state in world.states]
    assert all(torch.equal(mask[name], masks[0][name]) for mask in masks for name in mask)
    world.run()
    again = {name: residual == 0 for name, residual in world.states[0].worker.items()}
    assert any(not torch.equal(again[name], masks[0][name]) for name in again), "new every step"


def test_rounding_stays_private() -> None:
    world = World(Gather(up=BlockQuant(bits=4, rounding="stochastic")), 2)
    same = gradients(0, 0)
    values = world.run([same, same])
    levels = World(Gather(up=BlockQuant(bits=4, rounding="stochastic")), 1).run([same])
    assert any(not torch.equal(values[0][name], levels[0][name]) for name in same), "two ranks, two draws"


def test_one_mask_is_not_scaled_for_twice() -> None:
    scaled = RandomK(density=0.1, scaled=True)
    with pytest.raises(RecipeError, match=r"share one mask.*expected it in one hop"):
        TwoShot(up=scaled, down=scaled)
    TwoShot(up=BlockQuant(bits=8), down=scaled)
    TwoShot(up=scaled, down=BlockQuant(bits=8))


def test_scaled_random_k_is_unbiased_over_steps() -> None:
    world = World(Gather(up=RandomK(density=0.5, scaled=True)), 2)
    grads = [gradients(rank, 0) for rank in range(2)]
    total = torch.zeros(528)
    for _ in range(400):
        total += world.run(grads)[0]["layer.weight"]
    mean = (grads[0]["layer.weight"] + grads[1]["layer.weight"]) / 2
    assert ((total / 400 - mean).abs() <= 4.5 * mean.abs() / 20).all()
