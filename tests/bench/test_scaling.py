"""`thinwire bench scaling`: its figures from known times, what it says of cores and memory, and one small run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from thinwire.bench import engine, scaling
from thinwire.bench.scaling import Grid, less_communication, needed_nbytes, remarks, row_of, run_grid
from thinwire.bench.scaling_plots import _most_compared, cells, write_page
from thinwire.bench.settings import Settings
from thinwire.cli import main
from thinwire.errors import LabError
from thinwire.lab import Loopback

GRID = Grid(workloads=("replay:vgg16/8",), hosts=(1, 2, 4), methods=("ddp", "onebit"), steps=2)
RATE = 1e9


def _run(method: str, nodes: int, step_s: float, planned: float, backward_s: float = 0.2) -> dict[str, Any]:
    return {
        "workload": "replay:vgg16/8",
        "method": method,
        "nodes": nodes,
        "step_s": step_s,
        "forward_s": 0.1,
        "backward_s": backward_s,
        "optimizer_s": 1e-5,  # a replay has none, which takes some time, too
        "compute_s": 0.1 + backward_s + 1e-5,
        "codec_s": 0.01,
        "planned_nbytes_per_step": planned,
        "sent_nbytes_per_step": planned,
        "bit_identical": True,
    }


def _conditions(emulated: bool = True) -> dict[str, Any]:
    return {
        "emulated": emulated,
        "reason": "" if emulated else "no namespaces here",
        "rate_bps": RATE,
        "latency_s": None,
        "congestion_control": "cubic",
        "measured_rate_bps": RATE if emulated else None,
        "cores": 2,
    }


def _benchmark(settings: Settings, on_event: Any) -> dict[str, Any]:
    """A document as the engine makes it: the wire takes 0.4 s of ddp's and 0.01 s of onebit's bytes."""
    on_event({"event": "method", "method": settings.methods[0]})
    if settings.nodes == 1:
        return {"conditions": {**_conditions(), "measured_rate_bps": None}, "runs": [_run("ddp", 1, 0.3, 0.0)]}
    runs = {"ddp": _run("ddp", settings.nodes, 0.6, 0.4 * RATE / 8)}
    # Of its time neither computing nor the wire is the reason.
    runs["onebit"] = _run("onebit", settings.nodes, 0.45, 0.01 * RATE / 8, backward_s=0.25)
    return {"conditions": _conditions(), "runs": [runs[method] for method in settings.methods]}


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(scaling, "run_benchmark", _benchmark)
    return run_grid(GRID, lambda *_: None, lambda _: None, available_nbytes=1 << 40)


def _row(document: Mapping[str, Any], method: str, nodes: int) -> dict[str, Any]:
    return next(row for row in document["rows"] if (row["method"], row["nodes"]) == (method, nodes))


def test_figures_are_those_of_the_paper(document: dict[str, Any]) -> None:
    assert [(row["nodes"], row["method"]) for row in document["rows"]] == [
        (1, "ddp"), (2, "ddp"), (2, "onebit"), (4, "ddp"), (4, "onebit"),
    ]  # fmt: skip
    alone, ddp, onebit = _row(document, "ddp", 1), _row(document, "ddp", 4), _row(document, "onebit", 4)
    assert (alone["communication_s"], alone["efficiency"], alone["ideal_efficiency"]) == (0.0, 1.0, 1.0)
    assert ddp["communication_s"] == pytest.approx(0.3)
    assert ddp["efficiency"] == pytest.approx(0.5)
    assert ddp["wire_s"] == pytest.approx(0.4)
    assert ddp["ideal_efficiency"] == pytest.approx((0.1 + 0.2) / (0.1 + 0.4))
    assert onebit["ideal_efficiency"] == 1.0  # its bytes hide behind backward
    assert less_communication(document["rows"], onebit) == pytest.approx(0.5)
    assert less_communication(document["rows"], ddp) is less_communication(document["rows"], alone) is None


def test_the_limit_of_every_step_is_told(document: dict[str, Any]) -> None:
    assert _row(document, "ddp", 1)["bound"] == "computing"
    assert _row(document, "ddp", 4)["bound"] == "wire"
    assert _row(document, "onebit", 4)["bound"] == "cores"
    fast = row_of(_conditions(), _run("onebit", 4, 0.31, 1e5), _run("ddp", 1, 0.3, 0.0))
    assert fast["bound"] == "computing"
    told = "\n".join(remarks(document))
    cores = document["conditions"]["cores"]
    assert f"on 4 hosts: {cores} cores are the limit, not the wire, of onebit (0.45 s, of which the wire" in told
    assert "the step without exchange takes 0.35 s, on one 0.30 s" in told


def test_servers_need_memory_too() -> None:
    """Two servers on each of two hosts with bert-large took more than 24 GB, and the ranks were killed for it."""
    without, served = (needed_nbytes("replay:bert-large", 2, method) for method in ("onebit", "servers:2/onebit"))
    assert without < 0.95 * 24e9 < served


def test_what_has_no_room_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "run_benchmark", _benchmark)
    room = (needed_nbytes("replay:vgg16/8", 4, "ddp") + needed_nbytes("replay:vgg16/8", 4, "onebit")) // 2
    rows: list[Mapping[str, Any]] = []
    document = run_grid(GRID, lambda *_: None, rows.append, available_nbytes=room)
    assert rows == document["rows"]
    assert [(row["nodes"], row["method"]) for row in rows] == [(1, "ddp"), (2, "ddp"), (2, "onebit"), (4, "ddp")]
    assert list(document["left_out"]) == ["replay:vgg16/8 on 4 hosts, onebit"]
    assert "replay:vgg16/8 on 4 hosts, onebit: left out, about" in "\n".join(remarks(document))


def test_what_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def benchmark(settings: Settings, on_event: Any) -> dict[str, Any]:
        if settings.nodes == 2:
            raise LabError("rank 1 died")
        return _benchmark(settings, on_event)

    monkeypatch.setattr(scaling, "run_benchmark", benchmark)
    document = run_grid(GRID, lambda *_: None, lambda _: None, available_nbytes=1 << 40)
    assert document["failed"] == {"replay:vgg16/8 on 2 hosts": "rank 1 died"}
    assert {row["nodes"] for row in document["rows"]} == {1, 4}


def test_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "open_network", lambda nodes, **_: Loopback(nodes, reason="chosen by the test"))
    with pytest.raises(LabError, match=r"scaling over loopback says nothing.*chosen by the test"):
        run_grid(Grid(workloads=("replay:resnet50/8",), compute_s=0.01, steps=1), lambda *_: None, lambda _: None)


@pytest.mark.parametrize(("nodes", "most"), [([1, 2, 2, 4], 2), ([1, 2, 2, 4, 4], 4), ([1, 2, 4], 4), ([1, 1], 1)])
def test_bars_show_the_hosts_with_most_methods(nodes: list[int], most: int) -> None:
    assert _most_compared(nodes) == most


def test_the_page_holds_both_figures_and_the_table(document: dict[str, Any], tmp_path: Path) -> None:
    page = write_page(document, tmp_path / "folder").read_text()
    assert page.count("data:image/png;base64,") == 2
    names = {"breakdown.png", "efficiency.png", "results.json", "scaling.html"}
    assert {path.name for path in (tmp_path / "folder").iterdir()} == names
    for name in ("breakdown.png", "efficiency.png"):
        assert (tmp_path / "folder" / name).read_bytes().startswith(b"\x89PNG")
    assert "40.4 %" in page
    onebit = _row(document, "onebit", 4)
    assert cells(document["rows"], onebit)[5:] == ["50.0 %", "66.7 %", "100.0 %", "cores"]
    assert "<td>66.7 %</td>" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "gpt"], "expected a replay such as replay:vgg16, got 'gpt'"),
        (["--hosts", "0"], "expected 2 to"),
        (["--hosts", ","], "expected at least one"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "scaling", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("diloco:10:int8", "exchanges what an optimizer changed"),
        ("fsdp", "expected --wrap fsdp"),
        ("auto", "expected at least 42 with auto"),
    ],
)
def test_methods_that_cannot_be_replayed(method: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "--methods", method]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_in_the_lab(tmp_path: Path) -> None:
    file, folder = tmp_path / "rows.json", tmp_path / "report"
    small = ["--workloads", "replay:resnet50/8", "--hosts", "2", "--methods", "ddp,onebit,servers:1/onebit"]
    small += ["--rate", "100mbit", "--steps", "2", "--compute", "0.05"]
    assert main(["bench", "scaling", *small, "--json", str(file), "--report", str(folder)]) == 0
    document = json.loads(file.read_text())
    assert [(row["nodes"], row["method"]) for row in document["rows"]] == [
        (1, "ddp"), (2, "ddp"), (2, "onebit"), (2, "servers:1/onebit"),
    ]  # fmt: skip
    assert all(0 < row["ideal_efficiency"] <= 1 and row["step_s"] > 0 for row in document["rows"])
    assert document["failed"] == document["left_out"] == {}
    assert (folder / "scaling.html").exists()
