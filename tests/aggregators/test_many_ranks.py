"""16 bits on the wire among 64 ranks: sums in float32 neither overflow nor lose what is small."""

import pytest
import torch
from world import World

from thinwire import Cast, TwoShot
from thinwire.compressors import Compressor

HALVES: list[tuple[Compressor, float]] = [
    (Cast(dtype=torch.float16), 2.0**-11),
    (Cast(dtype=torch.bfloat16), 2.0**-8),
]


def _mean_of(value: torch.Tensor, kind: Compressor) -> torch.Tensor:
    world = World(TwoShot(up=kind, down=kind), 64, shapes={"w": (50,)})
    return world.run([{"w": row} for row in value])[0]["w"]


@pytest.mark.parametrize(("kind", "half_step"), HALVES, ids=str)
def test_the_mean_of_64_ranks_errs_by_one_rounding_each_way(kind: Compressor, half_step: float) -> None:
    value = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    exact = value.double().mean(dim=0)
    bound = half_step * (value.double().abs().mean(dim=0) + 1.01 * exact.abs()) + half_step**2
    assert bool(((_mean_of(value, kind) - exact).abs() <= bound).all())


@pytest.mark.parametrize(("kind", "half_step"), HALVES, ids=str)
def test_large_and_small_values_of_64_ranks_survive(kind: Compressor, half_step: float) -> None:
    assert (_mean_of(torch.full((64, 50), 40000.0), kind) - 40000.0).abs().max() <= 40000 * 2 * half_step
    assert (_mean_of(torch.full((64, 50), 1e-7), kind) > 0).all()
