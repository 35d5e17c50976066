"""Tables, plots and pages."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from thinwire.bench.report import best_run, write_report
from thinwire.bench.table import columns, notes, plain_text, rate_text

Make: TypeAlias = Callable[..., dict[str, Any]]

PNG = b"\x89PNG\r\n\x1a\n"


def test_report_is_one_self_contained_page_with_its_files(make_results: Make, tmp_path: Path):
    document = make_results()
    page = write_report(document, tmp_path / "new" / "folder").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|https?://|//cdn|@import|url\(|<script""", page)
    names = {"loss-against-time", "loss-against-bytes", "step-time"}
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert files == {f"{name}.png" for name in names} | {"report.html", "results.json"}
    for name in names:
        assert (tmp_path / "new" / "folder" / f"{name}.png").read_bytes().startswith(PNG)
    assert page.count("data:image/png;base64,") == len(names)
    assert json.loads((tmp_path / "new" / "folder" / "results.json").read_text()) == document
    assert "100 Mbit/s" in page
    assert "one bucket" in page


def test_loopback_is_said_everywhere_and_no_speed_is_claimed(make_results: Make, tmp_path: Path):
    document = make_results(emulated=False)
    page = write_report(document, tmp_path).read_text()
    assert page.count("no network emulated") + page.count("No network was emulated") >= 2
    assert "no namespaces here" in page
    assert "steps per second" not in page
    headings = {column.heading for column in columns(document)}
    assert headings.isdisjoint({"step s", "exposed s", "ideal s", "sent MB", "loss, equal time"})
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        "loss-against-steps",
        "loss-against-bytes",
        "bytes-per-step",
    }
    assert "loopback" in plain_text(document)


def test_text_from_outside_is_escaped(make_results: Make, tmp_path: Path):
    document = make_results()
    document["conditions"]["processor"] = "<b>&"
    page = write_report(document, tmp_path).read_text()
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page


def test_different_replicas_are_shouted(make_results: Make):
    text = plain_text(make_results(bit_identical=False))
    assert "thinwire int8, seed 0: replicas DIFFER" in text


def test_a_diverged_run_still_gives_a_report(make_results: Make, tmp_path: Path):
    curve = {"step_s": [0.6] * 3, "sent_nbytes": [1.0] * 3, "loss": [3.0, float("inf"), float("nan")]}
    document = make_results(curve=curve, steps=3, val_loss=float("nan"))
    assert write_report(document, tmp_path).exists()
    assert best_run(document["runs"]) is document["runs"][2]  # the only one of thinwire's


def test_a_replay_says_where_the_cores_were_the_limit(make_results: Make):
    document = make_results(codec_s=0.9)
    document["conditions"] |= {"emulated_backward_s": 0.1, "emulated_compute_source": "a paper, 2021"}
    text = "\n".join(notes(document))
    assert "a paper, 2021" in text
    assert "Making up gradients alone takes this machine 0.300 s" in text
    assert "thinwire int8: limited by this machine's cores" in text
    assert "DDP fp32: limited" not in text


@pytest.mark.parametrize(("rate", "text"), [(1e8, "100 Mbit/s"), (2.5e9, "2.5 Gbit/s"), (999, "999 bit/s")])
def test_rates_have_units(rate: float, text: str):
    assert rate_text(rate) == text
