"""Every compressor keeps the same promises. A new one is one line in `table.py`."""

import dataclasses
import math
import pickle
import random

import numpy as np
import pytest
import torch
from alone import Alone
from hypothesis import given, settings
from hypothesis import strategies as st
from table import KEY, TABLE, name
from torch import Tensor

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
from thinwire.compressors import Additive, Contractive, Unbiased
from thinwire.errors import RecipeError, WireError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.kernels.reference_random_k import random_units
from thinwire.random import Key

TYPICAL = BlockSpec(shape=(65536,))
SHAPES = [(), (0,), (0, 3), (1,), (2,), (7,), (3, 5), (64,), (512,), (513,), (999,), (2, 3, 171)]


all_compressors = pytest.mark.parametrize("compressor", TABLE, ids=name)
stochastic_ones = pytest.mark.parametrize("compressor", [c for c in TABLE if c.stochastic], ids=name)
# Those whose levels are levels of x itself.
rounding_ones = pytest.mark.parametrize(
    "compressor",
    [
        c
        for c in TABLE
        if isinstance(c.contract(TYPICAL), Unbiased) and not c.shared_key and not getattr(c, "rotation", None)
    ],
    ids=name,
)
SCALE_FREE = [c for c in TABLE if isinstance(c, Sign)]
with_a_scale = pytest.mark.parametrize("compressor", [c for c in TABLE if c not in SCALE_FREE], ids=name)
DRAWS_ALIKE = [c for c in TABLE if isinstance(c, RandomK)]
draws_alike = pytest.mark.parametrize("compressor", DRAWS_ALIKE, ids=name)


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def spec_of(x: Tensor) -> BlockSpec:
    return BlockSpec(shape=tuple(x.shape), dtype=x.dtype)


def round_trip(compressor: Compressor, x: Tensor, key: Key = KEY) -> Tensor:
    return compressor.decode(compressor.encode(x, key), spec_of(x), key)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike `torch.equal`, tells -0 from 0 and knows nan."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


# --- sizes ----------------------------------------------------------------------------------------------------------


@all_compressors
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_layout_is_what_encode_writes(compressor: Compressor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape).to(dtype)
    spec = BlockSpec(shape=shape, dtype=dtype)
    layout = compressor.layout(spec)
    data = compressor.encode(x, KEY)

    assert data.dtype == torch.uint8
    assert data.shape == (layout.nbytes,) == (compressor.nbytes(spec),)
    end = 0
    for part in layout.parts:
        assert part.offset == end, "parts follow one another"
        assert part.offset % part.dtype.itemsize == 0
        end += part.nbytes
    assert layout.nbytes % 4 == 0
    assert 0 <= layout.nbytes - end < 4
    assert not data[end:].any(), "padding is zero"

    decoded = compressor.decode(data, spec, KEY)
    assert decoded.shape == shape
    assert decoded.dtype == torch.float32


@all_compressors
def test_encode_writes_only_into_out(compressor: Compressor) -> None:
    x = normal(333)
    nbytes = compressor.nbytes(spec_of(x))
    fresh = compressor.encode(x, KEY)
    for fill in (0x00, 0xFF, 0x5A):
        buffer = torch.full((nbytes + 64,), fill, dtype=torch.uint8)
        out = buffer[32 : 32 + nbytes]
        returned = compressor.encode(x, KEY, out=out)
        assert returned.data_ptr() == out.data_ptr()
        assert torch.equal(out, fresh), "every byte is written, whatever lay there before"
        assert (buffer[:32] == fill).all()
        assert (buffer[32 + nbytes :] == fill).all()


@all_compressors
def test_neighbours_of_a_slice_are_neither_read_nor_written(compressor: Compressor) -> None:
    whole, residuals = torch.full((700,), float("inf")), torch.full((700,), float("nan"))
    x, residual = normal(333), normal(333, seed=1)
    whole[100:433], residuals[100:433] = x, residual
    before = whole.clone()
    data = compressor.encode(whole[100:433], KEY, residual=residuals[100:433])
    assert torch.equal(data, compressor.encode(x, KEY, residual=residual))
    assert same_bits(residuals[100:433], residual)
    assert residuals[:100].isnan().all()
    assert residuals[433:].isnan().all()
    assert same_bits(whole, before), "the input is only read"


# --- what is not sent stays in the residual -------------------------------------------------------------------------


@all_compressors
@pytest.mark.parametrize("residual_scale", [1.0, 0.5, 3.7])
def test_delivered_plus_residual_is_q(compressor: Compressor, residual_scale: float) -> None:
    x, residual = normal(33, 31), normal(33, 31, seed=1, std=0.3)
    q = x + residual * residual_scale
    assert torch.equal(
        compressor.encode(x, KEY, residual=residual, residual_scale=residual_scale), compressor.encode(q, KEY)
    )
    assert same_bits(residual, q - round_trip(compressor, q))


@all_compressors
def test_nothing_is_lost_over_many_steps(compressor: Compressor) -> None:
    if getattr(compressor, "scaled", False):
        pytest.skip("diverges under feedback, which is therefore refused")
    num_steps, shape = 20 if compressor.stochastic else 60, (21, 37)  # the residuals of unbiased kinds may grow
    residual = torch.zeros(shape)
    total, delivered = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    largest = 0.0
    for step in range(num_steps):
        x = normal(*shape, seed=step, std=1.0 + step % 3)
        key = dataclasses.replace(KEY, step=step)
        data = compressor.encode(x, key, residual=residual)
        total += x
        delivered += compressor.decode(data, spec_of(x), key)
        largest = max(largest, float(residual.abs().max()) + float(x.abs().max()))
    # Each step rounds q and the residual once.
    torch.testing.assert_close(delivered + residual, total, rtol=0, atol=2 * num_steps * largest * 2.0**-24)


