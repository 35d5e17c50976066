"""`thinwire reproduce utility`, end to end."""

import json
from pathlib import Path

import pytest

from thinwire.bench import utility
from thinwire.bench.utility import METHODS, Setup, setups, study
from thinwire.cli import main


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utility, "MODELS", ("resnet50",))
    monkeypatch.setattr(utility, "GPUS", (64,))
    monkeypatch.setattr(utility, "BATCHES", (16, 64))


@pytest.mark.usefixtures("few")
def test_study_of_a_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "utility.json"
    assert main(["reproduce", "utility", "--all", "--json", str(file)]) == 0
    document, text = json.loads(file.read_text()), capsys.readouterr().out
    assert document["schema"] == 1
    assert document["setups"] == len(document["rows"]) == 2 * 2 * len(METHODS)
    assert document["wins"] == sum(row["wins"] for row in document["rows"])
    for row in document["rows"]:
        assert row["wins"] == (row["observed_s"] < row["ddp_16bit_s"])
        assert row["ddp_s"] >= row["ddp_16bit_s"]
    assert "win over DDP that sends 16 bits" in text
    assert all(source in text for source in utility.SOURCES.values())
    assert "6 set-ups of more than 200" in text
    # A larger batch hides more, and a faster network leaves less to hide.
    of = {(row["recipe"], row["batch"], row["rate_gbit"]): row["speedup_vs_16bit"] for row in document["rows"]}
    assert of["powersgd:4", 16, 10.0] > of["powersgd:4", 16, 25.0]
    assert of["powersgd:4", 16, 10.0] > of["powersgd:4", 64, 10.0]


def test_there_are_over_200_setups_and_each_once() -> None:
    every = list(setups())
    assert len(every) == len(set(every)) > 200


def test_free_compression_would_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is the codec that decides, as the paper finds, not a slip in the exchange."""
    monkeypatch.setattr(utility, "METHODS", {"powersgd:4": ("free", 0.0)})
    setup = Setup(model="resnet50", num_gpus=64, batch=16, rate_gbit=10.0, recipe="powersgd:4")
    document = study([setup])
    (row,) = document["rows"]
    assert row["wins"]
    assert row["observed_s"] == pytest.approx(utility._backward_s("resnet50", 16), rel=0.2)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.slow
def test_few_of_all_setups_win() -> None:
    """The paper's finding: 6 of over 200."""
    document = study()
    assert 0 < document["wins"] < 0.05 * document["setups"]
    assert document["by_rate_gbit"]["25"]["wins"] <= document["by_rate_gbit"]["10"]["wins"]
    assert {row["batch"] for row in document["rows"] if row["wins"]} == {16}, "the smallest batches alone"
