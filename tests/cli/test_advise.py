"""`thinwire advise`: by hand and from a profile; what it prints, writes, and refuses."""

import json
from pathlib import Path

import pytest

from thinwire.advisor.by_hand import hand_profile
from thinwire.advisor.known import known_computation
from thinwire.advisor.profile import Profile, write_profile
from thinwire.cli import main

RECIPES = ("dense:fp16", "fp16", "int8", "topk:0.01")


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A scaled-down ResNet on four hosts at 100 Mbit/s, with this machine's kernels."""
    computation, _ = known_computation("resnet50/4", backward_s=0.1)
    return hand_profile(
        computation,
        hosts=4,
        ranks_per_host=1,
        rate_bps=1e8,
        latency_s=50e-6,
        recipes=RECIPES,
        model="resnet50/4",
    )


@pytest.fixture
def path(profile: Profile, tmp_path: Path) -> Path:
    write_profile(profile, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_the_document_is_the_documented_one(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "advice.json", tmp_path / "advice.html"
    arguments = ["--recipes", "int8,topk:0.01,int4,diloco:10:int8", "--json", str(file), "--page", str(page)]
    assert main(["advise", "--profile", str(path), "--model", "resnet50/4", *arguments]) == 0
    document = json.loads(file.read_text())
    assert document["schema"] == 2
    every_step = {plan["recipe"] for plan in document["plans"] if plan["sync_every"] == 1}
    assert every_step == {"dense", "dense:fp16", "fp16", "int8", "topk:0.01"}
    assert {plan["recipe"] for plan in document["plans"]} - every_step == {"diloco:10:int8"}
    assert set(document["plans"][0]) == {
        *("recipe", "bucket_cap_mb", "step_s", "speedup_vs_ddp", "speedup_vs_16bit", "exposed_comm_s", "wire_nbytes"),
        *("extra_memory_nbytes", "risk", "reason", "sync_every"),
    }
    assert list(document["left_out"]) == ["int4"]  # not measured
    assert "measure it with thinwire probe" in document["left_out"]["int4"]
    printed = capsys.readouterr().out
    assert document["verdict"] in printed
    assert all(plan["reason"] in printed for plan in document["plans"])
    assert page.read_text().count("data:image/png;base64,") == 2
    assert document["verdict"] in page.read_text()


def test_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = tmp_path / "params.json"
    shapes.write_text(json.dumps({"in.weight": [512, 512], "in.bias": [512], "out.weight": [1000, 512]}))
    file = tmp_path / "advice.json"
    arguments = ["--hosts", "8", "--gpus-per-host", "2", "--rate", "100mbit", "--backward", "20ms", "--recipes", "int8"]
    assert main(["advise", "--model", str(shapes), *arguments, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert any("a message takes" in sentence and "in one process" in sentence for sentence in document["assumptions"])
    assert any("latency is 50 µs" in sentence for sentence in document["assumptions"])
    assert "16 ranks" in document["on"] or "8 hosts of 2 ranks" in document["on"]
    assert "assumed:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate=-5mbit"], "a rate looks like 100mbit"),
        (["--rate", "10furlongs"], "a rate looks like 100mbit"),
        (["--rate", "none"], "without a limit there is nothing to predict"),
        (["--latency=-1ms"], "a time looks like 5ms"),
        (["--hosts", "0"], "above 0"),
        (["--model", "resnet50", "--hosts", "2"], "--rate are missing"),
        ([], "expected --profile FILE, or a cluster by hand"),
        (["--profile", "p.json", "--hosts", "2"], "expected either --profile or a cluster by hand"),
        (["--recipes", "int9"], "did you mean 'int8'"),
        (["--recipes", "servers:1/powersgd:4"], "expected a recipe of the two-shot exchange behind servers"),
        (["--recipes", "int8,streaming:4:2:4:int8"], "overlap: expected 0 to 3 steps"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["advise", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "alexnet"], "expected a model of resnet50, "),
        (["--model", "vgg16/3"], "a scale that divides vgg16's narrowest width"),
        (["--model", "resnet50", "--hosts", "1"], "hosts: expected at least 2"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "--rate", "1gbit", "--hosts", "2", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_more_parts_than_parameters_are_refused_where_they_are_asked_for(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--profile", str(path), "--recipes", "streaming:5000:4000:0:int8"]
    assert main(["advise", *arguments]) == 1
    assert "fragments: expected 1 to " in capsys.readouterr().err


def test_a_profile_of_another_model_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--profile", str(path), "--model", "resnet50"]) == 1
    assert "the profile is of another model (resnet50/4)" in capsys.readouterr().err
