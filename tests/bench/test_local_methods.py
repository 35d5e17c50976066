"""Local methods in benchmarks: their names, and runs whose costs are counted over whole periods."""

import itertools
from typing import Any

import pytest

from thinwire.algorithms.rhythm import Rhythm
from thinwire.bench import engine
from thinwire.bench.measure import whole_periods
from thinwire.bench.settings import LocalName, Settings, parse_methods, split_local
from thinwire.cli import main
from thinwire.lab import Loopback


def test_names_say_kind_period_and_recipe():
    assert split_local("diloco:50:topk:0.03:chunked~int2") == LocalName("diloco", 50, "topk:0.03:chunked~int2")
    assert split_local("streaming:30:3:5:e3m0") == LocalName("streaming", 30, "e3m0", 3, 5)
    assert split_local("int8") is split_local("diloco:int8") is None
    names = "localsgd:8:dense,diloco:10:int4,streaming:10:4:2:gather/e3m0,int8"
    assert ",".join(parse_methods(names)) == names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("diloco:50:int9", "int9"),
        ("diloco:0:int8", "diloco:H:RECIPE"),
        ("diloco:int8", "diloco:H:RECIPE"),
        ("streaming:4:5:0:int8", "fragments: expected 1 to sync_every=4"),
        ("streaming:4:2:4:int8", "overlap"),
    ],
)
def test_wrong_names_are_refused_in_words(name: str, words: str):
    with pytest.raises(ValueError, match=words):
        parse_methods(name)


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--workload", "replay:resnet50/8", "--methods", "diloco:10:int8"]) == 1
    assert "exchanges what an optimizer changed" in capsys.readouterr().err
    assert main(["bench", "--steps", "9", "--methods", "diloco:10:int8,localsgd:2:int8"]) == 1
    assert "expected at least 10, for one exchange of diloco:10:int8, got 9" in capsys.readouterr().err


def _run(methods: tuple[str, ...], steps: int, **settings: Any) -> list[dict[str, Any]]:
    events: list[Any] = []
    chosen = Settings(workload="digits", methods=methods, nodes=2, steps=steps, **settings)
    return engine.run_benchmark(chosen, events.append)["runs"]


def test_local_methods_over_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "open_network", lambda nodes, **_: Loopback(nodes, reason="chosen by the test"))
    names = ("ddp", "localsgd:4:dense", "diloco:4:int8", "streaming:4:2:1:e3m0")
    ddp, local, diloco, streaming = runs = _run(names, 10)
    for run in runs:
        assert run["bit_identical"], run["method"]
        assert run["steps"] == 10
    for run in runs[1:]:
        # One whole period after the first three steps; streaming's up to where no exchange is under way.
        assert run["steady_from_step"] == (5 if run is streaming else 6)
        assert run["ideal_s"] is None
        assert run["step_s"] > 0
        assert run["link"]["exchanges"] > 0
    # A local method sends what DDP does, once in a period.
    assert local["planned_nbytes_per_step"] == pytest.approx(ddp["planned_nbytes_per_step"] / 4, rel=0.01)
    assert diloco["planned_nbytes_per_step"] < local["planned_nbytes_per_step"] / 2
    # Nothing is exchanged before the first exchange, and both train alike until then.
    assert local["curve"]["loss"][:4] == diloco["curve"]["loss"][:4]
    assert local["curve"]["loss"][4:] != diloco["curve"]["loss"][4:]
    assert local["curve"]["loss"][0] == ddp["curve"]["loss"][0]
    assert local["curve"]["loss"][1] != ddp["curve"]["loss"][1]


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_bytes_at_the_interface_are_those_of_whole_periods():
    for run in _run(("diloco:4:int8", "streaming:4:2:1:int8"), 12, rate="100mbit"):
        planned, sent = run["planned_with_headers_nbytes_per_step"], run["sent_nbytes_per_step"]
        assert planned * 0.97 < sent < planned * 1.1 + 3000, (run["method"], planned, sent)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_is_computed_does_not_depend_on_the_network():
    """To the bit, though buckets are smaller on slow ones: `benchmarks/to_a_loss.py` takes losses from fast ones."""
    methods = ("ddp", "int8", "diloco:4:dense", "diloco:4:int8", "streaming:4:2:1:e3m0")
    free = _run(methods, 12, rate=None)
    slow = _run(methods, 12, rate="50mbit", latency="10ms")
    for one, other in zip(free, slow, strict=True):
        assert one["curve"]["loss"] == other["curve"]["loss"], one["method"]
        assert one["val_loss"] == other["val_loss"]
        assert one["curve"]["sent_nbytes"] != []
    assert free[1]["bucket_cap_mb"] > slow[1]["bucket_cap_mb"]


@pytest.mark.parametrize("period", [1, 2, 3, 4, 10, 30])
def test_whole_periods_are_never_none(period: int) -> None:
    """And no exchange is under way at either end, where there is such a step."""
    for num_fragments, overlap in itertools.product(range(1, min(3, period) + 1), range(min(6, period))):
        rhythm = Rhythm(sync_every=period, num_fragments=num_fragments, overlap=overlap)
        for num_steps in range(period, 4 * period + 8):
            start = min(3, num_steps - 1)
            counted = whole_periods(range(start, num_steps), period, rhythm.under_way)
            assert len(counted) >= period
            assert len(counted) % period == 0
            assert 0 <= counted.start < counted.stop <= num_steps
            free = [k for k in range(num_steps, num_steps - period, -1) if k >= period and not rhythm.under_way(k)]
            assert counted.stop == (free[0] if free else num_steps)