@all_compressors
@given(data=st.data())
@settings(max_examples=40)
def test_any_float32_is_sent_or_refused(compressor: Compressor, data: st.DataObject) -> None:
    """Denormal, huge, -0 and mixed values: what is accepted conserves q exactly, what is refused changes nothing."""
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    near, small = st.floats(-100, 100, width=32), st.floats(-(2.0**-13), 2.0**-13, width=32)
    values = data.draw(st.one_of(st.lists(kind, max_size=150) for kind in (floats, near, small)))
    x = torch.tensor(values, dtype=torch.float32)
    residual = torch.tensor(
        data.draw(
            st.lists(st.sampled_from([0.0, -0.0, 1e-45, -3.5, 1e30]), min_size=len(values), max_size=len(values))
        ),
        dtype=torch.float32,
    )
    before, q = residual.clone(), x + residual
    try:
        encoded = compressor.encode(x, KEY, residual=residual)
    except ValueError:
        assert same_bits(residual, before)
        fits = q.abs() <= 65504
        assert not q.isfinite().all() or not fits.all(), "refused though it fits any wire dtype"
        return
    assert q.isfinite().all()
    decoded = compressor.decode(encoded, spec_of(x), KEY)
    assert decoded.isfinite().all()
    assert torch.equal(residual, q - decoded)
    norms = getattr(compressor, "norm", "max"), getattr(compressor, "across", "max")
    if len(values) and compressor not in SCALE_FREE and norms == ("max", "max"):
        natural = getattr(compressor, "value_dtype", None) == "natural"  # up to the next power of two
        slack = 2.0 if isinstance(compressor, OneBit) or compressor.stochastic or natural else 1.0
        if isinstance(compressor, BlockQuant) and compressor.rotation:
            slack = 1 + compressor.rotation / compressor.levels  # steps of a whole group may add up
        slack = 2.0 if getattr(compressor, "rule", "") == "bagua" else slack  # up to the next level
        slack = len(values) if getattr(compressor, "scaled", False) else slack
        peak = q.abs().max()
        slack = max(slack, 1.0 if peak > 2.0**-110 else 1.25)  # scales of denormal values are coarse
        smallest = getattr(compressor, "smallest", 1e-44)  # what is below is rounded up to it by chance
        if torch.float16 in (getattr(compressor, "value_dtype", None), getattr(compressor, "dtype", None)):
            smallest = 2.0**-25  # half a step between denormal numbers of 16 bits
        assert decoded.abs().max() <= peak * slack * (1 + 2.0**-7) + smallest, "nothing is blown up"


@all_compressors
@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
    offset=st.integers(0, 2**40),
)
@settings(max_examples=25)
def test_any_shape(compressor: Compressor, shape: tuple[int, ...], dtype: torch.dtype, seed: int, offset: int) -> None:
    x = normal(*shape, seed=seed).to(dtype)
    key = dataclasses.replace(KEY, offset=offset)
    residual = torch.zeros(shape)
    data = compressor.encode(x, key, residual=residual)
    decoded = compressor.decode(data, BlockSpec(shape=shape, dtype=dtype), key)
    assert data.numel() == compressor.nbytes(BlockSpec(shape=shape, dtype=dtype))
    assert decoded.shape == shape
    assert torch.equal(residual, x.float() - decoded)


# --- the contract ---------------------------------------------------------------------------------------------------


