"""Two-way error feedback against an independent NumPy version in float64 (algorithm 4 of the CLAN paper).

Worker i sends C(g_i + e_i) and keeps what is missing; the server sends C(mean + e') and keeps what is missing.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from world import SHAPES, World, gradients

from thinwire import Compressor, ErrorFeedback, OneBit, TopK, TwoShot

Array = np.ndarray


def top_k(density: float) -> Callable[[Array], Array]:
    def compress(v: Array) -> Array:
        k = min(len(v), max(1, int(density * len(v))))
        kept = np.lexsort((np.arange(len(v)), -np.abs(v)))[:k]
        sent = np.zeros_like(v)
        sent[kept] = v[kept]
        return sent

    return compress


def one_bit(v: Array) -> Array:
    return np.where(v >= 0, 1.0, -1.0) * np.abs(v).sum() / len(v)


def one_bit_rms(v: Array) -> Array:
    """DeepSpeed's 1-bit Adam: compressed_allreduce keeps the norm."""
    return np.where(v >= 0, 1.0, -1.0) * np.sqrt(np.square(v).sum() / len(v))


class Reference:
    """The algorithm for one partition."""

    def __init__(self, compress: Callable[[Array], Array], world_size: int, numel: int, decay: float) -> None:
        self.compress, self.decay = compress, decay
        self.worker = np.zeros((world_size, numel))
        self.server = np.zeros(numel)

    def step(self, grads: Array) -> Array:
        q = grads + self.decay * self.worker
        sent = np.stack([self.compress(row) for row in q])
        self.worker = q - sent
        total = sent.mean(axis=0) + self.decay * self.server
        delivered = self.compress(total)
        self.server = total - delivered
        return delivered


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize(
    ("compressor", "compress"),
    [
        (TopK(density=0.05, value_dtype=torch.float32), top_k(0.05)),
        (OneBit(), one_bit),
        (OneBit(scale="rms"), one_bit_rms),
    ],
    ids=["topk", "onebit", "onebit:rms"],
)
def test_two_way_error_feedback(
    compressor: Compressor, compress: Callable[[Array], Array], decay: float, world_size: int
) -> None:
    world = World(TwoShot(up=compressor, down=compressor, feedback=ErrorFeedback(decay=decay)), world_size)
    references = {
        (p.name, p.offset): Reference(compress, world_size, p.numel, decay)
        for param in world.plan.params
        for p in param.partitions
    }
    assert len(references) > len(SHAPES), "some parameters have several partitions"
    for step in range(8):
        delivered = world.run()[0]
        grads = [gradients(rank, step) for rank in range(world_size)]
        for (name, offset), reference in references.items():
            place = slice(offset, offset + len(reference.server))
            expected = reference.step(np.stack([g[name][place].double().numpy() for g in grads]))
            np.testing.assert_allclose(delivered[name][place].numpy(), expected, rtol=2e-5, atol=2e-6)
            for rank, state in enumerate(world.states):
                residual = state.worker[name][place].numpy()
                np.testing.assert_allclose(residual, reference.worker[rank], rtol=2e-5, atol=2e-6)
                if (name, offset) in state.owner:
                    np.testing.assert_allclose(state.owner[name, offset], reference.server, rtol=2e-5, atol=2e-6)
