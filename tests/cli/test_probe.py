"""`thinwire probe`: on ranks of its own, and in the lab."""

import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.advisor.profile import read_profile
from thinwire.cli import main
from thinwire.cli.probe import _training
from thinwire.cli.ranks import meet
from thinwire.errors import ThinwireError

MODEL = """
import torch

def make():
    model = torch.nn.Linear(300, 200)
    return model, lambda model, step, rank: model(torch.ones(4, 300)).square().mean()
"""
QUICK = ["--recipes", "int8", "--target", "0.002", "--steps", "1"]


def _run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "mine.py").write_text(MODEL)
    command = [sys.executable, "-m", "thinwire", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    done = _run(tmp_path, "probe", "--model", "mine:make", *QUICK)
    assert done.returncode == 0, done.stderr
    profile = read_profile(tmp_path / "profile.json")
    assert profile.model == "mine:make"
    assert [parameter.shape for parameter in profile.computation.parameters] == [(200, 300), (200,)]
    assert profile.cluster.world_size == 2
    assert "profile: profile.json" in done.stdout
    assert "all-gather of all 2 ranks" in done.stdout


def test_a_factory_without_a_loss_is_refused() -> None:
    with pytest.raises(ThinwireError, match="without a loss there is no step to time"):
        _training("torch.nn:Identity", 0)


@pytest.mark.lab
@pytest.mark.slow
def test_in_the_lab_a_slow_uplink_is_named(tmp_path: Path) -> None:
    rates = "100mbit,100mbit,10mbit:100mbit"
    done = _run(tmp_path, "lab", "--nodes", "3", "--rate", rates, "--", "-m", "thinwire", "probe", *QUICK[:2])
    assert done.returncode == 0, done.stdout + done.stderr
    cluster = read_profile(tmp_path / "profile.json").cluster
    assert {pair.source for pair in cluster.exceptions} == {2}
    assert "look at this: host 2 sends at" in done.stdout


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**launch, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ThinwireError, match=r"rank 1 did not connect within 1 s|rank 0 did not meet the others"):
        meet(0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "mine:"], "expected MODULE:FACTORY"),
        (["--model", "alexnet"], "expected a model of resnet50"),
        (["--recipes", "int9"], "did you mean 'int8'"),
        (["--timeout", "-1"], "expected a number above 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["probe", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
