"""The document's schema and its arithmetic."""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from thinwire.bench.results import loss_at_seconds, loss_at_step

Make: TypeAlias = Callable[..., dict[str, Any]]

# fmt: off
RUN_KEYS = {
    "workload", "method", "nodes", "rate_bps", "latency_s",
    "step_s", "forward_s", "backward_s", "codec_s", "compute_s",
    "ideal_s", "exposed_comm_s", "sent_nbytes_per_step", "planned_nbytes_per_step", "compression_ratio",
    "train_loss", "val_loss", "accuracy", "seed", "steps",
    "bit_identical",
}
# fmt: on


def test_document_has_the_public_schema_and_is_strict_json(make_results: Make):
    document = make_results(val_loss=float("nan"))
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text)["schema"] == 1
    assert set(document) == {"schema", "conditions", "runs"}
    for run in document["runs"]:
        assert run.keys() >= RUN_KEYS
    assert document["runs"][2]["val_loss"] is None


def test_derived_numbers(make_results: Make):
    ddp, powersgd, int8 = make_results()["runs"]
    assert ddp["compression_ratio"] == pytest.approx(1.0)  # 4 hosts send 1.5 times 4 bytes an element
    assert int8["compression_ratio"] == pytest.approx(4.0)
    assert int8["compute_s"] == pytest.approx(0.15 + 0.3 + 0.05)
    assert int8["exposed_comm_s"] == pytest.approx(0.1)
    assert int8["ideal_s"] == pytest.approx(0.15 + 0.05 + 0.31)  # cores: 0.3 + 0.01, wire: 1.5 / 11
    assert ddp["ideal_s"] == pytest.approx(0.15 + 0.05 + 6 / 11)
    assert powersgd["ideal_s"] is None


def test_losses_are_compared_after_equal_steps_and_equal_seconds(make_results: Make):
    runs = make_results()["runs"]
    assert {run["equal_steps"] for run in runs} == {10}
    assert len({run["loss_at_equal_steps"] for run in runs}) == 1  # the made-up curves depend on the step alone
    assert runs[0]["equal_s"] == pytest.approx(16 * 0.6)
    assert runs[1]["loss_at_equal_s"] < runs[2]["loss_at_equal_s"] < runs[0]["loss_at_equal_s"]


def test_loss_is_none_before_the_first_step(make_results: Make):
    run = make_results()["runs"][0]
    assert loss_at_seconds(run, 0.5) is None
    assert loss_at_step(run, 1) == run["curve"]["loss"][0]


def test_without_a_network_nothing_is_said_about_a_wire(make_results: Make):
    document = make_results(emulated=False)
    assert document["conditions"]["rate_bps"] is None
    assert document["conditions"]["measured_rate_bps"] is None
    for run in document["runs"]:
        assert run["sent_nbytes_per_step"] is None
        assert run["ideal_s"] is None
