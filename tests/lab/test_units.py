import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import LabError
from thinwire.lab.shaping import FRAME_NBYTES, burst_nbytes, tbf
from thinwire.lab.units import LinkRate, expand_rates, format_rate, parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 10**8),
        ("1gbit", 10**9),
        ("1.5Gbit/s", 15 * 10**8),
        (" 64 kbit ", 64_000),
        ("5000bit", 5000),
        ("5000", 5000),
        (2e6, 2_000_000),
        (None, None),
        ("unshaped", None),
    ],
)
def test_rates_are_bits_per_second(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    "text", ["fast", "", "100mbps", "100MB", "-5mbit", "0", "1tbit", 0.0, -1, float("inf"), float("nan")]
)
def test_what_is_no_rate_is_refused_and_named(text):
    with pytest.raises(LabError, match="rate") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1000, 10**12))
def test_a_formatted_rate_parses_to_itself(bits):
    assert parse_rate(format_rate(bits)) == bits


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 0.005), ("100us", 1e-4), ("2s", 2.0), (0.5, 0.5), (None, None)])
def test_durations_are_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "5m", "soon", -1.0, float("inf"), float("nan")])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(LabError, match="time"):
        parse_duration(text)


def test_rates_expand_to_one_entry_per_node():
    assert expand_rates("1mbit", 2) == (LinkRate(up=10**6, down=10**6),) * 2
    assert expand_rates(["1mbit", ("2mbit", None)], 2) == (
        LinkRate(up=10**6, down=10**6),
        LinkRate(up=2 * 10**6, down=None),
    )
    with pytest.raises(LabError, match="expected 3, got 2"):
        expand_rates(["1mbit", "1mbit"], 3)
    with pytest.raises(LabError, match="pair"):
        expand_rates([("1mbit", "1mbit", "1mbit")], 1)


@given(st.integers(1000, 10**9))
def test_burst_holds_a_frame_and_never_half_of_100_kb(bits):
    assert FRAME_NBYTES <= burst_nbytes(bits) < 50_000


def test_the_queue_grows_with_the_latency():
    limit = [int(tbf(10**8, latency).rpartition(" ")[2]) for latency in (None, 0.01)]
    assert limit[1] - limit[0] == 10**8 // 8 * 0.02