def hard_blocks(n: int, smallest: float, largest: float) -> dict[str, Tensor]:
    """Blocks of n values with non-zero magnitudes in [smallest, largest], each hard for some kind."""
    smallest, largest = max(smallest, 2.0**-149), min(largest, 3.4e38)
    middle = math.sqrt(max(smallest, 1e-30) * min(largest, 1e30))
    sign = torch.where(normal(n, seed=9) < 0, -1.0, 1.0)
    one = torch.zeros(n)
    one[n // 2] = -middle
    half_steps = {}
    # Every value halfway between two levels: the largest error rounding to nearest can make.
    for levels in (1, 3, 7, 15, 31, 63, 127):
        block = torch.full((n,), middle * 0.5 / levels)
        block[0] = middle
        half_steps[f"half a step of {levels}"] = (block * sign).clamp(-largest, largest)
    for fraction in (2 / 3, 0.75, 13 / 14, 17 / 28):  # and of the levels of floats
        half_steps[f"{fraction} of the largest"] = torch.cat([torch.ones(1), torch.full((n - 1,), fraction)]) * middle
    spread = middle * 10 ** normal(n, seed=3)
    ends = torch.where(normal(n, seed=4) < 0, smallest, largest)
    low = smallest * torch.randint(1, 300, (n,), generator=torch.Generator().manual_seed(5))
    return {
        "normal": normal(n) * middle,
        "log-uniform": spread * sign,
        "equal": torch.full((n,), middle) * sign,
        "one value": one,
        "zeros": torch.zeros(n),
        "smallest and largest": ends * sign,
        "near the smallest": low * sign,
        "all largest": torch.full((n,), largest) * sign,
        **half_steps,
    }


@all_compressors
@pytest.mark.parametrize("shape", [(1,), (2,), (3, 11), (8, 8), (19, 27), (40, 50)], ids=str)
def test_contractive(compressor: Compressor, shape: tuple[int, ...]) -> None:
    contract = compressor.contract(BlockSpec(shape=shape))
    if not isinstance(contract, Contractive):
        no_bound = "sampled" in compressor.recipe() or compressor in (OneBit(scale="rms"), *SCALE_FREE)
        assert compressor.stochastic or no_bound or isinstance(contract, Additive)
        return
    num_draws = 200 if compressor.stochastic else 1
    assert 0 < contract.delta <= 1
    for what, block in hard_blocks(math.prod(shape), contract.smallest, contract.largest).items():
        size = block.abs()
        block = torch.where((size > 0) & (size < contract.smallest), torch.zeros(()), block)
        x = block.clamp(-contract.largest, contract.largest).view(shape)
        norm = x.double().square().sum()
        errors = [
            (round_trip(compressor, x, dataclasses.replace(KEY, step=i)).double() - x.double()).square().sum()
            for i in range(num_draws)
        ]
        error = torch.stack(errors).mean()
        if compressor.shared_key:
            error -= 4 * norm * math.sqrt(contract.delta / num_draws)
        elif compressor.stochastic:
            error -= 4 * torch.stack(errors).std() / math.sqrt(num_draws)
        # Scales and codes are float32: their rounding, relative to the norm.
        assert error <= (1 - contract.delta) * norm + norm * 2.0**-40 + (1 - contract.delta) * norm * 2.0**-14, what


@pytest.mark.parametrize(
    ("compressor", "block"),
    [
        (TopK(density=0.1, value_dtype=torch.float32), torch.full((50,), 3.0)),
        (TopK(density=1.0, value_dtype="natural"), torch.full((50,), -1.5)),
        (OneBit(), torch.tensor([0.0, 0.0, 5.0, 0.0])),
        (BlockQuant(bits=8), torch.tensor([127.0] + [0.5] * 511)),
        (BlockQuant(bits=4), torch.tensor([7.0] + [0.5] * 511)),
        (BlockQuant(bits=2), torch.tensor([1.0] + [0.5] * 511)),
        (MinMax(bits=8), torch.tensor([255.0, -255.0] + [0.0] * 510)),
        (BlockCast(format="e4m3"), torch.tensor([448.0] + [272.0] * 511)),
        (BlockCast(format="e5m2"), torch.tensor([57344.0] + [36864.0] * 511)),
        (BlockCast(format="e3m0"), torch.tensor([1.0] + [0.75] * 511)),
    ],
    ids=["topk", "natural", "onebit", "int8", "int4", "int2", "minmax", "e4m3", "e5m2", "e3m0"],
)
def test_contraction_is_no_better_than_claimed(compressor: Compressor, block: Tensor) -> None:
    contract = compressor.contract(spec_of(block))
    assert isinstance(contract, Contractive)
    error = (round_trip(compressor, block) - block).double().square().sum() / block.double().square().sum()
    assert float(error) == pytest.approx(1 - contract.delta, rel=1e-5)


def ranges_of(x: Tensor, block: int | None) -> Tensor:
    """Return, per value, the range of the block that holds it."""
    pieces = x.double().split(block or max(x.numel(), 1))
    return torch.cat([(piece.max() - piece.min()).expand(piece.numel()) for piece in pieces])


@all_compressors
@pytest.mark.parametrize("n", [1, 2, 33, 64, 513, 2000])
@pytest.mark.parametrize("offset", [0.0, -3.0, 1e4])
def test_additive(compressor: Compressor, n: int, offset: float) -> None:
    contract = compressor.contract(BlockSpec(shape=(n,)))
    if not isinstance(contract, Additive):
        return
    assert 0 < contract.error <= 0.5
    blocks = hard_blocks(n, 0.0, math.inf)
    blocks["halves of a step"] = torch.arange(n) % (4 / contract.error) / 2
    for what, block in blocks.items():
        x = (block + offset).clamp(-3.4e38, 3.4e38)
        error = (round_trip(compressor, x).double() - x.double()).abs()
        rounding = 2.0**-22 * x.abs().max() + 2.0**-149
        assert (error <= contract.error * ranges_of(x, contract.block) + rounding).all(), what


def test_additive_is_no_better_than_claimed() -> None:
    x = torch.tensor([15.0, -15.0] + [0.0] * 510)
    for bits, error in ((1, 15.0), (2, 5.0), (4, 1.0)):
        compressor = MinMax(bits=bits)  # type: ignore[arg-type]
        contract = compressor.contract(spec_of(x))
        assert isinstance(contract, Additive)
        assert contract.error * 30 == pytest.approx(error)
        assert (round_trip(compressor, x) - x)[2:].abs().tolist() == pytest.approx([error] * 510)


# --- unbiased kinds -------------------------------------------------------------------------------------------------


def levels_of(compressor: Compressor, x: Tensor) -> Tensor:
    """Return what a stochastic kind rounds the block x to, ascending."""
    x = x.double()
    match compressor:
        case MinMax():
            return x.min() + (x.max() - x.min()) * torch.arange(compressor.levels + 1) / compressor.levels
        case BlockQuant() | LinearDithering():
            side = torch.arange(1, compressor.levels + 1).double() / compressor.levels
        case NaturalDithering():
            side = 2.0 ** torch.arange(1 - compressor.levels, 1).double()
        case TernGrad() | Alone(inner=TernGrad()):
            side = torch.ones(1).double()
        case NaturalCompression():
            ends = math.log2(compressor.smallest), math.ceil(math.log2(float(x.abs().max())))
            side = 2.0 ** torch.arange(ends[0], ends[1] + 1).double()
            return torch.cat([-side.flip(0), torch.zeros(1), side])
        case Alone(inner=GlobalLinear() | GlobalExponential() as inner):
            like = LinearDithering if isinstance(inner, GlobalLinear) else NaturalDithering
            return levels_of(like(bits=inner.levels.bit_length() + 1, norm=inner.norm), x)  # type: ignore[arg-type]
        case _:
            raise AssertionError(f"say what levels {compressor} has")
    scale = x.norm() if getattr(compressor, "norm", "max") == "l2" else x.abs().max()
    return torch.cat([-side.flip(0), torch.zeros(1), side]) * scale


def draws_of(compressor: Compressor, x: Tensor, num: int) -> Tensor:
    """Encode x `num` times with other random numbers each time: as many blocks of one tensor, or steps."""
    if x.numel() == getattr(compressor, "block", None):
        return round_trip(compressor, x.repeat(num)).view(num, -1).double()
    spec, nbytes = spec_of(x), compressor.nbytes(spec_of(x))
    data, draws = torch.empty(num, nbytes, dtype=torch.uint8), torch.empty(num, x.numel())
    keys = [dataclasses.replace(KEY, step=step) for step in range(num)]
    compressor.encode_jobs([EncodeJob(x, data[i], key=key) for i, key in enumerate(keys)], [spec] * num)
    compressor.decode_jobs([DecodeJob(data[i], draws[i]) for i in range(num)], [spec] * num)
    return draws.double()


def length_of(compressor: Compressor) -> int:
    return getattr(compressor, "block", None) or 512


@rounding_ones
def test_unbiased(compressor: Compressor) -> None:
    """The mean of 10,000 draws is x within 4 standard errors, one value 5, and the variance is that of the levels."""
    num_draws, n = 10_000, length_of(compressor)
    x = (torch.rand(n, generator=torch.Generator().manual_seed(1)) * 2 - 1) * 0.25
    x[30], x[31] = -0.25, 0.25
    # On levels, just beside them, halfway, and at the ends.
    levels = levels_of(compressor, x)
    levels = levels[levels >= 0]
    some = torch.cat([levels[:3], levels[-3:]])
    special = torch.cat([some, some * (1 + 1e-3), some * (1 - 1e-3), (levels[:-1] + levels[1:])[-3:] / 2])
    special = torch.cat([special, -special])[:30]
    x[: special.numel()] = special.clamp(-0.25, 0.25)
    if getattr(compressor, "norm", "max") == "l2":
        x *= 0.25 / x.norm()
    draws = draws_of(compressor, x, num_draws)

    exact = x.double()
    levels = levels_of(compressor, x)
    above = torch.searchsorted(levels, exact - exact.abs() * 2.0**-22).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    sigma = ((exact - low).clamp(min=0) * (high - exact).clamp(min=0)).sqrt()
    resolution = (high - low) * 2.0**-16 + exact.abs() * 2.0**-21  # uniforms have 16 bits; the scale has 24
    bias = (draws.mean(dim=0) - exact).abs()
    standard_error = sigma / math.sqrt(num_draws)
    assert (bias > 4 * standard_error + resolution).sum() <= 1, "one of some hundred values may stray by chance"
    assert (bias <= 5 * standard_error + resolution).all()

    near = (draws - low).abs().minimum((draws - high).abs())
    assert (near <= levels[-1] * 2.0**-20).all(), "rounds to one of the two neighbouring levels"
    contract = compressor.contract(spec_of(x))
    assert isinstance(contract, Unbiased)
    variance = (draws - exact).square().sum(dim=1).mean()
    torch.testing.assert_close(variance, sigma.square().sum(), rtol=0.05, atol=0)
    assert variance <= contract.omega * exact.square().sum() * 1.01


@pytest.mark.parametrize("fraction", [0.3, 1e-3, 2.0**-17 * 1.5, 2.0**-17 * 0.9])
def test_chance_has_16_bits(fraction: float) -> None:
    """Over all uniforms the mean is the value to 2^-17 of a step; what is smaller than that is never sent."""
    q, x = LinearDithering(bits=2), torch.full((1 << 16,), fraction)
    x[0] = 1.0
    draws = torch.cat([round_trip(q, x, Key(1, step))[1:] for step in range(64)]).double()
    sigma = math.sqrt(fraction / draws.numel())
    assert abs(float(draws.mean()) - fraction) <= 2.0**-17 + 4 * sigma
    assert bool(draws.any()) == (fraction > 2.0**-17)


@rounding_ones
def test_the_worst_block_reaches_the_claimed_variance(compressor: Compressor) -> None:
    """Omega is not loose: the block that `dither_omega` names has this variance, within 2 % (1/8: in long blocks)."""
    n = length_of(compressor)
    contract = compressor.contract(BlockSpec(shape=(n,)))
    assert isinstance(contract, Unbiased)
    x = torch.ones(n)
    levels = levels_of(compressor, x)
    if isinstance(compressor, MinMax):
        x[1], x[2:] = -1, 0
    elif getattr(compressor, "norm", "max") == "max":
        # Of natural levels those above the lowest are the worst where omega is 1/8: a third of the way up.
        x[1:] = 2 / 3 if contract.omega == 1 / 8 else levels[levels > 0][0] / (2 * (1 + contract.omega))
    elif levels[levels > 0][0] < 9 / 4:
        pytest.skip("omega is a bound here, not the least: the norm leaves no room for every value at its worst")
    draws = draws_of(compressor, x, 2000)
    variance = float((draws - x).square().sum(dim=1).mean() / x.double().square().sum())
    assert variance == pytest.approx(contract.omega, rel=0.04 if contract.omega == 1 / 8 else 0.02)


@pytest.mark.parametrize("rotation", [32, 128])
def test_rotated_rounding_is_unbiased(rotation: int) -> None:
    """The mean of 10,000 draws is x within 5 standard errors, and the variance at most omega."""
    num_draws, n = 10_000, 128
    compressor = BlockQuant(bits=4, block=n, rounding="stochastic", rotation=rotation)  # type: ignore[arg-type]
    x = torch.cat([normal(n - 4), torch.tensor([0.0, -0.0, 1e-30, 30.0])])
    for length in (n, n - 5):  # the last group whole or not
        draws = draws_of(compressor, x[-length:], num_draws)
        exact = x[-length:].double()
        assert (draws.mean(dim=0) - exact).abs().max() <= 5 * draws.std(dim=0).max() / math.sqrt(num_draws) + 1e-4
        contract = compressor.contract(BlockSpec(shape=(length,)))
        assert isinstance(contract, Unbiased)
        assert (draws - exact).square().sum(dim=1).mean() <= contract.omega * exact.square().sum()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("rotation", [32, 128])
def test_rotation_helps_heavy_tails(rotation: int, rounding: str) -> None:
    """An outlier in 512 leaves the other values few of 4 bits: rotated, the squared error is below a third."""
    x = normal(1 << 14)
    x[::512] *= 20
    plain = BlockQuant(bits=4, rounding=rounding)  # type: ignore[arg-type]
    errors = [
        (round_trip(compressor, x) - x).square().sum()
        for compressor in (plain, dataclasses.replace(plain, rotation=rotation))
    ]
    assert errors[1] < errors[0] / 3


# --- randomness -----------------------------------------------------------------------------------------------------


@rounding_ones
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_stochastic_rounding_does_not_depend_on_cuts(compressor: Compressor, cuts: int) -> None:
    """An element's uniform is picked by its place in the parameter, wherever the partition begins."""
    block = getattr(compressor, "block", None)
    if block is None and getattr(compressor, "norm", "max") == "l2":
        pytest.skip("its scale depends on the cuts")
    step = cuts * (block or 64)
    x = normal(11 * (block or 64) + 17)
    if block is None:
        x[:: step // cuts], x[1 :: step // cuts] = 5.0, -5.0  # one scale for all pieces
    whole = round_trip(compressor, x, dataclasses.replace(KEY, offset=1000))
    pieces = [
        round_trip(compressor, piece, dataclasses.replace(KEY, offset=1000 + i * step))
        for i, piece in enumerate(x.split(step))
    ]
    assert same_bits(torch.cat(pieces), whole)


@stochastic_ones
@pytest.mark.parametrize(
    "other", [Key(KEY.key + 1, 3, 1), Key(KEY.key, 4, 1), Key(KEY.key, 3, 2), Key(KEY.key, 3, 1, 1)], ids=str
)
def test_every_part_of_the_key_matters(compressor: Compressor, other: Key) -> None:
    x = normal(40, 50)
    if isinstance(compressor, RandomK) and compressor.rotating:
        assert torch.equal(compressor.encode(x, KEY), compressor.encode(x, other)) == (other.step == KEY.step)
        return
    assert not torch.equal(compressor.encode(x, KEY), compressor.encode(x, other))


@stochastic_ones
def test_stochastic_kinds_ask_for_a_key(compressor: Compressor) -> None:
    with pytest.raises(RecipeError, match="key=Key"):
        compressor.encode(normal(3))


# --- kinds that draw alike on all ranks -----------------------------------------------------------------------------


@draws_alike
def test_decoding_asks_for_the_key(compressor: RandomK) -> None:
    data, spec = compressor.encode(normal(100), KEY), BlockSpec(shape=(100,))
    with pytest.raises(RecipeError, match="key=Key"):
        compressor.decode(data, spec)
    with pytest.raises(RecipeError, match="key=Key"):
        compressor.accumulate_(torch.zeros(100), data, spec)


@draws_alike
@pytest.mark.parametrize("n", [1, 6, 7, 64, 700, 1031])
def test_exactly_k_units_are_sent(compressor: RandomK, n: int) -> None:
    """Without replacement: k whole units, each value once. The last unit, or the last turn, may be shorter."""
    x = torch.arange(1, n + 1).float()
    for step in range(30):
        sent = round_trip(compressor, x, dataclasses.replace(KEY, step=step))
        units = torch.cat([sent, torch.full((-n % compressor.block,), float("nan"))]).view(-1, compressor.block)
        whole = (units != 0).all(dim=1)
        assert torch.equal(whole, (units[:, :1] != 0).view(-1)), "a unit is sent whole or not at all"
        few = compressor.num_kept(n) - compressor.rotating
        assert few <= int(whole.sum()) <= compressor.num_kept(n)
        if not compressor.scaled:
            assert torch.equal(sent[sent != 0], x[sent != 0].to(compressor.value_dtype).float())


@draws_alike
def test_masks_are_new_every_step_and_equal_for_equal_keys(compressor: RandomK) -> None:
    x = normal(2000)
    masks = [round_trip(compressor, x, dataclasses.replace(KEY, step=step)) != 0 for step in range(4)]
    assert all(not torch.equal(masks[0], mask) for mask in masks[1:])
    assert torch.equal(masks[0], round_trip(compressor, -2 * x, dataclasses.replace(KEY, step=0)) != 0)


@pytest.mark.parametrize("compressor", [c for c in DRAWS_ALIKE if c.rotating], ids=name)
@pytest.mark.parametrize("n", [1, 9, 100, 1031])
def test_rotation_sends_every_coordinate_once(compressor: RandomK, n: int) -> None:
    turns = torch.zeros(n)
    for step in range(17, 17 + compressor.period):
        turns += round_trip(compressor, torch.ones(n), dataclasses.replace(KEY, step=step))
    assert (turns == 1).all()
    assert compressor.period == round(1 / compressor.density)


@pytest.mark.parametrize(("n", "k"), [(6, 2), (6, 4), (40, 4), (64, 63), (3, 2)])
def test_every_subset_is_equally_likely(n: int, k: int) -> None:
    """Each element is in a fraction k/n of 10,000 masks, each pair in k (k - 1) / (n (n - 1)), within 4.5 sigma."""
    num_draws = 10_000
    masks = torch.zeros(num_draws, n)
    for step in range(num_draws):
        masks[step, random_units(dataclasses.replace(KEY, step=step), n, k)] = 1
    assert (masks.sum(dim=1) == k).all()
    pairs = masks.T @ masks / num_draws
    single, both = k / n, k * (k - 1) / (n * (n - 1))
    assert (pairs.diag() - single).abs().max() <= 4.5 * math.sqrt(single * (1 - single) / num_draws)
    off = ~torch.eye(n, dtype=torch.bool)
    assert (pairs[off] - both).abs().max() <= 4.5 * math.sqrt(both * (1 - both) / num_draws)


@pytest.mark.parametrize("compressor", [c for c in DRAWS_ALIKE if c.scaled], ids=name)
def test_scaled_random_k_is_unbiased(compressor: RandomK) -> None:
    """The mean of 10,000 draws is x within 4 standard errors, and the variance is omega."""
    num_draws, n = 10_000, 70
    x = torch.cat([torch.randn(n - 4), torch.tensor([0.0, -0.0, 1e-30, 300.0])])
    draws = torch.stack(
        [round_trip(compressor, x, dataclasses.replace(KEY, step=i)) for i in range(num_draws)]
    ).double()
    contract = compressor.contract(spec_of(x))
    assert isinstance(contract, Unbiased)
    assert contract.omega == pytest.approx(compressor.num_units(n) / compressor.num_kept(n) - 1)
    exact = x.double()
    sigma = exact.abs() * math.sqrt(contract.omega)
    assert ((draws.mean(dim=0) - exact).abs() <= 4 * sigma / math.sqrt(num_draws) + exact.abs() * 2.0**-22).all()
    variance = (draws - exact).square().mean(dim=0).sum()
    assert float(variance) == pytest.approx(contract.omega * float(exact.square().sum()), rel=0.15)


@all_compressors
def test_same_bytes_on_repeated_calls_and_generators_untouched(compressor: Compressor) -> None:
    x = normal(2000)
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    first, second = compressor.encode(x, KEY), compressor.encode(x.clone(), KEY)
    compressor.decode(first, spec_of(x), KEY)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tobytes() == before[2]  # type: ignore[union-attr]


@all_compressors
def test_other_kinds_need_no_key(compressor: Compressor) -> None:
    if not compressor.stochastic:
        x = normal(100)
        assert torch.equal(compressor.encode(x), compressor.encode(x, KEY))


# --- inputs ---------------------------------------------------------------------------------------------------------


@all_compressors
def test_strides_do_not_matter(compressor: Compressor) -> None:
    x = normal(24, 31)
    for view in (
        x.t(),
        x[::2],
        x[:, 1::3],
        x.view(2, 12, 31).permute(2, 0, 1),
        x.view(1, 4, 6, 31).to(memory_format=torch.channels_last),
    ):
        assert torch.equal(compressor.encode(view, KEY), compressor.encode(view.contiguous(), KEY))
        assert compressor.decode(compressor.encode(view, KEY), spec_of(view), KEY).shape == view.shape


@all_compressors
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_inputs_are_widened_first(compressor: Compressor, dtype: torch.dtype) -> None:
    x = normal(700).to(dtype)
    narrow = round_trip(compressor, x)
    assert narrow.dtype == torch.float32
    assert same_bits(narrow, round_trip(compressor, x.float()))


@all_compressors
def test_parameters_can_be_encoded(compressor: Compressor) -> None:
    x = torch.nn.Parameter(normal(40))
    assert torch.equal(compressor.encode(x, KEY), compressor.encode(x.detach(), KEY))
    assert not compressor.encode(x, KEY).requires_grad


@with_a_scale
@pytest.mark.parametrize("n", [0, 1, 7, 64, 65, 1000])
def test_zeros_stay_zero(compressor: Compressor, n: int) -> None:
    for zero in (0.0, -0.0):
        residual = torch.zeros(n)
        x = torch.full((n,), zero)
        data = compressor.encode(x, KEY, residual=residual)
        assert not compressor.decode(data, BlockSpec(shape=(n,)), KEY).any()
        assert not residual.any()


@with_a_scale
def test_denormals_are_ordinary(compressor: Compressor) -> None:
    x = torch.tensor([1e-45, -1e-45, 3e-42, -7e-41, 1e-38, 0.0, -0.0] * 30)
    assert (x != 0).sum() == 150
    residual = torch.zeros(x.numel())
    decoded = compressor.decode(compressor.encode(x, KEY, residual=residual), spec_of(x), KEY)
    assert torch.equal(residual, x - decoded)
    scale = 1 / compressor.density if isinstance(compressor, RandomK) and compressor.scaled else 1
    if getattr(compressor, "across", "max") == "max":  # the square of a norm has only half of the range
        assert decoded.abs().max() <= max(2 * scale * float(x.abs().max()), getattr(compressor, "smallest", 0.0))
    if compressor in (Identity(), TopK(density=1.0, value_dtype=torch.float32)):
        assert torch.equal(decoded, x)


@all_compressors
def test_huge_values_are_ordinary_where_the_wire_has_room(compressor: Compressor) -> None:
    top = torch.finfo(torch.float32).max
    x = torch.tensor([top, -top, 0.7 * top, 1.0, -3.0, 0.0] * 20)
    if getattr(compressor, "statistic_of_squares", False):  # the square of a norm has only half of the range
        with pytest.raises(ValueError, match="overflow"):
            compressor.encode(x, KEY)
        return
    wire_dtype = getattr(compressor, "value_dtype", getattr(compressor, "dtype", torch.float32))
    has_room = wire_dtype == torch.float32 and getattr(compressor, "largest", top) == top
    has_room = has_room and not isinstance(compressor, FixedPoint)  # whose scales are float16
    if isinstance(compressor, RandomK) and (wire_dtype != torch.float32 or compressor.scaled):
        x = x[:1]  # whatever is drawn is huge
        compressor = dataclasses.replace(compressor, density=0.5, block=1, rotating=False)
        compressor = dataclasses.replace(compressor, density=1.0) if not compressor.scaled else compressor
    if not has_room:  # top rounds up to inf in bfloat16
        with pytest.raises(ValueError, match="overflow"):
            compressor.encode(x, KEY)
        return
    if isinstance(compressor, MinMax) and compressor.stochastic and compressor.bits == 1:
        x = x.abs()  # steps of twice the largest value leave residuals that float32 cannot hold
    residual = torch.zeros(x.numel())
    decoded = compressor.decode(compressor.encode(x, KEY, residual=residual), spec_of(x), KEY)
    assert decoded.isfinite().all()
    assert residual.isfinite().all()
    assert torch.equal(residual, x - decoded)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_residual_that_overflows_is_refused(scaled: bool) -> None:
    """Rotated back, a few coarse codes may lie further from huge values than float32 reaches."""
    plain = BlockQuant(bits=2, block=64, rounding="stochastic", rotation=32)
    compressor = Scaled(inner=plain) if scaled else plain
    x, small, refused = normal(64).sign() * torch.finfo(torch.float32).max, normal(64), 0
    for step in range(20):
        key, data = Key(1, step), torch.empty(4, compressor.nbytes(spec_of(x)), dtype=torch.uint8)
        residuals = [torch.zeros(64), None, torch.zeros(64), torch.zeros(64)]
        blocks = [x * float("nan"), x, small, x]
        jobs = [EncodeJob(block, data[i], residuals[i], key=key) for i, block in enumerate(blocks)]
        finite = compressor.encode_jobs(jobs, [spec_of(x)] * 4)
        assert finite[:3] == [False, True, True]
        assert residuals[3] is not None
        assert finite[3] == bool(residuals[3].isfinite().all())
        refused += not finite[3]
    assert refused > 5


@all_compressors
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 63, 500, 776])
def test_non_finite_is_refused(compressor: Compressor, bad: float, place: int) -> None:
    x, residual = normal(777), normal(777, seed=1)
    x[place] = bad
    before = residual.clone()
    with pytest.raises(ValueError, match="expected finite values"):
        compressor.encode(x, KEY, residual=residual)
    assert same_bits(residual, before)
    with pytest.raises(ValueError, match="expected finite values"):
        compressor.encode(x, KEY)


