"""`thinwire whatif`, end to end, and its sweeps."""

import json
from pathlib import Path

import pytest

from thinwire.advisor.by_hand import PAYLOAD
from thinwire.advisor.whatif import Curve, Sweep
from thinwire.cli import main

NAMES = ["bandwidth", "latency", "compute", "workers", "codec", "batch"]


def test_whatif_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, report = tmp_path / "whatif.json", tmp_path / "report"
    arguments = ["--model", "resnet50/4", "--hosts", "4", "--rate", "1gbit", "--backward", "50ms"]
    arguments += ["--recipes", "int8", "--json", str(file), "--report", str(report)]
    assert main(["whatif", *arguments]) == 0
    document, text = json.loads(file.read_text()), capsys.readouterr().out
    assert document["schema"] == 1
    assert [sweep["name"] for sweep in document["sweeps"]] == NAMES
    assert document["conditions"]["rate_bps"] == pytest.approx(1e9 * PAYLOAD)  # as `advise` takes it
    sweeps = {sweep["name"]: {curve["label"]: curve for curve in sweep["curves"]} for sweep in document["sweeps"]}
    for recipe in ("dense", "dense:fp16", "int8"):
        by_rate, by_latency = (sweeps[name][recipe]["y"] for name in ("bandwidth", "latency"))
        assert by_rate[0] > by_rate[-1]
        assert by_latency[0] < by_latency[-1]
        assert sweeps["compute"][recipe]["y"][0] > sweeps["compute"][recipe]["y"][-1]
    slow = {recipe: sweeps["bandwidth"][recipe]["y"][0] for recipe in ("dense", "dense:fp16", "int8")}
    # Where the wire is all; of so small a model much is below the threshold, and stays as it is.
    assert slow["dense"] > 1.8 * slow["dense:fp16"]
    assert slow["dense:fp16"] > 1.4 * slow["int8"]
    ratios = sweeps["batch"]["0.1 Gbit/s"]["y"]
    known = [ratio for ratio in ratios if ratio is not None]
    assert known == sorted(known, reverse=True), "a larger batch needs less"
    assert "int8 is faster than 16-bit DDP" in text
    assert "assumed: kernels are as fast as on this machine" in text
    assert {path.name for path in report.iterdir()} == {
        "whatif.html",
        "results.json",
        *(f"{name}.png" for name in NAMES),
    }
    assert (report / "whatif.html").read_text().count("data:image/png;base64") == len(NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate=-5mbit"], "a rate looks like"),
        (["--rate", "100mbps"], "a rate looks like"),
        (["--latency", "5parsec"], "a time looks like"),
        (["--recipes", "int9"], "int9"),
        (["--hosts", "0"], "above 0"),
        ([], "expected --profile FILE, or a cluster by hand"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["whatif", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "alexnet", "--hosts", "2", "--rate", "1gbit"], "expected a model of"),
        (["--hosts", "1", "--rate", "1gbit", "--model", "resnet50/16"], "hosts: expected at least 2"),
        (["--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_crossings_lie_where_lines_cross() -> None:
    x = (1.0, 10.0, 100.0)
    curves = (Curve(label="dense:fp16", x=x, y=(8.0, 4.0, 2.0)), Curve(label="int8", x=x, y=(4.0, 3.0, 3.0)))
    sweep = Sweep(name="", title="", x_name="", y_name="", curves=curves, note="")
    ((label, where),) = sweep.crossings()
    assert (label, where) == ("int8", pytest.approx(10 * 10**0.5))


def test_both_commands_read_one_cluster(tmp_path: Path) -> None:
    """What `advise` says of a step is a point of `whatif`'s curves: the arguments mean the same to both."""
    cluster = ["--model", "resnet50/8", "--hosts", "4", "--rate", "100mbit", "--backward", "50ms", "--recipes", "int8"]
    advice, sweeps = tmp_path / "advice.json", tmp_path / "sweeps.json"
    assert main(["advise", *cluster, "--json", str(advice)]) == 0
    assert main(["whatif", *cluster, "--json", str(sweeps)]) == 0
    (ddp,) = (plan for plan in json.loads(advice.read_text())["plans"] if plan["recipe"] == "dense")
    (workers,) = (sweep for sweep in json.loads(sweeps.read_text())["sweeps"] if sweep["name"] == "workers")
    (dense,) = (curve for curve in workers["curves"] if curve["label"] == "dense")
    assert dense["y"][dense["x"].index(4)] == pytest.approx(ddp["step_s"], rel=1e-6)
