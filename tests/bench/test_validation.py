"""`thinwire bench validate`: its figures from known times, its grid, and one small cell in the lab."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from thinwire.advisor.by_hand import hand_profile
from thinwire.advisor.known import known_computation
from thinwire.advisor.profile import Profile
from thinwire.bench import validation
from thinwire.bench.validation import AGAIN, METHODS, Cell, grid, kept_or_measured, predict, rows_of, run_grid
from thinwire.bench.validation_figures import make_document
from thinwire.bench.validation_plot import scatter
from thinwire.bench.validation_text import markdown, summary
from thinwire.cli import main
from thinwire.errors import LabError


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


def _at(rate_bps: float, recipe: str, predicted_s: float, measured_s: float) -> dict[str, object]:
    return {**_row("gpt", recipe, predicted_s, measured_s), "rate_bps": rate_bps}


def test_cross_overs_lie_between_two_rates_by_log_of_the_ratio() -> None:
    """int8 wins at 100 Mbit/s by e^0.1, and loses at 1 Gbit/s by e^0.1: halfway, in logarithms."""
    step = math.exp(0.1)
    rows = [
        *(_at(1e8, "ddp", step, step), _at(1e8, "int8", 1.0, 1.0)),
        *(_at(1e9, "ddp", 1.0, 1.0), _at(1e9, "int8", step**3, step)),
    ]
    (found,) = make_document(rows, {})["crossovers"]
    assert (found["baseline"], found["recipe"]) == ("ddp", "int8")
    assert found["measured_bps"] == pytest.approx(10**8.5)
    assert found["predicted_bps"] == pytest.approx(10**8.25)
    assert not make_document(rows, {})["held"]["crossovers"]
    never = [{**row, "predicted_s": 1.0 if row["recipe"] == "ddp" else 0.5} for row in rows]
    assert make_document(never, {})["crossovers"][0]["predicted_bps"] is None
    within = [{**row, "floor": 0.2} for row in rows]
    assert make_document(within, {})["crossovers"] == [], "no difference that is below the floor counts"


def test_what_was_promised_is_held_against_the_figures() -> None:
    good = make_document([_row("gpt", "ddp", 1.0, 1.05), _row("gpt", "int8", 0.5, 0.51)], {})
    assert good["held"] == {"median_error": True, "p90_error": True, "winners": True, "crossovers": True}
    bad = make_document([_row("gpt", "ddp", 0.4, 1.0), _row("gpt", "int8", 0.5, 0.9)], {})
    assert bad["held"] == {"median_error": False, "p90_error": False, "winners": False, "crossovers": True}
    noisy = make_document([{**row, "floor": 0.7} for row in bad["cells"]], {})
    assert all(noisy["held"].values()), "nothing can be better than the same method twice"
    assert "DOES NOT HOLD: median error at most 7 % or the floor" in list(summary(bad))
    text = markdown(bad)
    assert "| `gpt` | 4 | 100 Mbit/s | 1 s, -60 % | 900 ms, -44 % | 2.0 % | `int8` | `ddp` |" in text
    assert "- holds: cross-over bandwidths within 15 %" in text


def test_a_cell_that_is_kept_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(cell: Cell, timeout_s: float) -> dict[str, object]:
        measured.append(cell.rate)
        return told

    told = _told(_profile())
    monkeypatch.setattr(validation, "measure_cell", measure)
    cells = list(grid(["replay:resnet50/8"], ["100mbit", "300mbit"], [2], methods=("ddp", "int8")))
    seen: list[object] = []
    first = run_grid(cells[:1], seen.append, timeout_s=1.0, folder=tmp_path)
    both = run_grid(cells, seen.append, timeout_s=1.0, folder=tmp_path)
    assert measured == ["100mbit", "300mbit"]
    assert len(seen) == 3
    assert both["cells"][:2] == first["cells"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{cell.name}.json" for cell in cells]
    other = dataclasses.replace(cells[0], methods=("ddp", "int4"))
    with pytest.raises(LabError, match=r"expected methods \['ddp', 'int4'\], got \['ddp', 'int8'\]"):
        kept_or_measured(other, 1.0, tmp_path)


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


def _profile() -> Profile:
    computation, _ = known_computation("resnet50/8", backward_s=0.02)
    return hand_profile(
        computation,
        hosts=2,
        ranks_per_host=1,
        rate_bps=1e8,
        latency_s=0.0,
        recipes=("dense:fp16", "int8"),
        model="small",
    )


def _told(profile: Profile) -> dict[str, object]:
    """What rank 0 says of a cell."""
    told = {
        "profile": {key: value for key, value in profile.as_dict().items() if key != "schema"},
        "step_s": {"ddp": [0.3, 0.1, 0.2], "int8": [0.05], AGAIN: [0.16]},
        "bucket_cap_mb": {"ddp": 4.0, "int8": 1.0, AGAIN: 4.0},
    }
    return json.loads(json.dumps(told))


def test_rows_compare_medians_of_measured_steps_with_predictions(tmp_path: Path) -> None:
    profile = _profile()
    cell = Cell(workload="replay:resnet50/8", nodes=2, rate="100mbit", methods=("ddp", "int8"))
    cell.save(tmp_path / "cell.json")
    assert Cell.load(tmp_path / "cell.json") == cell
    ddp, int8 = rows_of(cell, _told(profile))
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
    file, plot, table = (tmp_path / f"cells.{kind}" for kind in ("json", "png", "md"))
    cell = ["--workloads", "replay:resnet50/8", "--rates", "100mbit", "--hosts", "2", "--methods", "ddp,int8"]
    files = ["--json", str(file), "--plot", str(plot), "--table", str(table), "--keep", str(tmp_path / "kept")]
    assert main(["bench", "validate", *cell, "--steps", "3", *files]) == 0
    document = json.loads(file.read_text())
    assert [row["recipe"] for row in document["cells"]] == ["ddp", "int8"]
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in document["cells"])
    assert document["failed"] == {}
    assert "`replay:resnet50/8`" in table.read_text()
    assert main(["bench", "validate", *cell, "--steps", "3", *files]) == 0, "from what is kept"
    assert json.loads(file.read_text()) == document
    assert plot.read_bytes().startswith(b"\x89PNG")
