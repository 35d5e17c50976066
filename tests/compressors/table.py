"""The compressors that tests go through. A new kind is a line here, and gets every test."""

import torch
from alone import Alone

from thinwire import (
    BlockCast,
    BlockQuant,
    BlockSpec,
    Cast,
    Compose,
    Compressor,
    FixedPoint,
    GlobalExponential,
    GlobalLinear,
    Identity,
    LinearDithering,
    LowRank,
    MinMax,
    NaturalCompression,
    NaturalDithering,
    OneBit,
    RandomK,
    Scaled,
    Sign,
    TernGrad,
    TopK,
    TopKC,
)
from thinwire.errors import RecipeError
from thinwire.random import Key, parameter_key

TABLE: list[Compressor] = [
    Identity(),
    Cast(dtype=torch.float16),
    Cast(dtype=torch.bfloat16),
    BlockQuant(bits=8),
    BlockQuant(bits=8, block=64),
    BlockQuant(bits=8, rounding="stochastic"),
    BlockQuant(bits=8, block=64, rounding="stochastic"),
    BlockQuant(bits=4),
    BlockQuant(bits=4, block=34),
    BlockQuant(bits=4, rounding="stochastic"),
    BlockQuant(bits=4, block=64, rounding="stochastic"),
    *(BlockQuant(bits=bits) for bits in (2, 3, 5, 6, 7)),
    *(BlockQuant(bits=bits, rounding="stochastic") for bits in (2, 3, 5, 6, 7)),
    BlockQuant(bits=7, block=34, rounding="stochastic"),
    BlockQuant(bits=8, rotation=128),
    BlockQuant(bits=4, rotation=32),
    BlockQuant(bits=4, block=64, rounding="stochastic", rotation=32),
    BlockCast(format="e4m3"),
    BlockCast(format="e4m3", block=64),
    BlockCast(format="e5m2"),
    BlockCast(format="e3m0"),
    BlockCast(format="e3m0", block=34),
    LinearDithering(bits=5),
    LinearDithering(bits=8, norm="l2"),
    LinearDithering(bits=4, norm="l2", block=512),
    LinearDithering(bits=2, block=64),
    NaturalDithering(bits=2),
    NaturalDithering(bits=3),
    NaturalDithering(bits=5, norm="l2"),
    NaturalDithering(bits=8, block=64),
    NaturalDithering(bits=3, norm="l2", block=512),
    NaturalCompression(bits=8),
    NaturalCompression(bits=9),
    TernGrad(),
    TernGrad(block=64),
    TernGrad(clip=2.5),
    TernGrad(block=34, clip=1.0),
    MinMax(bits=8),
    MinMax(bits=8, block=512),
    MinMax(bits=4),
    MinMax(bits=4, block=34),
    *(MinMax(bits=bits, block=512) for bits in (1, 2, 3)),
    MinMax(bits=8, rounding="stochastic"),
    MinMax(bits=4, block=512, rounding="stochastic"),
    MinMax(bits=1, block=64, rounding="stochastic"),
    MinMax(bits=8, rule="bagua"),
    MinMax(bits=8, rule="bagua", block=512),
    MinMax(bits=4, rule="bagua", block=64),
    MinMax(bits=2, rule="bagua", block=512),
    FixedPoint(bits=8),
    FixedPoint(bits=8, block=64),
    FixedPoint(bits=4, block=512),
    *(FixedPoint(bits=bits, block=34) for bits in (2, 3, 5)),
    OneBit(),
    OneBit(scale="rms"),
    Sign(),
    Sign(ties="random"),
    TopK(density=0.01),
    TopK(density=0.1),
    TopK(density=1.0),
    TopK(density=0.01, value_dtype=torch.float32),
    TopK(density=0.1, value_dtype=torch.float32),
    TopK(density=1.0, value_dtype=torch.float32),
    TopK(density=0.1, value_dtype=torch.bfloat16),
    TopK(density=0.1, value_dtype="natural"),
    TopK(k=20, value_dtype="natural", chunked=True),
    TopK(density=0.1, selection="bisect"),
    TopK(k=20, value_dtype=torch.float32, selection="sampled", chunked=True),
    RandomK(density=0.1),
    RandomK(density=0.1, value_dtype=torch.float32, block=7),
    RandomK(density=0.7, value_dtype=torch.bfloat16),
    RandomK(density=0.1, rotating=True),
    RandomK(density=0.25, rotating=True, block=16, value_dtype=torch.float32),
    RandomK(density=0.1, scaled=True),
    RandomK(density=0.3, scaled=True, block=7),
    Alone(inner=GlobalLinear(bits=8)),
    Alone(inner=GlobalLinear(bits=4, norm="l2")),
    Alone(inner=GlobalLinear(bits=8, halving=True)),
    Alone(inner=GlobalLinear(bits=4, across="l2")),
    Alone(inner=GlobalExponential()),
    Alone(inner=GlobalExponential(norm="l2", across="l2")),
    Alone(inner=TernGrad(shared=True)),
    Alone(inner=TernGrad(shared=True, block=64)),
    Alone(inner=TopKC(density=0.1, chunk=16)),
    Alone(inner=TopKC(density=0.3, value_dtype=torch.float32)),
    LowRank(rank=4),
    LowRank(rank=1, num_iterations=1, value_dtype=torch.float32),
    LowRank(rank=2, value_dtype=torch.bfloat16),
    *(
        Compose(first=TopK(density=0.1, value_dtype=torch.float32), then=then)
        for then in (
            BlockQuant(bits=8),
            BlockQuant(bits=4, block=34),
            BlockQuant(bits=8, rounding="stochastic"),
            OneBit(),
            NaturalDithering(bits=5),
            Scaled(inner=LinearDithering(bits=2)),
        )
    ),
    Compose(first=TopK(k=20, value_dtype=torch.float32, chunked=True), then=BlockCast(format="e5m2")),
    Compose(first=TopK(density=0.1, value_dtype=torch.float32, selection="sampled"), then=BlockQuant(bits=8)),
    Compose(first=RandomK(density=0.3, value_dtype=torch.float32, block=7), then=BlockQuant(bits=4)),
    Scaled(inner=LinearDithering(bits=3)),
    Scaled(inner=NaturalDithering(bits=2, norm="l2")),
    Scaled(inner=BlockQuant(bits=2, rounding="stochastic")),
]

KEY = Key(parameter_key(0, "layer.weight"), step=3, stream=1)


def name(compressor: Compressor) -> str:
    return compressor.recipe()


def too_long(compressor: Compressor, numel: int) -> bool:
    """Return whether blocks of so many elements are refused: 16-bit indices have no room."""
    try:
        compressor.nbytes(BlockSpec(shape=(numel,)))
    except RecipeError:
        return True
    return False
