"""Fitting alpha and beta to times."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.advisor.fit import fit_line, telling
from thinwire.advisor.pairs import confirmed_class, link_class, tournament
from thinwire.errors import ProfileError


@given(alpha=st.floats(1e-6, 1e-1), beta=st.floats(1e5, 1e10), sizes=st.sets(st.integers(1, 10**8), min_size=2))
def test_an_exact_line_is_found(alpha: float, beta: float, sizes: set[int]) -> None:
    found_alpha, found_beta, residual = fit_line([(size, alpha + size / beta) for size in sorted(sizes)])
    for size in sizes:
        assert found_alpha + size / found_beta == pytest.approx(alpha + size / beta, rel=1e-3)
    assert residual < 1e-3


def test_a_fit_is_the_best_of_its_neighbours() -> None:
    points = [(1.0, 0.011), (1e3, 0.012), (1e4, 0.018), (1e5, 0.120)]
    alpha, beta, residual = fit_line(points)

    def error(alpha: float, beta: float) -> float:
        return (sum(((alpha + n / beta) / t - 1) ** 2 for n, t in points) / len(points)) ** 0.5

    assert residual == pytest.approx(error(alpha, beta))
    for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        assert error(alpha * a, beta * b) > residual


def test_latency_is_not_below_0_and_rates_not_either() -> None:
    alpha, beta, _ = fit_line([(100, 1e-6), (1000, 1e-3)])
    assert alpha == 0
    assert beta > 0
    with pytest.raises(ProfileError, match="expected times that grow with the bytes"):
        fit_line([(1, 1.0), (100, 1e-3)])
    with pytest.raises(ProfileError, match="two sizes or more"):
        fit_line([(1, 1.0), (1, 1.0)])


def test_what_a_token_bucket_lets_through_does_not_count() -> None:
    """20,000 bytes at once, then 1e6 bytes a second; one short message was disturbed."""
    points = [(n, 0.0005 + max(0, n - 20_000) / 1e6) for n in (1000, 4000, 16_000, 64_000, 256_000, 1_024_000)]
    points[0] = (1000, 0.004)
    kept = telling(points)
    assert [n for n, _ in kept] == [4000, 1_024_000]
    _, beta, _ = fit_line(kept)
    assert beta == pytest.approx(1e6, rel=0.03)


@pytest.mark.parametrize("num", range(2, 12))
def test_everybody_meets_everybody_once_and_one_at_a_time(num: int) -> None:
    rounds = list(tournament(num))
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(set(hosts)) == len(hosts)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(num) for b in range(a + 1, num)]


def _times(alpha: float, beta: float) -> list[tuple[float, float]]:
    return [(8.0, 2 * alpha + 8 / beta), *((float(n), 2 * alpha + n / beta) for n in (1 << 19, 1 << 20))]


def test_slow_and_far_pairs_are_exceptions_and_no_part_of_their_class() -> None:
    points = {(a, b): _times(1e-3, 1e7) for a in range(4) for b in range(4) if a != b}
    points[2, 1] = _times(1e-3, 2e6)
    points[0, 3] = _times(9e-3, 1e7)
    link, exceptions = link_class(points)
    assert link.alpha_s == pytest.approx(1e-3)
    assert link.beta == pytest.approx(1e7)
    assert link.residual < 1e-6
    assert [(pair.source, pair.target) for pair in exceptions] == [(0, 3), (2, 1)]
    assert exceptions[0].alpha_s == pytest.approx(9e-3)
    assert exceptions[1].beta == pytest.approx(2e6)


def test_what_disturbed_a_measurement_is_no_exception_and_what_stays_slow_is() -> None:
    asked: list[list[tuple[int, int]] | None] = []

    def measure(only: Collection[tuple[int, int]] | None) -> dict[tuple[int, int], list[tuple[float, float]]]:
        asked.append(None if only is None else sorted(only))
        points = {(a, b): _times(1e-3, 1e7) for a in range(3) for b in range(3) if a != b}
        points[2, 0] = _times(1e-3, 1e6)
        if only is None:
            points[1, 0] = _times(1e-3, 4e6)
        return points if only is None else {pair: points[pair] for pair in only}

    link, exceptions = confirmed_class(measure)
    assert [(pair.source, pair.target) for pair in exceptions] == [(2, 0)]
    assert exceptions[0].beta == pytest.approx(1e6)
    assert link.beta == pytest.approx(1e7)
    assert asked == [None, [(1, 0), (2, 0)], [(2, 0)]]
