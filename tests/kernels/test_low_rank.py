"""Low-rank factors: what the pure functions promise, for any matrix."""

import math

import pytest
import torch
from torch import Tensor

from thinwire.kernels.low_rank import (
    draw_q,
    factor_p,
    factor_q,
    leave_error_,
    matrix_shape,
    orthogonalise_,
    reconstruct,
)
from thinwire.random import Key

TOP = torch.finfo(torch.float32).max


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def power_iteration(m: Tensor, rank: int, num_iterations: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    q = draw_q(Key(seed), m.shape[-1], rank).expand(*m.shape[:-2], m.shape[-1], rank)
    for _ in range(num_iterations):
        p = orthogonalise_(factor_p(m, q))
        q = factor_q(m, p)
    return p, q


# --- matrices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), (1, 1)),
        ((5,), (1, 5)),
        ((5, 1), (1, 5)),
        ((4, 6), (4, 6)),
        ((8, 3, 2, 2), (8, 12)),
        ((1, 4, 6), (4, 6)),
        ((8, 3, 1, 1), (8, 3)),
        ((0,), (1, 0)),
        ((0, 3), (0, 0)),
        ((3, 0), (3, 0)),
        ((1, 1, 1), (1, 1)),
    ],
)
def test_a_tensor_is_its_first_dimension_by_the_others(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert matrix_shape(shape) == expected


def test_the_start_is_normal_and_one_per_key() -> None:
    q = draw_q(Key(3), 2000, 5)
    assert q.shape == (2000, 5)
    assert torch.equal(q, draw_q(Key(3), 2000, 5))
    assert not torch.equal(q, draw_q(Key(3, step=1), 2000, 5))
    assert abs(float(q.mean())) < 4 / 100
    assert abs(float(q.square().mean()) - 1) < 4 * math.sqrt(2) / 100
    assert abs(float(q.double().pow(4).mean()) - 3) < 4 * math.sqrt(96) / 100
    assert float((q.mT @ q / 2000 - torch.eye(5)).abs().max()) < 5 / math.sqrt(2000)


# --- orthogonalise --------------------------------------------------------------------------------------------------

HARD: dict[str, Tensor] = {
    "normal": normal(50, 7),
    "one column": normal(50, 1),
    "one row": normal(1, 3),
    "square": normal(9, 9),
    "more columns than rows": normal(4, 9),
    "zeros": torch.zeros(20, 3),
    "negative zeros": -torch.zeros(20, 3),
    "a zero column": torch.stack([normal(20), torch.zeros(20), normal(20, seed=1)], dim=1),
    "one column twice": normal(20, 2)[:, [0, 0, 1, 1]],
    "one column twice, in other units": normal(20, 1) * torch.tensor([1.0, -1e-3, 1e20]),
    "nearly the same": normal(300, 1) + 1e-6 * normal(300, 4, seed=1),
    "tiny": normal(50, 3) * 1e-42,
    "smallest": torch.full((50, 2), 2.0**-149),
    "huge": normal(50, 3).clamp(-1, 1) * TOP,
    "tiny and huge": normal(50, 3) * torch.tensor([1e-40, 1.0, 1e37]),
    "one huge value": torch.cat([torch.full((1, 2), TOP), normal(49, 2) * 1e-30]),
    "no columns": torch.zeros(5, 0),
    "no rows": torch.zeros(0, 3),
    "a long column": normal(70_000, 2),
}


@pytest.mark.parametrize("what", HARD)
def test_columns_become_orthonormal_or_zero(what: str) -> None:
    before = HARD[what]
    p = orthogonalise_(before.clone())
    assert p.isfinite().all()
    gram = p.double().mT @ p.double()
    kept = gram.diag() > 0.5
    assert float((gram - torch.diag(kept.double())).abs().max() if p.shape[1] else 0) < 1e-6
    rank = torch.linalg.matrix_rank(before.double() / before.double().norm(dim=0).clamp(min=1e-60), tol=1e-9)
    assert int(kept.sum()) == int(rank)
    # They span what was there: projecting the columns on them changes nothing.
    units = before.double() / before.double().norm(dim=0).clamp(min=1e-60)
    assert float((units - p.double() @ (p.double().mT @ units)).norm()) < 1e-4


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_leaves_finite_numbers(bad: float) -> None:
    for k in range(3):
        p = normal(10, 3)
        p[4, k] = bad
        assert orthogonalise_(p).isfinite().all()


def test_orthogonalising_works_in_place_on_any_strides_and_repeats_its_bits() -> None:
    p = normal(6, 40, 5)
    expected = orthogonalise_(p.clone())
    columns = p.mT.contiguous().mT
    assert orthogonalise_(columns) is columns
    assert torch.equal(columns, expected)
    assert all(torch.equal(orthogonalise_(one.clone()), want) for one, want in zip(p, expected, strict=True))


# --- factors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (1, 40), (40, 1), (7, 3, 30, 20)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_projection_never_adds_error(shape: tuple[int, ...], rank: int) -> None:
    m = normal(*shape)
    p, q = power_iteration(m, rank)
    left = m - reconstruct(p, q)
    norm = m.double().square().sum()
    assert float(left.double().square().sum()) == pytest.approx(
        float(norm - q.double().square().sum()), rel=1e-5, abs=1e-3
    )
    assert float((p.mT @ left).abs().max()) < 1e-4, "nothing of what is left lies in the span"


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_the_rank_comes_back_exactly_many_of_one_shape_too(rank: int) -> None:
    m = normal(6, 30, rank) @ normal(6, rank, 25, seed=1)
    p, q = power_iteration(m, rank)
    torch.testing.assert_close(reconstruct(p, q), m, rtol=1e-4, atol=1e-4)
    p, q = power_iteration(m[2], min(30, 25))
    torch.testing.assert_close(reconstruct(p, q), m[2], rtol=1e-4, atol=1e-4)


def test_products_are_summed_column_by_column() -> None:
    for shape, rank in (((50, 30), 5), ((3, 70_000), 3), ((2, 5, 7), 1), ((4, 4), 0)):
        p, q = normal(*shape[:-1], rank), normal(*shape[:-2], shape[-1], rank, seed=1)
        expected = torch.zeros(shape)
        for k in range(rank):
            term = p[..., k : k + 1] * q[..., k : k + 1].mT
            expected = term if k == 0 else expected + term
        assert torch.equal(reconstruct(p, q), expected)


def test_more_iterations_come_nearer_to_the_best_factors() -> None:
    u, v = orthogonalise_(normal(60, 60)), orthogonalise_(normal(60, 60, seed=1))
    singular = 0.8 ** torch.arange(60)
    m = (u * singular) @ v.mT
    best = float(singular[4:].square().sum())
    errors = [
        sum(float((m - reconstruct(*power_iteration(m, 4, num, seed))).square().sum()) for seed in range(20)) / 20
        for num in (1, 2, 4, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    assert best * 0.999 < errors[3] < best * 1.02
    assert errors[1] < best * 1.3


# --- the two forms of error -----------------------------------------------------------------------------------------


def _owed(error: str, num_steps: tuple[int, ...], num_ranks: int = 8, size: int = 16, rank: int = 2) -> list[float]:
    """Return the root mean square norm of what ranks owe after some numbers of steps with noise for gradients.

    P and Q are averaged over ranks as PowerSGD does; Q starts from the last one.
    """
    owed, q = torch.zeros(num_ranks, size, size), draw_q(Key(0), size, rank)
    norms: list[float] = []
    generator = torch.Generator().manual_seed(0)
    for step in range(1, max(num_steps) + 1):
        m = torch.randn(num_ranks, size, size, generator=generator) + owed
        p = orthogonalise_(factor_p(m, q).mean(dim=0))
        own_q = factor_q(m, p)
        q = own_q.mean(dim=0)
        before = m.mean(dim=0)
        owed = leave_error_(m, p, own_q, q, error=error)  # type: ignore[arg-type]
        torch.testing.assert_close(owed.mean(dim=0) + reconstruct(p, q), before, rtol=1e-4, atol=1e-4)
        if step in num_steps:
            norms.append(float(owed.square().sum(dim=(1, 2)).mean().sqrt()))
    return norms


def test_local_error_stays_bounded_where_aggregated_error_walks_at_random() -> None:
    """What ranks differ in has norm sqrt(steps) in the aggregated form: from 20 to 2000 steps tenfold."""
    local, aggregated = _owed("local", (20, 200, 2000)), _owed("aggregated", (20, 200, 2000))
    assert local[2] < 1.5 * local[0]
    assert local[2] < 1.2 * local[1]
    assert 2 < aggregated[1] / aggregated[0] < 4
    assert 2.5 < aggregated[2] / aggregated[1] < 4
    assert aggregated[2] > 5 * local[2]


def test_ranks_that_agree_owe_the_same_in_both_forms() -> None:
    m = normal(12, 9)
    p, q = power_iteration(m, 2)
    local = leave_error_(m.clone(), p, q, q)
    assert torch.equal(local, leave_error_(m.clone(), p, q, q, error="aggregated"))