@all_compressors
def test_overflow_with_the_residual_is_refused(compressor: Compressor) -> None:
    x, residual = torch.full((5,), 3e38), torch.full((5,), 3e38)
    with pytest.raises(ValueError, match="expected finite values"):
        compressor.encode(x, KEY, residual=residual)
    assert (residual == 3e38).all()


# --- decoding -------------------------------------------------------------------------------------------------------


@all_compressors
@pytest.mark.parametrize("alpha", [1.0, -0.125, 1 / 3])
def test_accumulate_is_decode_times_alpha(compressor: Compressor, alpha: float) -> None:
    x, acc = normal(17, 45), normal(17, 45, seed=2)
    data = compressor.encode(x, KEY)
    expected = acc + compressor.decode(data, spec_of(x), KEY) * alpha
    assert compressor.accumulate_(acc, data, spec_of(x), KEY, alpha=alpha) is acc
    assert torch.equal(acc, expected)


@all_compressors
def test_decode_into_out(compressor: Compressor) -> None:
    x = normal(6, 50)
    data = compressor.encode(x, KEY)
    out = torch.full((6, 50), float("nan"))
    assert compressor.decode(data, spec_of(x), KEY, out=out) is out
    assert same_bits(out, compressor.decode(data, spec_of(x), KEY))


