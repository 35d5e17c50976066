"""`thinwire bench validate`: its figures from known times, its grid, and one small cell in the lab."""

import json
from pathlib import Path

import pytest

from thinwire.advisor.by_hand import hand_profile
from thinwire.advisor.known import known_computation
from thinwire.bench.validation import AGAIN, METHODS, Cell, grid, make_document, predict, rows_of
from thinwire.bench.validation_plot import scatter
from thinwire.cli import main


def _row(workload: str, recipe: str, predicted_s: float, measured_s: float) -> dict[str, object]:
    row = {"workload": workload, "nodes": 4, "rate_bps": 10**8, "recipe": recipe, "floor": 0.02}
    return {**row, "predicted_s": predicted_s, "measured_s": measured_s}


def test_errors_floors_and_winners() -> None:
    rows = [
        *(_row("gpt", "ddp", 1.1, 1.0), _row("gpt", "int8", 0.5, 0.5)),
        *(_row("digits", "ddp", 0.8, 1.0), _row("digits", "int8", 0.9, 0.9)),
    ]
    document = make_document(rows, {"a": "b"})
    assert document["median_error"] == pytest.approx(0.05)
    assert document["p90_error"] == pytest.approx(0.2)
    assert document["median_floor"] == 0.02
    first, second = document["winners"]
    assert (first["measured"], first["predicted"], first["loss"]) == ("int8", "int8", 0.0)
    assert (second["measured"], second["predicted"]) == ("int8", "ddp")
    assert second["loss"] == pytest.approx(1 / 9)
    assert document["failed"] == {"a": "b"}
    assert scatter(document).startswith(b"\x89PNG")


def test_the_grid_leaves_out_what_would_take_minutes_a_step() -> None:
    cells = list(grid(["gpt", "replay:resnet50"], ["10mbit", "100mbit"], [2, 4]))
    assert [(cell.workload, cell.rate, cell.nodes) for cell in cells] == [
        *(("gpt", "10mbit", 2), ("gpt", "10mbit", 4), ("gpt", "100mbit", 2), ("gpt", "100mbit", 4)),
        *(("replay:resnet50", "100mbit", 2), ("replay:resnet50", "100mbit", 4)),
    ]


def test_the_default_grid_is_large_enough() -> None:
    from thinwire.cli.validate import HOSTS, RATES, WORKLOADS

    assert len(list(grid(WORKLOADS, RATES, HOSTS))) >= 24
    assert len(METHODS) >= 5


def test_rows_compare_medians_of_measured_steps_with_predictions(tmp_path: Path) -> None:
    computation, _ = known_computation("resnet50/8", backward_s=0.02)
    profile = hand_profile(
        computation,
        hosts=2,
        ranks_per_host=1,
        rate_bps=1e8,
        latency_s=0.0,
        recipes=("dense:fp16", "int8"),
        model="small",
    )
    cell = Cell(workload="replay:resnet50/8", nodes=2, rate="100mbit", methods=("ddp", "int8"))
    cell.save(tmp_path / "cell.json")
    assert Cell.load(tmp_path / "cell.json") == cell
    told = {
        "profile": {key: value for key, value in profile.as_dict().items() if key != "schema"},
        "step_s": {"ddp": [0.3, 0.1, 0.2], "int8": [0.05], AGAIN: [0.16]},
        "bucket_cap_mb": {"ddp": 4.0, "int8": 1.0, AGAIN: 4.0},
    }
    ddp, int8 = rows_of(cell, json.loads(json.dumps(told)))
    assert (ddp["measured_s"], int8["measured_s"]) == (0.2, 0.05)
    assert ddp["floor"] == int8["floor"] == pytest.approx(0.25)
    assert ddp["predicted_s"] == predict(profile, "ddp", 4.0)
    assert int8["predicted_s"] == predict(profile, "int8", 1.0) < ddp["predicted_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rates", "none"], "expected a rate such as 100mbit"),
        (["--hosts", "1"], "expected 2 to"),
        (["--workloads", "alexnet"], "unknown workload"),
        (["--workloads", ","], "expected at least one"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "validate", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ("int8", "expected ddp among them"),
        ("ddp,ddp-powersgd:4", "ddp-powersgd:4 has no plan to predict from"),
        ("ddp,dense until 5 then int4", "dense until 5 then int4"),
    ],
)
def test_methods_that_cannot_be_validated(methods: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "validate", "--methods", methods]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_cell_in_the_lab(tmp_path: Path) -> None:
    file, plot = tmp_path / "cells.json", tmp_path / "cells.png"
    cell = ["--workloads", "replay:resnet50/8", "--rates", "100mbit", "--hosts", "2", "--methods", "ddp,int8"]
    assert main(["bench", "validate", *cell, "--steps", "3", "--json", str(file), "--plot", str(plot)]) == 0
    document = json.loads(file.read_text())
    assert [row["recipe"] for row in document["cells"]] == ["ddp", "int8"]
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in document["cells"])
    assert document["failed"] == {}
    assert plot.read_bytes().startswith(b"\x89PNG")
