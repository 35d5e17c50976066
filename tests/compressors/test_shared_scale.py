"""Kinds that agree on a scale, n senders in one process: statistic, reduce, encode, add up or reduce, decode."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from thinwire import (
    BlockQuant,
    BlockSpec,
    Compressor,
    GlobalExponential,
    GlobalLinear,
    RandomK,
    TernGrad,
    TopKC,
    TwoShot,
)
from thinwire.compressors import Contractive, Unbiased
from thinwire.errors import RecipeError, WireError
from thinwire.random import MERGE_STREAM, Key
from thinwire.recipes import parse_compressor

LINEAR: list[Compressor] = [
    GlobalLinear(bits=8),
    GlobalLinear(bits=4),
    GlobalLinear(bits=8, norm="l2"),
    GlobalLinear(bits=4, norm="l2", across="l2"),
    GlobalLinear(bits=8, across="l2"),
]
REDUCIBLE: list[Compressor] = [
    GlobalLinear(bits=8, halving=True),
    GlobalLinear(bits=4, halving=True),
    GlobalLinear(bits=8, halving=True, norm="l2", across="l2"),
    GlobalExponential(),
    GlobalExponential(norm="l2"),
    GlobalExponential(across="l2"),
]
SEPARATE: list[Compressor] = [TernGrad(shared=True), TernGrad(shared=True, block=32)]  # decoded one by one
CHUNKED: list[Compressor] = [TopKC(density=0.25), TopKC(density=0.1, chunk=8, value_dtype=torch.float32)]


def name(compressor: Compressor) -> str:
    return compressor.recipe()


linear_ones = pytest.mark.parametrize("kind", LINEAR, ids=name)
reducible_ones = pytest.mark.parametrize("kind", REDUCIBLE, ids=name)
global_ones = pytest.mark.parametrize("kind", LINEAR + REDUCIBLE + SEPARATE, ids=name)
separate_ones = pytest.mark.parametrize("kind", SEPARATE, ids=name)
chunked_ones = pytest.mark.parametrize("kind", CHUNKED, ids=name)
all_ones = pytest.mark.parametrize("kind", LINEAR + REDUCIBLE + SEPARATE + CHUNKED, ids=name)


def sized(kind: Compressor, count: int) -> Compressor:
    """Return the settings for `count` senders; skip where codes have no room."""
    try:
        return kind.with_summands(count)
    except RecipeError:
        pytest.skip(f"no room for {count}")


def statistic_of(kind: Compressor, x: Tensor, residual: Tensor | None = None, residual_scale: float = 1.0) -> Tensor:
    found = kind.statistic(x, residual=residual, residual_scale=residual_scale)
    assert found is not None
    return found


def total_of(xs: Sequence[Tensor]) -> Tensor:
    """In their order, as decoded blocks are added."""
    total = torch.zeros_like(xs[0])
    for x in xs:
        total += x
    return total


def agree(kind: Compressor, xs: Sequence[Tensor]) -> Tensor:
    """What a vector of statistics is after the all-reduce."""
    stacked = torch.stack([statistic_of(kind, x) for x in xs])
    return stacked.amax(dim=0) if kind.statistic_reduction == "max" else stacked.sum(dim=0)


def encode_all(kind: Compressor, xs: Sequence[Tensor], shared: Tensor, step: int = 0) -> list[Tensor]:
    return [kind.encode(x, Key(7, step, rank), shared=shared) for rank, x in enumerate(xs)]


def sum_of_bytes(kind: Compressor, blocks: Sequence[Tensor]) -> Tensor:
    """As an all-reduce of numbers of the dtype does."""
    assert kind.linear is not None
    total = blocks[0].view(kind.linear).clone()
    for block in blocks[1:]:
        total += block.view(kind.linear)
    return total.view(torch.uint8)


def reduce_all(kind: Compressor, blocks: Sequence[Tensor], spec: BlockSpec, step: int = 0) -> Tensor:
    """As one owner does, in a balanced tree; each merge draws from a stream of its own."""
    merges = 0

    def tree(leaves: Sequence[Tensor]) -> Tensor:
        nonlocal merges
        if len(leaves) == 1:
            return leaves[0].clone()
        half = len(leaves) - len(leaves) // 2
        acc, data = tree(leaves[:half]), tree(leaves[half:])
        merges += 1
        return kind.reduce_(acc, data, spec, Key(7, step, MERGE_STREAM + merges), counts=(half, len(leaves) - half))

    return tree(blocks)


def mean_of(kind: Compressor, xs: Sequence[Tensor], step: int = 0) -> Tensor:
    """The whole way, for kinds with the summands set."""
    spec, shared = BlockSpec(shape=tuple(xs[0].shape)), agree(kind, xs)
    blocks = encode_all(kind, xs, shared, step)
    if kind.linear is not None:
        return kind.decode(sum_of_bytes(kind, blocks), spec, shared=shared) / len(xs)
    if kind.reducible is None:
        return total_of([kind.decode(block, spec, shared=shared) for block in blocks]) / len(xs)
    value = kind.decode(reduce_all(kind, blocks, spec, step), spec, shared=shared)
    return value / len(xs) if kind.reducible == "sum" else value


def normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


# --- adding up ------------------------------------------------------------------------------------------------------


@linear_ones
@pytest.mark.parametrize("count", [1, 2, 3, 7, 9, 64, 127])
@pytest.mark.parametrize("n", [1, 2, 129, 1000])
def test_the_sum_of_bytes_is_the_sum_of_what_they_stand_for(kind: Compressor, count: int, n: int) -> None:
    """Exactly: the step is a power of two, so that no product and no sum rounds."""
    kind = sized(kind, count)
    assert isinstance(kind, GlobalLinear)
    shared = torch.tensor([kind.levels * 0.25]) ** (2 if kind.across == "l2" else 1)
    xs, spec = (
        [normal(n, rank).clamp(-1, 1) * float(kind.levels) * 0.25 for rank in range(count)],
        BlockSpec(shape=(n,)),
    )
    blocks = encode_all(kind, xs, shared)
    alone = [kind.decode(block, spec, shared=shared) for block in blocks]
    assert torch.equal(kind.decode(sum_of_bytes(kind, blocks), spec, shared=shared), total_of(alone))
    assert all(bool((value * 4 == (value * 4).round()).all()) for value in alone)


def test_random_k_is_linear_too() -> None:
    kind, spec = RandomK(density=0.5), BlockSpec(shape=(64,))
    xs, key = [torch.randint(-9, 9, (64,)).float() for _ in range(5)], Key(3)
    blocks = [kind.encode(x, key) for x in xs]
    total = kind.decode(sum_of_bytes(kind, blocks), spec, key)
    assert torch.equal(total, total_of([kind.decode(block, spec, key) for block in blocks]))


@global_ones
@pytest.mark.parametrize("count", range(2, 10))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_sum_overflows_where_all_hold_the_maximum(kind: Compressor, count: int, sign: float) -> None:
    kind = sized(kind, count)
    for step in range(20):
        x = torch.full((33,), sign * 0.7)
        mean = mean_of(kind, [x] * count, step)
        if isinstance(kind, GlobalExponential):
            exact = kind.norm == kind.across == "max"  # else the values themselves lie between two levels
            far = 2.0 if exact else 4.0
            assert bool(((mean / x > 1 / far) & (mean / x < far)).all()), "at most one power of two beside"
        elif getattr(kind, "norm", "max") == getattr(kind, "across", "max") == "max":
            torch.testing.assert_close(mean, x, rtol=1e-6, atol=0)  # on the highest level: nothing is left to chance
        else:
            assert float(mean.abs().max()) <= 0.7 * 33**0.5 * count**0.5 * (1 + 1e-6)


@separate_ones
@pytest.mark.parametrize("count", [1, 2, 7])
def test_codes_of_all_senders_count_in_one_unit(kind: Compressor, count: int) -> None:
    """The sum is a whole number of scales, within the count; but packed codes are not what an all-reduce may add."""
    xs, spec = [normal(100, rank) for rank in range(count)], BlockSpec(shape=(100,))
    shared = agree(kind, xs).log2().ceil().exp2()  # powers of two: no product rounds
    blocks = encode_all(kind, xs, shared)
    total = total_of([kind.decode(block, spec, shared=shared) for block in blocks])
    units = total / shared.repeat_interleave(getattr(kind, "block", None) or 100)[:100]
    assert torch.equal(units, units.round())
    assert bool((units.abs() <= count).all())
    assert (kind.linear, kind.reducible) == (None, None)


@global_ones
def test_one_sender_holds_all(kind: Compressor) -> None:
    kind = sized(kind, 5)
    xs = [torch.zeros(50) for _ in range(5)]
    xs[3][7] = -2.0
    mean = mean_of(kind, xs)
    assert mean.nonzero().view(-1).tolist() in ([], [7])
    assert float(mean[7]) <= 0.0


@all_ones
def test_zeros_stay_zero(kind: Compressor) -> None:
    for zero in (0.0, -0.0):
        assert not mean_of(kind.with_summands(3), [torch.full((40,), zero)] * 3).any()


# --- unbiased, and within theta -------------------------------------------------------------------------------------


@global_ones
@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_mean_is_unbiased(kind: Compressor, count: int) -> None:
    """Of 8,192 draws, by steps and by elements, within 4 standard errors, one value within 5."""
    kind, steps, repeats = sized(kind, count), 64, 128
    values = torch.stack([normal(24, rank) for rank in range(count)])
    values[:, :6] = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0**-6, 1e-4])
    values[0, 5] = -2.0
    xs = [row.repeat(repeats) for row in values]
    mean = torch.cat([mean_of(kind, xs, step).view(repeats, -1) for step in range(steps)]).double()
    exact = values.double().mean(dim=0)
    error = (mean.mean(dim=0) - exact).abs()
    sigma = mean.std(dim=0) / math.sqrt(steps * repeats)
    norm = agree(kind, xs) ** (0.5 if getattr(kind, "across", "max") == "l2" else 1.0)
    resolution = float(norm.max()) * 2.0**-16  # every rounding has 16 random bits
    assert int((error > 4 * sigma + resolution).sum()) <= 1
    assert bool((error <= 5 * sigma + resolution).all())


@reducible_ones
def test_a_reduction_is_unbiased(kind: Compressor) -> None:
    """Two blocks alone, code by code, given what they are; equal values, neighbours and far ones, either sign."""
    kind, draws, spec = kind.with_summands(2), 20_000, BlockSpec(shape=(20_000 * 12,))
    a = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.25, 1 / 8, 1.0, -1.0, 0.5, 1 / 64, 0.0, -0.3]).repeat(draws)
    b = torch.tensor([1.0, -1.0, 0.5, -1.0, 1.0, 1.0, -1 / 16, -0.5, 0.25, -1 / 16, 0.7, 0.3]).repeat(draws)
    shared = agree(kind, [a, b])
    one, two = encode_all(kind, [a, b], shared)
    want = (kind.decode(one, spec, shared=shared) + kind.decode(two, spec, shared=shared)).double()
    want = want / (1 if kind.reducible == "sum" else 2)
    got = kind.decode(kind.reduce_(one, two, spec, Key(7, 0, MERGE_STREAM)), spec, shared=shared).double()
    error = (got - want).view(draws, 12)
    assert bool((error.mean(dim=0).abs() <= 4 * error.std(dim=0) / math.sqrt(draws) + 2.0**-16).all())


@global_ones
@pytest.mark.parametrize("count", [1, 2, 4, 5])
@pytest.mark.parametrize("values", ["normal", "aligned", "small beside a peak", "one sender"])
def test_the_error_is_within_theta(kind: Compressor, count: int, values: str) -> None:
    kind, n = sized(kind, count), 1024
    xs = [normal(n, 3 if values == "aligned" else rank) for rank in range(count)]
    if values == "small beside a peak":
        xs = [x * 1e-3 for x in xs]
        xs[0][5] = 1.0
    if values == "one sender":
        xs = [xs[0], *[torch.zeros(n)] * (count - 1)]
    contract = kind.contract(BlockSpec(shape=(n,)))
    assert isinstance(contract, Unbiased)
    exact = torch.stack(xs).double().mean(dim=0)
    errors = [float((mean_of(kind, xs, step).double() - exact).square().sum()) for step in range(20)]
    energy = sum(float(x.double().square().sum()) for x in xs)
    assert sum(errors) / len(errors) <= 1.05 * contract.omega / count**2 * energy


@pytest.mark.parametrize(
    ("kind", "count", "aligned", "published"),
    [
        (GlobalLinear(bits=8), 4, False, 0.0048),
        (GlobalLinear(bits=8), 4, True, 0.0011),
        (GlobalLinear(bits=8), 16, False, 0.088),
        (GlobalLinear(bits=8), 16, True, 0.0046),
        (GlobalLinear(bits=8), 64, False, 3.50),
        (GlobalLinear(bits=8), 64, True, 0.041),
        (GlobalExponential(), 4, False, 0.239),
        (GlobalExponential(), 4, True, 0.083),
        (GlobalExponential(), 16, False, 0.421),
        (GlobalExponential(), 16, True, 0.082),
        (GlobalExponential(), 64, False, 0.631),
        (GlobalExponential(), 64, True, 0.082),
    ],
    ids=str,
)
def test_errors_are_about_those_of_a_simulation(kind: Compressor, count: int, aligned: bool, published: float) -> None:
    """|estimate - mean|^2 / |mean|^2 of 131,072 Gaussian values, scaled by the maximum, by another program."""
    xs = [normal(131_072, 0 if aligned else rank) for rank in range(count)]
    exact = torch.stack(xs).mean(dim=0)
    error = (mean_of(kind.with_summands(count), xs) - exact).square().sum() / exact.square().sum()
    assert published / 1.6 < float(error) < published * 1.6


@pytest.mark.parametrize("count", [16, 64])
def test_halving_keeps_all_levels(count: int) -> None:
    """Its error hardly grows with the number of senders, unlike that of codes that must have room for the sum."""
    xs = [normal(16_384, rank) + normal(16_384, 999) for rank in range(count)]
    exact = torch.stack(xs).mean(dim=0)
    plain, halved = (
        float((mean_of(GlobalLinear(halving=halving, summands=count), xs) - exact).square().sum())
        for halving in (False, True)
    )
    assert halved < plain / 6
    step = float(torch.stack(xs).abs().max()) / 127
    assert halved < 16_384 * step**2 * (0.5 + 0.25 / count) * 1.05


# --- chunks ---------------------------------------------------------------------------------------------------------


@chunked_ones
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 8, 64, 65, 1000])
def test_all_send_the_chunks_that_are_largest_together(kind: TopKC, count: int, n: int) -> None:
    """Integers: no sum rounds. What is not sent is owed, exactly."""
    xs = [(normal(n, rank) * 20).round() for rank in range(count)]
    spec, shared, residuals = BlockSpec(shape=(n,)), agree(kind, xs), [torch.zeros(n) for _ in xs]
    chunks = torch.zeros(-(-n // kind.chunk))
    for c in range(len(chunks)):
        chunks[c] = sum(float(x[c * kind.chunk : (c + 1) * kind.chunk].square().sum()) for x in xs)
    assert torch.equal(shared, chunks)
    kept = sorted(chunks.sort(descending=True, stable=True).indices[: kind.num_kept(n)].tolist())
    blocks = [kind.encode(x, shared=shared, residual=residual) for x, residual in zip(xs, residuals, strict=True)]
    total = kind.decode(sum_of_bytes(kind, blocks), spec, shared=shared)
    mask = torch.tensor([i // kind.chunk in kept for i in range(n)])
    assert torch.equal(total, torch.where(mask, total_of(xs), 0.0))
    assert torch.equal(total + total_of(residuals), total_of(xs))


def test_equal_chunks_are_taken_from_the_lowest() -> None:
    kind, spec = TopKC(density=0.5, chunk=8), BlockSpec(shape=(48,))
    x = torch.ones(48)
    x[8:16] = 2.0
    data = kind.encode(x, shared=agree(kind, [x]))
    sent = kind.decode(data, spec, shared=agree(kind, [x]))
    assert sent.nonzero().view(-1).tolist() == list(range(24))


@chunked_ones
@pytest.mark.parametrize("count", [1, 3, 8])
def test_chunks_contract_over_all_senders(kind: TopKC, count: int) -> None:
    """Also where every sender is large somewhere else, and one alone."""
    n = 1000
    blocks = {
        "normal": [normal(n, rank) for rank in range(count)],
        "equal": [torch.ones(n)] * count,
        "elsewhere": [torch.where(torch.arange(n) % count == rank, 1.0, 1e-3) for rank in range(count)],
        "one": [normal(n, 0) * (rank == 0) for rank in range(count)],
        "ends": [torch.where(normal(n, rank) > 0, 2.0**-14, 60000.0) for rank in range(count)],
    }
    contract = kind.contract(BlockSpec(shape=(n,)))
    assert isinstance(contract, Contractive)
    for what, xs in blocks.items():
        shared, energy, error = agree(kind, xs), 0.0, 0.0
        for x in xs:
            data = kind.encode(x, shared=shared)
            sent = kind.decode(data, BlockSpec(shape=(n,)), shared=shared)
            energy += float(x.double().square().sum())
            error += float((sent - x).double().square().sum())
        assert error <= (1 - contract.delta) * energy * (1 + 1e-6), what


@chunked_ones
def test_nothing_is_lost_over_steps(kind: TopKC) -> None:
    """Feedback at every sender: what was delivered, and what is owed, is all there was."""
    count, n, spec = 3, 500, BlockSpec(shape=(500,))
    residuals = [torch.zeros(n) for _ in range(count)]
    total, delivered = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(30):
        xs = [normal(n, 100 * step + rank) for rank in range(count)]
        statistics = [statistic_of(kind, x, residual) for x, residual in zip(xs, residuals, strict=True)]
        shared = total_of(statistics)
        for x, residual in zip(xs, residuals, strict=True):
            data = kind.encode(x, shared=shared, residual=residual)
            delivered += kind.decode(data, spec, shared=shared)
            total += x
    torch.testing.assert_close(delivered + total_of(residuals), total, rtol=0, atol=1e-4)
    assert float(torch.stack(residuals).abs().max()) < 60, "every chunk has its turn"


# --- rules ----------------------------------------------------------------------------------------------------------


@reducible_ones
@pytest.mark.parametrize("counts", [(0, 1), (1, -1), (65536, 1)], ids=str)
def test_counts_out_of_range_are_refused(kind: Compressor, counts: tuple[int, int]) -> None:
    spec = BlockSpec(shape=(9,))
    acc = torch.zeros(kind.nbytes(spec), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"counts: expected at least 1 each and 65536 together"):
        kind.reduce_(acc, acc.clone(), spec, Key(1), counts=counts)


@reducible_ones
def test_an_owner_reduces_alike_every_time(kind: Compressor) -> None:
    kind, xs, spec = kind.with_summands(3), [normal(500, rank) for rank in range(3)], BlockSpec(shape=(500,))
    blocks = encode_all(kind, xs, agree(kind, xs))
    first = reduce_all(kind, blocks, spec)
    assert torch.equal(first, reduce_all(kind, blocks, spec))
    assert not torch.equal(first, reduce_all(kind, blocks, spec, step=1))


@all_ones
def test_the_statistic_is_that_of_q(kind: Compressor) -> None:
    x, residual = normal(300, 0), normal(300, 1)
    before = residual.clone()
    got = statistic_of(kind, x, residual, 0.5)
    assert torch.equal(got, statistic_of(kind, x + residual * 0.5))
    assert torch.equal(residual, before)
    assert got.shape == (kind.num_statistics(BlockSpec(shape=(300,))),)


@all_ones
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_every_sender_learns_what_is_not_finite(kind: Compressor, bad: float) -> None:
    """From the reduced statistic, before anything is sent."""
    xs = [normal(100, rank) for rank in range(3)]
    xs[1][40] = bad
    shared = agree(kind, xs)
    assert bool(shared.isinf().any())
    for x in xs:
        residual = torch.zeros(100)
        with pytest.raises(ValueError, match="expected finite values"):
            kind.encode(x, Key(1), shared=shared, residual=residual)
        assert not residual.any()


@all_ones
def test_feedback_is_of_the_sender_alone(kind: Compressor) -> None:
    kind, xs = kind.with_summands(2), [normal(200, rank) for rank in range(2)]
    shared, residual = agree(kind, xs), torch.zeros(200)
    data = kind.encode(xs[0], Key(1), shared=shared, residual=residual)
    assert torch.equal(residual, xs[0] - kind.decode(data, BlockSpec(shape=(200,)), shared=shared))


@all_ones
def test_the_scale_must_be_given(kind: Compressor) -> None:
    x, spec = normal(20, 0), BlockSpec(shape=(20,))
    shared = agree(kind, [x])
    data = kind.encode(x, Key(1), shared=shared)
    for run in (
        lambda **given: kind.encode(x, Key(1), **given),
        lambda **given: kind.decode(data, spec, **given),
        lambda **given: kind.accumulate_(torch.zeros(20), data, spec, **given),
    ):
        with pytest.raises(RecipeError, match=rf"pass shared=, the {kind.statistic_reduction} over senders"):
            run()
        for bad in (torch.zeros(9), torch.zeros(len(shared), dtype=torch.float64), torch.zeros(())):
            with pytest.raises(
                WireError, match=rf"shared: expected contiguous float32 of shape \({len(shared)},\), got"
            ):
                run(shared=bad)


@reducible_ones
def test_foreign_bytes_are_not_reduced(kind: Compressor) -> None:
    spec = BlockSpec(shape=(64,))
    good = kind.encode(normal(64, 0), Key(1), shared=torch.tensor([9.0]))
    before = good.clone()
    for bad in (good[:-4].clone(), torch.cat([good, good]), good.view(torch.int8)):
        with pytest.raises(WireError, match=rf"reduce_, data: expected .* {good.numel()} bytes"):
            kind.reduce_(good, bad, spec, Key(1))
        with pytest.raises(WireError, match=rf"reduce_, acc: expected .* {good.numel()} bytes"):
            kind.reduce_(bad, good, spec, Key(1))
    assert torch.equal(good, before)


def test_other_kinds_have_none_of_it() -> None:
    kind, spec = BlockQuant(bits=8), BlockSpec(shape=(4,))
    assert kind.statistic(torch.ones(4)) is None
    assert (kind.linear, kind.reducible, kind.statistic_reduction, kind.num_statistics(spec)) == (None, None, None, 0)
    assert kind.with_summands(9) is kind
    assert kind.max_summands is None
    with pytest.raises(NotImplementedError, match="terngrad has no statistic"):
        TernGrad().statistic_jobs([], [])
    assert TernGrad().with_summands(9) == TernGrad()
    data = kind.encode(torch.ones(4))
    with pytest.raises(NotImplementedError, match="int8 cannot be reduced"):
        kind.reduce_(data, data.clone(), spec, Key(1))
    with pytest.raises(NotImplementedError, match="codes are added"):
        GlobalLinear().reduce_(data[:4], data[4:8].clone(), spec, Key(1))


@all_ones
def test_recipes_come_back(kind: Compressor) -> None:
    assert parse_compressor(kind.recipe()) == kind


@all_ones
def test_an_owner_encodes_alone_and_is_refused(kind: Compressor) -> None:
    with pytest.raises(RecipeError, match=rf"{kind.recipe()}: its scale is agreed on by all ranks before they encode"):
        TwoShot(up=BlockQuant(), down=kind)