@all_compressors
def test_wrong_bytes_are_refused_and_nothing_is_written(compressor: Compressor) -> None:
    x = normal(345)
    spec, data = spec_of(x), compressor.encode(x, KEY)
    wider = torch.cat([data, data])
    wrong = {
        "short": data[:-1],
        "a word short": data[:-4],
        "long": torch.cat([data, data[:4]]),
        "empty": data[:0],
        "int8": data.view(torch.int8),
        "float": data.float(),
        "two dimensions": data.view(1, -1),
        "every second byte": wider[::2],
        "not at a multiple of 4": wider[1 : 1 + data.numel()],
    }
    for what, bad in wrong.items():
        out, acc = torch.full((345,), 7.0), torch.full((345,), 7.0)
        with pytest.raises(WireError, match=f"expected .* {data.numel()} bytes.*, got"):
            compressor.decode(bad, spec, KEY, out=out)
        with pytest.raises(WireError, match=f"expected .* {data.numel()} bytes.*, got"):
            compressor.accumulate_(acc, bad, spec, KEY)
        assert (out == 7).all(), what
        assert (acc == 7).all(), what
        before, residual = bad.clone(), normal(345, seed=1)
        with pytest.raises(WireError, match="out: expected"):
            compressor.encode(x, KEY, out=bad, residual=residual)
        assert torch.equal(bad, before), what
        assert same_bits(residual, normal(345, seed=1)), what


