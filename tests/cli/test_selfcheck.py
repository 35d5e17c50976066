"""`thinwire selfcheck`, on ranks of its own and on a launcher's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.cli import main

MODEL = """
import itertools
import os
import signal

from torch import nn
from torch.distributed.fsdp import fully_shard
import torch

def good():
    return nn.Linear(300, 300)

def sharded():
    def loss(model, step, rank):
        return model(torch.randn(4, 300)).square().mean()
    return fully_shard(good()), loss

def ending(how):
    def loss(model, step, rank):
        if rank == 1 and step == 3:
            how()
        return model(torch.randn(4, 300)).square().sum()
    return nn.Linear(300, 300), loss

def killed():
    return ending(lambda: os.kill(os.getpid(), signal.SIGKILL))

def spinning():
    return ending(lambda: [None for _ in itertools.count() if False])

def bad():
    def loss(model, step, rank):
        if rank == 1:
            raise KeyError("no such batch")
        return model(torch.randn(4, 300)).square().sum()
    return nn.Linear(300, 300), loss
"""


def _run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    (folder / "mine.py").write_text(MODEL)
    return subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_recipes_that_know_of_nodes(tmp_path: Path) -> None:
    """Two nodes of two ranks; and what is missing where it is not said."""
    done = _run(tmp_path, "thinwire", "selfcheck", "--recipe", "hier/int4", "--nproc", "4", "--ranks-per-node", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "delivered + owed = all gradients" in done.stdout
    done = _run(tmp_path, "thinwire", "selfcheck", "--recipe", "hier/int4")
    assert done.returncode == 1
    assert "expected to be told which ranks share a node" in done.stdout + done.stderr


def test_alone(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    names = ["dense", "replicas", "conservation", "bytes", "parity", "resume"]  # to kill takes a while, and is below
    arguments = ["--rungs", *names, "--recipe", "int8", "onebit", "--json", str(file)]
    done = _run(tmp_path, "thinwire", "selfcheck", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "thinwire selfcheck: int8 on 2 ranks does what it promises here: dense, replicas, bytes, parity, resume hold; "
        "conservation: not applicable, as said above",
        "thinwire selfcheck: onebit on 2 ranks does what it promises here: dense, replicas, conservation, bytes, "
        "parity, resume hold",
    ]
    document = json.loads(file.read_text())
    assert document["schema"] == 1
    assert document["ok"] is True
    assert document["conditions"]["world_size"] == 2
    assert [one["recipe"] for one in document["recipes"]] == ["int8", "onebit"]
    for recipe in document["recipes"]:
        rungs = {rung["name"]: rung for rung in recipe["rungs"]}
        assert list(rungs) == names
        assert rungs["bytes"]["numbers"]["counted_nbytes"] == rungs["bytes"]["numbers"]["claimed_nbytes"] > 0
        assert all(rung["sentence"] in done.stdout for rung in rungs.values())


def test_under_torchrun_with_a_model_of_the_users(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire"]
    done = _run(
        tmp_path, *launcher, "selfcheck", "--model", "mine:good", "--recipe", "dense until 9 then topk:0.5", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["conditions"]["model"] == "mine:good"
    rungs = json.loads(done.stdout)["recipes"][0]["rungs"]
    assert [rung["verdict"] for rung in rungs] == ["ok"] * 7, done.stderr
    assert rungs[-1]["sentence"].startswith("rank 1's process was killed in step 3; the others noticed within")
    assert "topk:0.5 on 2 ranks does what it promises here" in done.stderr


@pytest.mark.slow
def test_a_sharded_model(tmp_path: Path) -> None:
    done = _run(tmp_path, "thinwire", "selfcheck", "--model", "mine:sharded", "--recipe", "onebit", "--weights", "int8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'dense' gives FSDP2's own bits" in done.stdout
    assert "resume, kill hold" in done.stdout


def test_a_rank_that_raises_is_said_in_a_line_and_ends_it(tmp_path: Path) -> None:
    done = _run(tmp_path, "thinwire", "selfcheck", "--model", "mine:bad", "--timeout", "4")
    assert done.returncode == 1
    assert "rank 1: KeyError: 'no such batch'" in done.stdout
    assert "does NOT do what it promises here: dense failed" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_launcher_without_an_address_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    done = _run(tmp_path, "thinwire", "selfcheck")
    assert done.returncode == 1
    assert done.stderr.startswith("thinwire: rank 0 did not meet the others")
    assert "MASTER_ADDR" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [("killed", "rank 1 was ended by signal 9"), ("spinning", "rank 1: int8, rung 'dense' took more than 15 s")],
)
def test_a_rank_that_dies_or_never_returns_ends_it(tmp_path: Path, model: str, said: str) -> None:
    done = _run(tmp_path, "thinwire", "selfcheck", "--model", f"mine:{model}", "--timeout", "3")
    assert done.returncode == 1
    assert said in done.stderr
    assert "rung 'dense': a rank came to no verdict" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "int9"], "did you mean 'int8'"),
        (["--model", "mine"], "expected MODULE:FACTORY"),
        (["--timeout", "0"], "--timeout"),
        (["--rungs", "denser"], "denser"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["selfcheck", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_arguments_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", "--steps", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    assert main(["selfcheck", "--nproc", "2"]) == 2
    assert "--nproc" in capsys.readouterr().err
