"""Whole runs with real processes: baselines over loopback, a failing rank, a run in the lab."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire import PlanOptions
from thinwire.bench import engine
from thinwire.bench.arithmetic import dense_nbytes
from thinwire.bench.methods import leaving_nbytes
from thinwire.bench.settings import BASELINES, LOSS_STEPS, Settings
from thinwire.cli import main
from thinwire.errors import LabError
from thinwire.lab import Loopback
from thinwire.plan import build_plan


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_network(nodes: int, nproc_per_node: int, **_: Any) -> Loopback:
        return Loopback(nodes, nproc_per_node, reason="chosen by the test")

    monkeypatch.setattr(engine, "open_network", open_network)


@pytest.mark.usefixtures("loopback")
def test_baselines_over_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "results.json"
    arguments = ["--workload", "digits", "--nodes", "2", "--steps", "6", "--json", str(file)]
    outputs = ["--report", str(tmp_path / "report"), "--trace", str(tmp_path / "step.json")]
    assert main(["bench", *arguments, "--methods", ",".join(BASELINES), *outputs]) == 0
    output = capsys.readouterr()
    assert "PowerSGD r4" in output.out
    assert "chosen by the test" in output.out
    document = json.loads(file.read_text())
    assert not document["conditions"]["emulated"]
    assert (tmp_path / "report" / "report.html").exists()
    for name in ("ddp", "ddp-fp16", "ddp-powersgd-4"):
        events = json.loads((tmp_path / f"step-{name}.json").read_text())["traceEvents"]
        found = [(event["pid"], event["name"]) for event in events if event["ph"] == "X"]
        assert sorted(found) == [(rank, name) for rank in range(2) for name in ("backward", "forward", "optimizer")]
    ddp, fp16, powersgd = document["runs"]
    for run in document["runs"]:
        assert run["bit_identical"]
        assert run["steps"] == len(run["curve"]["loss"]) == len(run["curve"]["step_s"]) == 6
    assert ddp["planned_nbytes_per_step"] == dense_nbytes(document["conditions"]["num_parameters"], 2)
    assert fp16["planned_nbytes_per_step"] * 2 == ddp["planned_nbytes_per_step"]
    assert powersgd["planned_nbytes_per_step"] < fp16["planned_nbytes_per_step"] / 2
    # Same seed, same batches: the first loss comes before any exchange.
    assert ddp["curve"]["loss"][0] == fp16["curve"]["loss"][0] == powersgd["curve"]["loss"][0]
    assert ddp["curve"]["loss"][-1] != powersgd["curve"]["loss"][-1]


@pytest.mark.usefixtures("loopback")
def test_momentum_of_workers_and_a_learning_rate_that_falls_to_0():
    settings = Settings(
        workload="digits",
        methods=("ddp", "fp16@nag"),
        nodes=2,
        steps=4,
        optimizer="nag",
        learning_rate=0.1,
        decay="linear",
    )
    document = engine.run_benchmark(settings, lambda event: None)
    ddp, ours = document["runs"]
    assert document["conditions"]["optimizer"] == "NAG, momentum 0.9, weight decay 0.0001, learning rate 0.1"
    assert document["conditions"]["learning_rate_decay"] == "linear"
    # Nesterov's SGD on either side, but for 16 bits on the wire.
    assert ours["curve"]["loss"] == pytest.approx(ddp["curve"]["loss"], rel=0.01)
    assert ours["curve"]["loss"] != ddp["curve"]["loss"]
    assert ours["bit_identical"]


@pytest.mark.usefixtures("loopback")
def test_a_time_budget_ends_a_replay_on_all_ranks():
    events: list[str] = []
    settings = Settings(workload="replay:resnet50/8", methods=("ddp",), nodes=2, seconds=1.0, compute_s=0.05)
    document = engine.run_benchmark(settings, lambda event: events.append(event["event"]))
    (run,) = document["runs"]
    assert run["bit_identical"]
    assert run["val_loss"] is None
    assert run["train_loss"] is None
    assert run["steps"] >= 5
    assert sum(run["curve"]["step_s"]) > 0.9  # stops once the time is up, not before
    assert run["step_s"] >= 0.05
    assert events[:3] == ["network", "ready", "method"]
    assert events.count("run") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_ranks_of_one_host_are_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What leaves a host: half as much where its two ranks send their sum, in 4 bits an eighth of DDP's."""
    file = tmp_path / "results.json"
    arguments = ["--workload", "digits", "--nodes", "2", "--ranks-per-node", "2", "--steps", "6", "--json", str(file)]
    assert main(["bench", *arguments, "--methods", "ddp,int4,hier/int4"]) == 0
    assert "4 processes on one machine" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["conditions"]["ranks_per_node"] == 2
    ddp, whole, sums = document["runs"]
    assert all(run["bit_identical"] for run in document["runs"])
    assert ddp["planned_nbytes_per_step"] == dense_nbytes(document["conditions"]["num_parameters"], 4)
    assert whole["planned_nbytes_per_step"] == pytest.approx(2 * sums["planned_nbytes_per_step"], rel=0.01)
    assert sums["curve"]["loss"][0] == ddp["curve"]["loss"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_a_sharded_model_over_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Payloads by arithmetic: plain FSDP2's, and less where gradients, or weights too, are compressed."""
    file = tmp_path / "results.json"
    arguments = ["--workload", "digits", "--wrap", "fsdp", "--nodes", "2", "--steps", "5", "--json", str(file)]
    assert main(["bench", *arguments, "--methods", "fsdp,int8,int8:weights=int8"]) == 0
    assert "FSDP2 fp32" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["conditions"]["wrap"] == "fsdp"
    plain, gradients, both = document["runs"]
    assert all(run["bit_identical"] for run in document["runs"])
    numel = document["conditions"]["num_parameters"]
    # Half of the gradients, and of the weights once or twice, leave each of two hosts.
    assert 2 * 2 * numel < plain["planned_nbytes_per_step"] < 3 * 2 * numel * 1.01
    assert plain["compression_ratio"] == 1.0 < gradients["compression_ratio"] < both["compression_ratio"]
    assert plain["curve"]["loss"][0] == gradients["curve"]["loss"][0]
    assert plain["curve"]["loss"][0] != both["curve"]["loss"][0]  # computed with other weights
    assert plain["accuracy"] > 0.1


@pytest.mark.usefixtures("loopback")
def test_a_training_ends_once_its_loss_is_reached():
    """Of seed 3 alone, with a loss that it has from the start: it is looked at as soon as it means something."""
    settings = Settings(workload="digits", methods=("ddp",), nodes=2, steps=150, first_seed=3, until_loss=10.0)
    (run,) = engine.run_benchmark(settings, lambda event: None)["runs"]
    assert (run["seed"], run["steps"]) == (3, LOSS_STEPS)


def test_what_leaves_a_host():
    """Of nodes of one rank it is what the rank sends; of all ranks on one host nothing."""
    for recipe in ("int8", "global:8", "globalexp", "powersgd:2", "gather/onebit", "hier/int4"):
        options = PlanOptions(min_nbytes=0, partition_numel=4096, node_sizes=2)
        plan = build_plan([("w", torch.zeros(256, 256)), ("b", torch.zeros(256))], recipe, 4, options)
        rounds = [one for layout in plan.messages(["w", "b"]) for one in layout.rounds]
        assert [leaving_nbytes(rounds, rank, 1) for rank in range(4)] == [
            sum(one.sent_nbytes(rank) for one in rounds) for rank in range(4)
        ]
        assert leaving_nbytes(rounds, 0, 4) == 0
        left = [leaving_nbytes(rounds, node, 2) for node in range(2)]
        assert 0 < max(left) < plan.raw_nbytes
        if recipe == "hier/int4":
            assert max(left) == plan.between_nodes_nbytes


@pytest.mark.usefixtures("loopback")
def test_a_failing_rank_is_named_with_its_last_lines():
    with pytest.raises(LabError, match=r"(?s)rank \d .*nonsense"):
        engine.run_benchmark(Settings(workload="replay:nonsense", methods=("ddp",), nodes=2), lambda event: None)


@pytest.mark.lab
def test_bytes_at_the_interface_are_those_of_the_plan():
    settings = Settings(workload="replay:resnet50/4", methods=("ddp",), nodes=2, rate="1gbit", steps=8, compute_s=0.05)
    document = engine.run_benchmark(settings, lambda event: None)
    (run,) = document["runs"]
    assert document["conditions"]["rate_bps"] == 10**9
    sent, planned = run["sent_nbytes_per_step"], run["planned_nbytes_per_step"]
    assert planned < sent < 1.1 * planned
    assert run["ideal_s"] > 0


@pytest.mark.slow
@pytest.mark.lab
def test_bytes_between_hosts_are_those_of_the_plan():
    """Of two hosts of two ranks each, read at the hosts' interfaces: sums leave them once, not from every rank."""
    methods = ("ddp", "int8", "hier/int8")
    settings = Settings(workload="digits", methods=methods, nodes=2, ranks_per_node=2, rate="1gbit", steps=6)
    document = engine.run_benchmark(settings, lambda event: None)
    sent = {run["method"]: run["sent_nbytes_per_step"] for run in document["runs"]}
    for run in document["runs"]:
        assert run["bit_identical"]
        assert 1.0 < sent[run["method"]] / run["planned_nbytes_per_step"] < 1.15
    assert 1.8 < sent["int8"] / sent["hier/int8"] < 2.2
    assert sent["ddp"] / sent["hier/int8"] > 4.0  # small parameters stay dense


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["bench", "--methods", "int9"], "int9"),
        (["bench", "--methods", "ddp,ddp"], "different"),
        (["bench", "--workload", "imagenet"], "imagenet"),
        (["bench", "--workload", "replay:vgg16/7"], "narrowest"),
        (["bench", "--nodes", "1"], "2 to 250"),
        (["bench", "--nodes", "251"], "2 to 250"),
        (["bench", "--optimizer", "lion"], "lion"),
        (["bench", "--rate", "fast"], "fast"),
        (["bench", "--methods", "int4:weights=int99"], "int99"),
        (["bench", "--wrap", "fsdp1"], "fsdp1"),
        (["bench", "--ranks-per-node", "0"], "above 0"),
        (["bench", "--latency", "soon"], "soon"),
        (["bench", "--steps", "3", "--seconds", "3"], "not allowed"),
        (["demo", "--seconds", "0"], "above 0"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_a_readable_line(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith(f"thinwire {arguments[0]}: error: ")
    assert word in last_line


def test_outputs_that_cannot_be_written_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    for option, path in (("--json", tmp_path / "none" / "x.json"), ("--report", tmp_path / "file" / "report")):
        assert main(["bench", option, str(path)]) == 1
        captured = capsys.readouterr()
        reason = "No such file or directory" if option == "--json" else "Not a directory"
        assert captured.err == f"thinwire: cannot write {path}: {reason}\n"
        assert not captured.out
    assert not list(tmp_path.glob("*.json"))
    assert main(["lab", "--json", str(tmp_path / "none" / "x.json"), "--", "true"]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--optimizer", "sgd"], ["--lr", "0.1"]])
def test_a_replay_has_no_optimizer(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--workload", "replay:vgg16/8", *arguments]) == 1
    assert f"{arguments[0]}: a replay trains nothing" in capsys.readouterr().err


def test_a_decay_needs_a_number_of_steps(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--workload", "digits", "--decay", "linear"]) == 1
    assert "--decay: the learning rate falls over a number of steps; give it with --steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "fsdp"], "expected --wrap fsdp"),
        (["--methods", "int4:weights=int8"], "DDP sends no weights"),
        (["--wrap", "fsdp", "--methods", "ddp,int4"], "expected --wrap ddp"),
        (["--wrap", "fsdp", "--workload", "replay:vgg16"], "a replay makes up gradients"),
        (["--wrap", "fsdp", "--ranks-per-node", "2"], "expected one rank a host"),
        (["--wrap", "fsdp", "--bucket-cap-mb", "1"], "FSDP2 has no buckets"),
        (["--wrap", "fsdp", "--methods", "hier/int8"], "FSDP2 knows of no nodes"),
        (["--wrap", "fsdp", "--optimizer", "lans"], "expected adamw or sgd with --wrap fsdp"),
        (["--wrap", "fsdp", "--methods", "int8@nag", "--optimizer", "nag"], "@nag applies momentum"),
        (["--methods", "int8@nag"], "expected --optimizer nag with it"),
        (["--methods", "int8@dgc"], "expected --optimizer sgd with it"),
        (["--methods", "diloco:1:int8@nag", "--optimizer", "nag"], "@nag applies momentum"),
        (["--methods", "servers:1/powersgd:4"], "expected a recipe of the two-shot exchange behind servers"),
        (["--methods", "servers:1/int8", "--ranks-per-node", "2"], "one rank a host"),
        (["--methods", "diloco:4:int8", "--steps", "8", "--start-after", "1"], "expected 0 with diloco:4:int8"),
        (["--start-after", "-1"], "expected at least 0, got -1"),
    ],
)
def test_what_does_not_go_together_is_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thinwire.bench.engine.open_network", interrupted)
    assert main(["bench", "--json", "-"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "thinwire: interrupted"
