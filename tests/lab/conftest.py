import json
import sys
from pathlib import Path

import pytest

from thinwire.errors import LabError
from thinwire.lab import Lab

PROBE = Path(__file__).parent / "probe.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs namespaces where none can be had."""
    ours = [item for item in items if item.get_closest_marker("lab") and Path(item.path).parent == PROBE.parent]
    if not ours:
        return
    try:
        Lab(nodes=1).close()
    except LabError as error:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture
def probe():
    """Run probe.py in a network; returns the values that rank 0 printed, and the result."""

    def run(network, *arguments, timeout=60.0):
        values = []

        def on_line(rank: int, line: str) -> None:
            if rank == 0:
                values.append(json.loads(line))

        result = network.start([sys.executable, PROBE, *map(str, arguments)], on_line=on_line).wait(timeout)
        assert result.ok, result
        return values, result

    return run
