import json
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).parent / "probe.py"


@pytest.fixture
def probe():
    """Run probe.py in a network; returns the values that rank 0 printed, and the result."""

    def run(network, *arguments, timeout=60.0, after=None):
        """`after`: by number of values, what to do once there are so many."""
        values = []

        def on_line(rank: int, line: str) -> None:
            if rank == 0:
                values.append(json.loads(line))
                if after and len(values) in after:
                    after[len(values)]()

        result = network.start([sys.executable, PROBE, *map(str, arguments)], on_line=on_line).wait(timeout)
        assert result.ok, result
        return values, result

    return run