@all_compressors
@pytest.mark.parametrize(
    "bad",
    [torch.zeros(344), torch.zeros(345, dtype=torch.float64), torch.zeros(690)[::2]],
    ids=["size", "dtype", "gaps"],
)
def test_wrong_outputs_and_residuals_are_refused(compressor: Compressor, bad: Tensor) -> None:
    x = normal(345)
    data = compressor.encode(x, KEY)
    with pytest.raises(WireError, match="expected contiguous float32 with 345"):
        compressor.decode(data, spec_of(x), KEY, out=bad)
    with pytest.raises(WireError, match="expected contiguous float32 with 345"):
        compressor.accumulate_(bad, data, spec_of(x), KEY)
    with pytest.raises(WireError, match="expected contiguous float32 with 345"):
        compressor.encode(x, KEY, residual=bad)
    assert not bad.any()


# --- settings -------------------------------------------------------------------------------------------------------


@all_compressors
def test_settings_are_frozen_values(compressor: Compressor) -> None:
    twin = pickle.loads(pickle.dumps(compressor))
    assert twin == compressor
    assert hash(twin) == hash(compressor)
    assert {compressor: 1}[twin] == 1
    assert not hasattr(compressor, "__dict__"), "slots"
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]
        assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(compressor, field.name, getattr(compressor, field.name))


