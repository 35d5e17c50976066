"""Pages that promise: every test that is named exists, every error that is quoted is raised."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_reports_name_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/reports.md").read_text())
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if f"\ndef {name}(" not in _text_of(ROOT / path)]
    assert not missing


def test_every_row_of_the_reports_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs/reports.md").read_text().splitlines() if line.startswith("| ")]
    assert not [row for row in rows if "::" not in row and not row.startswith(("| report", "| ---"))]


def test_every_error_that_the_compatibility_page_quotes_is_raised() -> None:
    table = (ROOT / "docs/compatibility.md").read_text().partition("## PyTorch features")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    assert {len(row) for row in rows} == {4}
    quoted = [text for row in rows[2:] for text in re.findall(r"`([^`]+)`", row[3])]
    assert len(quoted) > 10
    source = "\n".join(path.read_text() for path in (ROOT / "src/thinwire").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # literals that go on in the next line
    assert not [text for text in quoted if text not in source]


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
