"""Low rank as a compressor: the contract over draws, units of any size, and least squares under feedback."""

import math

import pytest
import torch
from torch import Tensor

from thinwire import BlockSpec, Compressor, LowRank
from thinwire.compressors import Contractive, NoContract
from thinwire.kernels.low_rank import orthogonalise_
from thinwire.random import Key

DTYPES = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
value_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(compressor: Compressor, x: Tensor, step: int = 0) -> Tensor:
    spec = BlockSpec(shape=tuple(x.shape))
    return compressor.decode(compressor.encode(x, Key(1, step)), spec)


@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize(("m", "n", "rank"), [(12, 12, 3), (12, 40, 1), (40, 12, 5), (5, 5, 5)])
def test_equal_singular_values_reach_the_contract(num_iterations: int, m: int, n: int, rank: int) -> None:
    """Whatever is drawn: any r directions hold r / min(m, n) of the norm."""
    x = orthogonalise_(normal(max(m, n), min(m, n)))
    x = x if m >= n else x.mT.contiguous()
    compressor = LowRank(rank=rank, num_iterations=num_iterations, value_dtype=torch.float32)
    contract = compressor.contract(BlockSpec(shape=(m, n)))
    assert isinstance(contract, Contractive)
    assert contract.delta == pytest.approx(rank / min(m, n), rel=1e-5)
    for step in range(5):
        error = (round_trip(compressor, x, step) - x).double().square().sum() / x.double().square().sum()
        assert float(error) == pytest.approx(1 - contract.delta, abs=1e-5)


@value_dtypes
def test_no_draw_adds_error_beyond_rounding(dtype: torch.dtype) -> None:
    for seed in range(30):
        x = normal(17, 23, seed=seed) * torch.exp(2 * normal(1, 23, seed=seed + 100))
        for rank in (1, 4, 17):
            left = x - round_trip(LowRank(rank=rank, value_dtype=dtype), x, seed)
            share = float(left.double().square().sum() / x.double().square().sum())
            assert math.sqrt(share) <= 1 + 3 * math.sqrt(rank) * DTYPES[dtype]
            assert rank < 17 or math.sqrt(share) < 6 * DTYPES[dtype] * math.sqrt(rank)


def test_a_contract_that_rounding_eats_up_is_none() -> None:
    thin = LowRank(rank=1, value_dtype=torch.bfloat16)
    assert isinstance(thin.contract(BlockSpec(shape=(256, 256))), Contractive)
    assert isinstance(thin.contract(BlockSpec(shape=(65536, 65536))), NoContract)


@value_dtypes
@pytest.mark.parametrize("unit", [1e-36, 1e-20, 1e-6, 1.0, 1e5, 1e30])
def test_units_do_not_matter(dtype: torch.dtype, unit: float) -> None:
    """The scale is a power of two: float16 factors hold a gradient of any size as well."""
    compressor, x = LowRank(rank=3, value_dtype=dtype), normal(40, 30)
    unit = 2.0 ** round(math.log2(unit))
    expected = round_trip(compressor, x) * unit
    torch.testing.assert_close(round_trip(compressor, x * unit), expected, rtol=1e-5, atol=2.0**-149 + 1e-6 * unit)


@value_dtypes
def test_hard_matrices(dtype: torch.dtype) -> None:
    top = torch.finfo(torch.float32).max
    one = torch.zeros(9, 14)
    one[4, 5] = -0.9 * 2.0**127
    hard = {
        "zeros": torch.zeros(9, 14),
        "one huge value": one,
        "denormal": normal(9, 14) * 1e-41,
        "smallest": torch.full((9, 14), 2.0**-149),
        "equal": torch.full((9, 14), -0.7),
        "equal rows": normal(1, 14).expand(9, 14).contiguous(),
        "tiny and huge": torch.cat([normal(4, 14) * 1e-38, normal(5, 14) * 1e36]),
    }
    for what, x in hard.items():
        for rank in (1, 3, 20):
            residual = torch.zeros_like(x)
            compressor = LowRank(rank=rank, value_dtype=dtype)
            sent = compressor.decode(compressor.encode(x, Key(1), residual=residual), BlockSpec(shape=(9, 14)))
            assert sent.isfinite().all(), what
            assert torch.equal(residual, x - sent), what
            assert float(residual.abs().max()) <= 4 * float(x.abs().max()), what
    with pytest.raises(ValueError, match="overflow"):  # the projection of huge values may be larger still
        LowRank(rank=1).encode(torch.where(normal(9, 14) > 0, top, -top), Key(1))


def test_matrices_do_not_depend_on_their_company() -> None:
    """Encoded with others in one call or alone: cuts of messages must not show."""
    from thinwire.kernels import EncodeJob

    compressor, xs = LowRank(rank=4), [normal(30, 50, seed=seed) for seed in range(5)]
    specs = [BlockSpec(shape=(30, 50))] * 5
    outs = [torch.empty(compressor.nbytes(specs[0]), dtype=torch.uint8) for _ in xs]
    keys = [Key(seed) for seed in range(5)]
    jobs = [EncodeJob(x.view(-1), out, None, 1.0, key) for x, out, key in zip(xs, outs, keys, strict=True)]
    assert compressor.encode_jobs(jobs, specs) == [True] * 5
    for x, out, key in zip(xs, outs, keys, strict=True):
        assert torch.equal(compressor.encode(x, key), out)


def test_any_bytes_decode_to_something_and_no_more_than_the_block_is_written() -> None:
    compressor, spec = LowRank(rank=2), BlockSpec(shape=(10, 12))
    around = torch.full((120 + 20,), 7.0)
    for seed in range(20):
        data = torch.randint(
            0, 256, (compressor.nbytes(spec),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        compressor.decode(data, spec, out=around[10:130].view(10, 12))
        assert (around[:10] == 7).all()
        assert (around[130:] == 7).all()


# --- least squares --------------------------------------------------------------------------------------------------


def _distance(feedback: bool, num_steps: int) -> float:
    """Descend ||A W - B||^2 / 2 by what is sent of its gradient; return how far W still is, relative to the start."""
    a, w_best = orthogonalise_(normal(60, 20)) * torch.linspace(0.7, 1.0, 20), normal(20, 24, seed=1)
    b, w = a @ w_best, torch.zeros(20, 24)
    residual, compressor = torch.zeros(20, 24), LowRank(rank=2)
    for step in range(num_steps):
        gradient = a.mT @ (a @ w - b)
        data = compressor.encode(gradient, Key(1, step), residual=residual if feedback else None)
        w -= 0.2 * compressor.decode(data, BlockSpec(shape=(20, 24)))
    return float((w - w_best).norm() / w_best.norm())


def test_least_squares_converges_under_feedback() -> None:
    assert _distance(feedback=True, num_steps=60) < 5e-3
    assert _distance(feedback=True, num_steps=200) < 1e-6
    assert _distance(feedback=False, num_steps=200) > 1e-2, "what a step leaves out is lost"
