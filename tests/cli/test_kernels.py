"""`thinwire kernels`: what it measures and how bytes are counted. No test looks at a time."""

import json
from pathlib import Path

import pytest
import torch

from thinwire import kernels
from thinwire.advisor.blocks import PARTITION_NUMEL, Blocks
from thinwire.bench.kernels import NUM_SMALL, OPS, reference_kernels
from thinwire.catalogue import FULL_PARTITION, catalogue
from thinwire.cli import main
from thinwire.cli.kernels import parse_nbytes
from thinwire.recipes import parse_recipe

COMPRESSORS = list(dict.fromkeys(entry.compressor for entry in catalogue()))


def test_rows_are_the_documented_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    arguments = ["--only", "int4,topk:0.01", "--threads", "1,2", "--nbytes", "300KiB", "--repeats", "1"]
    assert main(["kernels", *arguments, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["schema"] == 1
    assert document["conditions"]["partition_numel"] == PARTITION_NUMEL
    assert document["left_out"] == {}
    rows = document["rows"]
    assert [(row["compressor"], row["threads"], row["op"]) for row in rows] == [
        (name, threads, op) for name in ("int4", "topk:0.01") for threads in (1, 2) for op in (*OPS, "encode_small")
    ]
    for row in rows:
        assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9)
        if row["op"] == "encode_small":
            assert (row["partitions"], row["nbytes"], row["floor_ratio"]) == (NUM_SMALL, 10_240_000, None)
        else:
            assert (row["partitions"], row["nbytes"]) == (2, 300 << 10)
            copy = 2 * row["nbytes"] / row["copy_s"]
            assert row["floor_ratio"] == pytest.approx(row["seconds"] * copy / row["floor_nbytes"])
            assert (row["reference_gb_per_s"] is None) == (row["threads"] == 2)
    assert capsys.readouterr().out.count("int4 ") == 2


def test_exchanges_that_multiply_are_measured_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    arguments = ["--only", "powersgd:4,powersgd:2:alternating", "--nbytes", "1MiB", "--repeats", "1"]
    assert main(["kernels", *arguments, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["compressor"], row["threads"], row["op"], row["partitions"]) for row in rows] == [
        (name, threads, "exchange", 4) for name in ("powersgd:4", "powersgd:2:alternating") for threads in (1, 2)
    ]
    for row in rows:
        assert row["gb_per_s"] == pytest.approx((1 << 20) / row["seconds"] / 1e9)
        assert row["floor_nbytes"] == 4 << 20
        assert (row["reference_gb_per_s"] is None) == (row["threads"] == 2)
    assert capsys.readouterr().out.count("powersgd:4") == 2
    assert main(["kernels", "--only", "powersgd:4", "--nbytes", "100KiB", "--repeats", "1"]) == 0
    assert "expected at least one matrix of 262144 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda compressor: compressor.recipe())
def test_every_compressor_can_be_measured(compressor) -> None:
    x = torch.randn(PARTITION_NUMEL + 100, generator=torch.Generator().manual_seed(0))
    blocks = Blocks(compressor, x, PARTITION_NUMEL, 1)
    for run in blocks.runs().values():
        run()
    whole, wire = 4 * x.numel(), blocks.data.numel()
    floor = blocks.floor_nbytes()
    assert set(floor) == set(OPS)
    assert floor["encode_feedback"] == 3 * whole + wire
    assert floor["decode"] == whole + wire
    if compressor.holds_back(FULL_PARTITION):
        assert floor["accumulate"] < 2 * whole + wire
    else:
        assert (floor["encode"], floor["accumulate"]) == (whole + wire, 2 * whole + wire)


def test_sparse_kinds_touch_the_lines_of_what_they_send() -> None:
    x = torch.zeros(1024)
    x[[0, 15, 16, 1023]] = 1.0  # the first line twice, the second, the last
    blocks = Blocks(parse_recipe("topk:k=4").up, x, 1024, 1)
    blocks.runs()["encode"]()
    assert blocks.floor_nbytes()["accumulate"] == blocks.data.numel() + 2 * 3 * 64


def test_the_reference_is_chosen_for_a_while() -> None:
    before = kernels.backend()
    with reference_kernels():
        assert kernels.backend() == "reference"
    assert kernels.backend() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "int9"], "did you mean 'int8'"),
        (["--nbytes", "64 miles"], "a size such as 64MiB"),
        (["--nbytes", "3"], "at least 4 bytes"),
        (["--threads", "1,0"], "a whole number above 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["kernels", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_sizes() -> None:
    assert [parse_nbytes(text) for text in ("64MiB", "1.5 kB", "8", "1GiB")] == [64 << 20, 1500, 8, 1 << 30]
