"""Whole exchanges whose kernels are the Triton ones, in the interpreter: the means and residuals of the others.

As on a GPU: values beside a device, blocks in its memory or in pinned memory, and what several ranks' bytes are merged
or counted by, too.
"""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire import (
    BlockQuant,
    ErrorFeedback,
    Gather,
    GlobalExponential,
    GlobalLinear,
    MomentumCorrection,
    OneBit,
    Sign,
    SumOnWire,
    TopK,
    TreeReduce,
    TwoShot,
)
from thinwire.aggregators import Aggregator, BufferPool, Message, MessageLayout

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("aggregators", "distributed", "server")]

from late_device import LateDevice  # noqa: E402  # where they lie has to be known first
from test_staging import StagedWorld  # noqa: E402
from world import World, bits  # noqa: E402

pytestmark = pytest.mark.triton_interpreter
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 and Triton", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

EF = ErrorFeedback()
INT4, TOP_K = BlockQuant(bits=4), TopK(density=0.1)
AGGREGATORS: list[Aggregator] = [
    TwoShot(up=INT4, down=INT4, feedback=EF),
    TwoShot(up=TOP_K, down=TOP_K, feedback=MomentumCorrection()),
    Gather(up=OneBit(), feedback=EF),
    Gather(up=Sign()),
    SumOnWire(up=GlobalLinear(bits=8)),
    TreeReduce(up=GlobalExponential()),
]
SHAPES = {"weight": (6, 40), "bias": (9,)}


class OnDeviceWorld(StagedWorld):
    """Blocks stay on the device, as with NCCL."""

    def message(self, layout: MessageLayout, rank: int) -> Message:
        return Message(layout, [], rank, self.step, buffers=BufferPool(self.stagings[rank].device.allocate))

    def exchange(self, message: Message):  # type: ignore[no-untyped-def]
        return World.exchange(self, message)


@pytest.mark.parametrize("kind", [StagedWorld, OnDeviceWorld])
@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda a: f"{type(a).__name__}-{a.recipe()}")
def test_the_bits_are_those_of_the_other_kernels(
    aggregator: Aggregator, kind: type[StagedWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = World(aggregator, 2, shapes=SHAPES), kind(aggregator, 2, shapes=SHAPES)
    expected = [plain.run() for _ in range(2)]
    backend = importlib.import_module("thinwire.kernels.triton_backend")
    called: list[str] = []

    def serving_device(where: torch.Tensor) -> object:
        called.append(str(where.device))
        return backend

    for module in ("thinwire.kernels", "thinwire.aggregators.message"):
        monkeypatch.setattr(f"{module}.serving_device", serving_device)
    with np.errstate(all="ignore"):  # the interpreter computes in NumPy, which warns of inf and nan
        delivered = [ours.run() for _ in range(2)]
    assert called
    assert [[bits(values) for values in step] for step in delivered] == [
        [bits(values) for values in step] for step in expected
    ]
    assert ours.residuals() == plain.residuals()
    assert all(isinstance(staging.device, LateDevice) for staging in ours.stagings)
