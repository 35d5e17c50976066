import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.cli import main
from thinwire.errors import LabError
from thinwire.lab import holder
from thinwire.lab.counters import parse_counters
from thinwire.lab.shaping import FRAME_NBYTES, burst_nbytes, delay, shape, shape_behind_delay, tbf
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
        expand_rates([("1mbit", "1mbit", "1mbit")], 1)  # type: ignore[arg-type]


@given(st.integers(1000, 10**9))
def test_burst_holds_a_frame_and_never_half_of_100_kb(bits):
    assert FRAME_NBYTES <= burst_nbytes(bits) < 50_000


def test_the_queue_grows_with_the_latency():
    limit = [int(tbf(10**8, latency).rpartition(" ")[2]) for latency in (None, 0.01)]
    assert limit[1] - limit[0] == 10**8 // 8 * 0.02


def test_unshaping_removes_only_what_was_there():
    assert shape("dev0", None, None) == []
    assert shape("dev0", None, None, was=10**6) == ["qdisc del dev dev0 root"]


def test_with_netem_the_bucket_sits_below_the_delay():
    """Kernels with netem are not at hand in every test run: the commands are what can be checked everywhere."""
    assert delay("dev0", 0.0055) == ["qdisc replace dev dev0 root handle 1: netem delay 5500us limit 1000000"]
    (command,) = shape_behind_delay("dev0", 10**8, 0.0055)
    assert command == f"qdisc replace dev dev0 parent 1:1 handle 2: {tbf(10**8, 0.0055)}"
    assert shape_behind_delay("dev0", None, 0.0055, was=10**8) == ["qdisc del dev dev0 parent 1:1 handle 2:"]


def test_counters_are_read_from_the_kernels_table():
    text = (
        "Inter-|   Receive                                       |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls\n"
        "    lo: 1 2 0 0 0 0 0 0 10 20 0 0 0 0 0 0\n"
        "tw12n3: 123456 89 0 0 0 0 0 0 654321 98 0 0 0 0 0 0\n"
    )
    assert parse_counters(text) == {"lo": (10, 1), "tw12n3": (654321, 123456)}


@pytest.mark.parametrize(
    ("name", "value", "command"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ],
)
def test_the_command_that_allows_user_namespaces_is_named(tmp_path, name, value, command):
    file = tmp_path / "sys" / name
    file.parent.mkdir(parents=True)
    file.write_text(value + "\n")
    assert holder.user_namespace_help(tmp_path) == f"Allow them: sudo sysctl -w {command}"
    file.write_text("1\n" if value == "0" else "0\n")
    assert "docker run" in holder.user_namespace_help(tmp_path)


def test_a_missing_iproute2_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(holder.shutil, "which", lambda *_, **__: None)
    with pytest.raises(holder.HolderError, match="apt-get install iproute2"):
        holder.Namespaces([LinkRate(up=None, down=None)], None)


def test_a_forgotten_unit_is_said_so():
    with pytest.raises(LabError, match=r"'100' has no unit.*write 100mbit"):
        parse_rate("100")
    assert parse_rate("100000") == 10**5


@pytest.mark.parametrize(
    "arguments", [["--nodes", "300"], ["--nodes", "0"], ["--nodes", "x"], ["--nproc-per-node", "0"]]
)
def test_wrong_numbers_of_hosts_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lab", *arguments, "--", "true"])
    assert ended.value.code == 2
    assert repr(arguments[1]) in capsys.readouterr().err.splitlines()[-1]
