"""The aggregators that tests go through, and steps of each. A new kind is a line of `TABLE`, and gets every test."""

import functools

import torch
from world import Values, World

from thinwire import (
    EF21,
    BlockQuant,
    Cast,
    Compressor,
    Dense,
    ErrorFeedback,
    Gather,
    GlobalExponential,
    GlobalLinear,
    Hierarchical,
    Identity,
    LowRank,
    MomentumCorrection,
    OneBit,
    PowerSGD,
    RandomK,
    Sign,
    SumOnWire,
    TernGrad,
    TopK,
    TopKC,
    TreeReduce,
    TwoShot,
)
from thinwire.aggregators import Aggregator
from thinwire.recipes import default_feedback

COMPRESSORS: list[Compressor] = [
    Identity(),
    Cast(dtype=torch.float16),
    Cast(dtype=torch.bfloat16),
    BlockQuant(bits=8),
    BlockQuant(bits=8, block=64, rounding="stochastic"),
    BlockQuant(bits=4),
    BlockQuant(bits=4, block=64, rounding="stochastic"),
    OneBit(),
    OneBit(scale="rms"),
    TopK(density=0.01),
    TopK(density=0.1, value_dtype=torch.float32),
    RandomK(density=0.1, value_dtype=torch.float32),
    RandomK(density=0.25, block=4, rotating=True),
    LowRank(rank=2),
    LowRank(rank=1, num_iterations=1, value_dtype=torch.float32),
]
DITHER = BlockQuant(bits=4, block=64, rounding="stochastic")
EF, DGC = ErrorFeedback(), MomentumCorrection()
ONE_BIT = TwoShot(up=OneBit(), down=OneBit(), feedback=EF)
TABLE: list[Aggregator] = [
    Dense(),
    Dense(wire_dtype=torch.float16),
    *(TwoShot(up=c, down=c, feedback=default_feedback(c)) for c in COMPRESSORS),
    TwoShot(up=BlockQuant(bits=8), down=BlockQuant(bits=8), feedback=EF),
    TwoShot(up=TopK(density=0.1), down=Identity(), feedback=EF),
    TwoShot(up=Identity(), down=OneBit(), feedback=EF),
    TwoShot(up=BlockQuant(bits=4), down=Cast(), feedback=EF),
    Gather(up=Identity()),
    Gather(up=Cast(dtype=torch.bfloat16)),
    Gather(up=BlockQuant(bits=8, block=64, rounding="stochastic")),
    Gather(up=OneBit(), feedback=EF),
    Gather(up=TopK(density=0.1), feedback=EF),
    Gather(up=LowRank(rank=3), feedback=EF),
    TwoShot(up=LowRank(rank=1), down=BlockQuant(bits=8), feedback=EF),
    Gather(up=RandomK(density=0.5, scaled=True)),
    TwoShot(up=TopK(density=0.1), down=TopK(density=0.1), feedback=DGC),
    TwoShot(up=RandomK(density=0.25, block=4), down=OneBit(), feedback=MomentumCorrection(momentum=0.5, clip=1.0)),
    TwoShot(up=Identity(), down=Identity(), feedback=DGC),
    TwoShot(up=BlockQuant(bits=4), down=Identity(), feedback=MomentumCorrection(nesterov=True)),
    Gather(up=TopK(density=0.1), feedback=DGC),
    TwoShot(up=TopK(density=0.1), down=TopK(density=0.1), feedback=EF21()),
    TwoShot(up=BlockQuant(bits=4), down=Identity(), feedback=EF21()),
    TwoShot(up=Identity(), down=OneBit(), feedback=EF21()),
    Gather(up=OneBit(), feedback=EF21()),
    Gather(up=Sign()),
    Gather(up=Sign(ties="random")),
    Gather(up=TernGrad(shared=True)),
    TwoShot(up=TernGrad(shared=True, block=64), down=TernGrad()),
    SumOnWire(up=RandomK(density=0.5, scaled=True, value_dtype=torch.float32)),
    SumOnWire(up=RandomK(density=0.5, value_dtype=torch.bfloat16), feedback=EF),
    SumOnWire(up=RandomK(density=0.25, block=4), feedback=EF),
    SumOnWire(up=RandomK(density=0.25, rotating=True, value_dtype=torch.float32), feedback=DGC),
    SumOnWire(up=GlobalLinear(bits=8)),
    SumOnWire(up=GlobalLinear(bits=8, norm="l2", across="l2")),
    SumOnWire(up=TopKC(density=0.3, chunk=8), feedback=EF),
    SumOnWire(up=TopKC(density=0.3, chunk=16, value_dtype=torch.float32), feedback=DGC),
    TreeReduce(up=GlobalLinear(bits=8, halving=True)),
    TreeReduce(up=GlobalLinear(bits=4, halving=True, norm="l2")),
    TreeReduce(up=GlobalExponential()),
    TreeReduce(up=GlobalExponential(across="l2")),
    Hierarchical(up=Identity(), down=Identity(), node_sizes=2),
    Hierarchical(up=BlockQuant(bits=8), down=BlockQuant(bits=8), node_sizes=3),
    Hierarchical(up=OneBit(), down=OneBit(), feedback=EF, node_sizes=2),
    Hierarchical(up=TopK(density=0.1), down=Identity(), feedback=EF, inner_dtype=torch.float16, node_sizes=2),
    Hierarchical(up=LowRank(rank=2), down=BlockQuant(bits=4), feedback=EF, inner_dtype=torch.bfloat16, node_sizes=3),
    Hierarchical(up=DITHER, down=DITHER, node_sizes=2),
    PowerSGD(rank=2),
    PowerSGD(rank=1, alternating=True),
    PowerSGD(rank=3, error="aggregated"),
    PowerSGD(rank=2, feedback=ErrorFeedback(decay=1.0, lr_correction=True)),
]
WITH_FEEDBACK = [a for a in TABLE if a.feedback is not None]


def ident(value: object) -> str:
    if isinstance(value, Aggregator):
        return f"{type(value).__name__}-{value.recipe()}"
    return value.recipe() if isinstance(value, Compressor) else str(value)


NUM_STEPS = 5


@functools.cache
def history(aggregator: Aggregator, world_size: int) -> tuple[World, list[list[Values]], list[list[int]]]:
    """Run some steps once for several tests; return the world, what was delivered, and the bytes that were sent."""
    world = World(aggregator, world_size, message_nbytes=1500)
    delivered, sent = [], []
    for _ in range(NUM_STEPS):
        delivered.append(world.run())
        sent.append(world.sent_nbytes)
    return world, delivered, sent
