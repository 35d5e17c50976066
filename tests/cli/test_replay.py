"""`thinwire record` and `thinwire replay`, end to end."""

import json
from pathlib import Path

import pytest

from thinwire.bench.fidelity import Fidelity
from thinwire.bench.recording import Recording
from thinwire.cli import main
from thinwire.cli.record import parse_steps
from thinwire.compressors import OneBit
from thinwire.errors import RecipeError
from thinwire.recipes import parse_recipe

RECIPES = "int8,int4,onebit,topk:0.01,dense,fp16,gather/randomk:0.1:scaled"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "gpt.npz"
    assert main(["record", "--out", str(path), "--steps", "1,2", "--ranks", "2"]) == 0
    return path


def test_replay_of_a_recording(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "replay.json", tmp_path / "replay.png"
    arguments = ["--recipes", RECIPES, "--json", str(file), "--plot", str(plot), "--by-family"]
    pytest.importorskip("matplotlib")
    assert main(["replay", str(recorded), *arguments]) == 0
    document = json.loads(file.read_text())
    text = capsys.readouterr().out
    assert document["schema"] == 1
    assert document["conditions"]["steps"] == [1, 2]
    assert document["conditions"]["num_ranks"] == 2
    assert document["left_out"] == {}
    assert "byte-level GPT" in document["conditions"]["recorded"]["model"]
    rows = {row["recipe"]: row for row in document["rows"]}
    assert list(rows) == RECIPES.split(",")
    assert all(recipe in text for recipe in rows)
    errors = [rows[recipe]["encode_error"] for recipe in ("fp16", "int8", "int4", "topk:0.01")]
    assert errors == sorted(errors), "fewer bits, more error"
    names = {f"replay{family}.png" for family in ("", "-cast", "-block", "-sign", "-sparse", "-random-k")}
    assert {path.name for path in tmp_path.glob("*.png")} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


def test_what_does_not_fit_is_left_out_with_the_reason(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecipeError("needs a matrix")

    monkeypatch.setattr(OneBit, "encode_jobs", fail)
    assert main(["replay", str(recorded), "--recipes", "onebit,int8"]) == 0
    text = capsys.readouterr().out
    assert "left out: onebit: needs a matrix" in text
    assert "int8 " in text


def test_progress_is_told_step_by_step(recorded: Path) -> None:
    said: list[str] = []
    Fidelity(Recording(recorded)).measure(parse_recipe("int8"), said.append)
    assert said == [f"{doing} step {step} of 2" for doing in ("encoding", "exchanging") for step in (1, 2)]


def test_pictures_may_be_svg(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "replay.svg"
    assert main(["replay", str(recorded), "--recipes", "int8,dense", "--plot", str(plot)]) == 0
    assert "int8" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "x.npz", "--recipes", "int9"], "did you mean 'int8'"),
        (["replay", "x.npz", "--plot", "x.gif"], "ends in .png or .svg"),
        (["record", "--out", "x.npz", "--steps", "3,2"], "ascending steps"),
        (["record", "--out", "x.npz", "--steps", "5-4"], "ascending steps"),
        (["record"], "--out"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none.npz")]) == 1
    assert "none.npz: no such file; `thinwire record --out" in capsys.readouterr().err


def test_steps() -> None:
    assert parse_steps("7") == (7,)
    assert parse_steps("1,50-52") == (1, 50, 51, 52)
