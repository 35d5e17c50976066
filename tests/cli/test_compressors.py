"""`thinwire compressors`, and the table in the documentation that it prints."""

import io
import json
from pathlib import Path

import pytest

from thinwire import compressors
from thinwire.bench import terminal
from thinwire.catalogue import WHEN, catalogue, describe
from thinwire.cli import main
from thinwire.compressors import Compressor, needs_feedback
from thinwire.recipes import parse_recipe, recipe_names

ROOT = Path(__file__).parents[2]


def test_every_kind_is_listed() -> None:
    assert list(dict.fromkeys(entry.kind for entry in catalogue())) == recipe_names()


def test_every_compressor_is_listed() -> None:
    public = {kind for kind in vars(compressors).values() if isinstance(kind, type) and issubclass(kind, Compressor)}
    assert {type(entry.compressor) for entry in catalogue()} == public - {Compressor}


@pytest.mark.parametrize("recipe", WHEN)
def test_entries_say_what_the_recipe_is(recipe: str) -> None:
    entry = describe(recipe)
    aggregator = parse_recipe(recipe)
    assert entry.recipe == recipe == aggregator.recipe()
    assert type(aggregator).__name__ in entry.aggregators
    votes = isinstance(entry.compressor, compressors.Sign)
    assert entry.needs_feedback == (aggregator.feedback is not None) == (needs_feedback(entry.contract) and not votes)
    assert 0 < entry.bits_per_element <= 32
    assert entry.when


def test_a_kind_without_a_line_is_described_by_its_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {recipe: when for recipe, when in WHEN.items() if not recipe.startswith("onebit")}
    monkeypatch.setattr("thinwire.catalogue.WHEN", others)
    (entry,) = (entry for entry in catalogue() if entry.kind == "onebit")
    assert (entry.recipe, entry.when) == ("onebit", "Signs and one scale per partition")


def test_listing_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compressors.json"
    assert main(["compressors", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["schema"] == 1
    for record in document["compressors"]:
        assert record["recipe"] in text
        assert record["when"] in text
    by_recipe = {record["recipe"]: record for record in document["compressors"]}
    assert by_recipe["int4:stochastic"]["contract"]["type"] == "Unbiased"
    assert main(["compressors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document


def test_documentation_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Mend it with `thinwire compressors --markdown --cost docs/kernels.json`."""
    assert main(["compressors", "--markdown", "--cost", str(ROOT / "docs/kernels.json")]) == 0
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs/compressors.md").read_text()


def test_bad_costs_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text("[]")
    assert main(["compressors", "--markdown", "--cost", str(file)]) == 1
    assert "expected what `thinwire kernels --json` writes" in capsys.readouterr().err


def test_a_terminal_gets_a_live_table() -> None:
    pytest.importorskip("rich")
    file = io.StringIO()
    with terminal.RichTable([terminal.Column("name", left=True), terminal.Column("value")], file) as table:
        table.status("measuring a")
        table.add(["a", "1.5"])
    assert "name" in file.getvalue()
    assert "1.5" in file.getvalue()
