"""A made-up benchmark document, built by the real code from made-up events."""

from collections.abc import Callable
from typing import Any

import pytest

from thinwire.bench.results import Events, make_document
from thinwire.bench.settings import Settings

NUMEL = 1_000_000


def _record(
    method: str, *, step_s: float, steps: int, planned: float, emulated: bool, **changes: Any
) -> dict[str, Any]:
    return {
        "method": method,
        "seed": 0,
        "steps": steps,
        "steady_from_step": 3,
        "bucket_cap_mb": 4.0,
        "start_after": 0,
        "step_s": step_s,
        "forward_s": 0.15,
        "backward_s": 0.3,
        "optimizer_s": 0.05,
        "codec_s": 0.01,
        "sent_nbytes_per_step": planned * 1.05 if emulated else None,
        "planned_nbytes_per_step": planned,
        "bit_identical": True,
        "val_loss": 2.5,
        "accuracy": 0.4,
        "curve": {
            "step_s": [step_s] * steps,
            "sent_nbytes": [planned * 1.05] * steps if emulated else [],
            "loss": [5.0 - 2 * step / (step + 5) for step in range(steps)],
        },
        "link": None,
        **changes,
    }


def _make(*, emulated: bool = True, **changes: Any) -> dict[str, Any]:
    events = Events()
    facts = {"model": "a model", "data": "a text", "num_parameters": NUMEL}
    events.add({"event": "ready", "facts": facts, "rate_nbytes_per_s": 11e6, "torch": "2.13.0", "kernels": "native"})
    for run in (
        _record("ddp", step_s=1.0, steps=10, planned=6e6, emulated=emulated),
        _record(
            "ddp-powersgd:4", step_s=0.5, steps=20, planned=1e5, emulated=emulated, codec_s=None, bucket_cap_mb=1e6
        ),
        _record("int8", **{"step_s": 0.6, "steps": 16, "planned": 1.5e6, "emulated": emulated, **changes}),
    ):
        events.add({"event": "run", "record": run})
    settings = Settings(methods=("ddp", "ddp-powersgd:4", "int8"), seconds=10.0)
    network = {"emulated": emulated, "reason": "" if emulated else "no namespaces here"}
    network["congestion_control"] = "cubic" if emulated else None
    return make_document(settings, network, events, rate_bps=100e6, latency_s=None)


@pytest.fixture
def make_results() -> Callable[..., dict[str, Any]]:
    """Makes a document of three runs; changes go into the third, which is thinwire's."""
    return _make