def test_table_has_every_kind_once() -> None:
    # By name: a dataclass with slots is a second class, and the first lives on among the subclasses.
    def kinds(parent: type[Compressor]) -> set[str]:
        public = {c for c in parent.__subclasses__() if c.__module__.startswith("thinwire.")}
        own = {c.__name__ for c in public if not c.__name__.startswith("_")}
        return own.union(*map(kinds, public))

    shown = {type(c.inner if isinstance(c, Alone) else c).__name__ for c in TABLE}
    assert shown == kinds(Compressor)
    assert len({c.recipe() for c in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    ("make", "expected", "got"),
    [
        (lambda: Cast(dtype=torch.float32), "float16", "float32"),
        (lambda: BlockQuant(bits=9), "2 to 8", "9"),  # type: ignore[arg-type]
        (lambda: BlockQuant(bits=1), "2 to 8", "1"),  # type: ignore[arg-type]
        (lambda: BlockQuant(block=30), "32 to 65536", "30"),
        (lambda: BlockQuant(block=65538), "32 to 65536", "65538"),
        (lambda: BlockQuant(block=63), "even", "63"),
        (lambda: BlockQuant(rotation=64), "32 or 128", "64"),  # type: ignore[arg-type]
        (lambda: BlockQuant(block=64, rotation=128), "divides the block", "128 for block 64"),
        (lambda: BlockQuant(rounding="up"), "'nearest' or 'stochastic'", "'up'"),  # type: ignore[arg-type]
        (lambda: BlockCast(format="e2m1"), "'e4m3', 'e5m2' or 'e3m0'", "'e2m1'"),  # type: ignore[arg-type]
        (lambda: BlockCast(block=63), "even block from 32 to 65536", "63"),
        (lambda: Compose(first=TopK(), then=OneBit()), "float32 values first", "float16"),
        (lambda: Scaled(inner=RandomK(scaled=True)), "without a shared key", "randomk:0.01:scaled"),
        (lambda: Compose(first=RandomK(value_dtype=torch.float32), then=NaturalDithering()), "no numbers", "natural:3"),
        (lambda: Compose(first=RandomK(scaled=True), then=OneBit()), "not scaled", "randomk:0.01:scaled"),
        (lambda: Compose(first=TopK(value_dtype=torch.float32), then=TopKC()), "scales of its own", "topkc:0.01"),
        (lambda: Scaled(inner=OneBit()), "an unbiased compressor", "onebit"),
        (lambda: LinearDithering(bits=10), "2 to 8", "10"),  # type: ignore[arg-type]
        (lambda: NaturalDithering(norm="l1"), "'max' or 'l2'", "'l1'"),  # type: ignore[arg-type]
        (lambda: NaturalDithering(block=31), "32 to 65536, or None", "31"),
        (lambda: NaturalCompression(bits=7), "8 or 9", "7"),  # type: ignore[arg-type]
        (lambda: TernGrad(block=65538), "32 to 65536, or None", "65538"),
        (lambda: TernGrad(clip=0.5), "at least 1, or None", "0.5"),
        (lambda: TernGrad(clip=float("nan")), "at least 1, or None", "nan"),
        (lambda: TernGrad(clip=2.5, shared=True), "no clip with a shared scale", "2.5"),
        (lambda: TernGrad(summands=2), "TernGrad.*1 to 65536 summands, 1 unless shared", "2"),
        (lambda: TernGrad(shared=True, summands=0), "TernGrad.*1 to 65536 summands", "0"),
        (lambda: Scaled(inner=GlobalLinear()), "Scaled.*scales of its own", "global:8"),
        (lambda: Compose(first=TopK(value_dtype=torch.float32), then=GlobalLinear()), "scales of its own", "global:8"),
        (lambda: MinMax(bits=9), "1 to 8", "9"),  # type: ignore[arg-type]
        (lambda: MinMax(bits=1, rule="bagua"), "MinMax.*2 to 8", "1"),
        (lambda: MinMax(rule="max"), "'affine' or 'bagua'", "'max'"),  # type: ignore[arg-type]
        (lambda: MinMax(rule="bagua", rounding="stochastic"), "affine rule", "bagua"),
        (lambda: MinMax(block=33), "32 to 65536, or None", "33"),
        (lambda: MinMax(rounding="up"), "MinMax.*'nearest' or 'stochastic'", "'up'"),  # type: ignore[arg-type]
        (lambda: FixedPoint(bits=1), "FixedPoint.*2 to 8", "1"),  # type: ignore[arg-type]
        (lambda: FixedPoint(block=30), "32 to 65536, or None", "30"),
        (lambda: Sign(ties="minus"), "'plus' or 'random'", "'minus'"),  # type: ignore[arg-type]
        (lambda: OneBit(scale="l2"), "'l1' or 'rms'", "'l2'"),  # type: ignore[arg-type]
        (lambda: GlobalLinear(bits=5), "8 or 4", "5"),  # type: ignore[arg-type]
        (lambda: GlobalLinear(norm="l1"), "norm 'max' or 'l2'", "'l1'"),  # type: ignore[arg-type]
        (lambda: GlobalExponential(across="l1"), "across 'max' or 'l2'", "'l1'"),  # type: ignore[arg-type]
        (lambda: GlobalLinear(bits=4, summands=8), "1 to 7 summands", "8; use halving, or 8 bits"),
        (lambda: GlobalLinear().with_summands(128), "1 to 127 summands", "128; use halving"),
        (lambda: TopKC(density=0.0), r"TopKC.*\(0, 1\]", "0.0"),
        (lambda: TopKC(chunk=7), "from 8 to 65536", "7"),
        (lambda: TopKC(value_dtype=torch.bfloat16), "torch.float16 or torch.float32", "bfloat16"),
        (lambda: GlobalExponential(summands=0), "1 to 65536 summands", "0"),
        (lambda: TopK(density=0.0), r"\(0, 1\]", "0.0"),
        (lambda: TopK(density=1.01), r"\(0, 1\]", "1.01"),
        (lambda: TopK(density=float("nan")), r"\(0, 1\]", "nan"),
        (lambda: TopK(value_dtype=torch.float64), "bfloat16 or 'natural'", "float64"),
        (lambda: TopK(k=0), "at least 1", "0"),
        (lambda: RandomK(density=0.0), r"RandomK.*\(0, 1\]", "0.0"),
        (lambda: RandomK(block=0), "from 1 to 65536", "0"),
        (lambda: RandomK(value_dtype=torch.float64), "torch.float32, torch.float16", "float64"),
        (lambda: RandomK(scaled=True, rotating=True), "random masks", "rotating=True"),
        (lambda: RandomK(scaled=True, value_dtype=torch.float16), "float32 values", "float16"),
        (lambda: LowRank(rank=0), "a rank of at least 1", "0"),
        (lambda: LowRank(rank=1, num_iterations=0), "at least 1 iteration", "0"),
        (lambda: LowRank(rank=1, value_dtype=torch.float64), "LowRank: expected value_dtype", "float64"),
        (lambda: TopK(k=3, density=0.1), "a density or k", "density 0.1 and k 3"),
        (lambda: TopK(selection="best"), "'exact', 'sampled' or 'bisect'", "'best'"),  # type: ignore[arg-type]
        (lambda: TopK(density=0.5).nbytes(BlockSpec(shape=(65537,))), "65536 elements", "65537"),
        (lambda: Identity().nbytes(BlockSpec(shape=(3,), dtype=torch.float64)), "float32", "float64"),
    ],
)
def test_bad_settings_say_what_was_expected_and_what_came(make, expected: str, got: str) -> None:
    with pytest.raises(RecipeError, match=rf"(?s){expected}.*got .*{got}"):
        make()
