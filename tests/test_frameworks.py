"""The examples for other frameworks train, and what they send is compressed; with the real packages."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("package", "launcher"), [("lightning", []), ("accelerate", TORCHRUN), ("transformers", TORCHRUN)]
)
def test_example_learns_the_digits_by_compressed_exchanges(package: str, launcher: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks does that")
    command = [sys.executable, *launcher, str(EXAMPLES / f"train_{package}.py"), "int4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    found = {
        what: re.search(pattern, output)
        for what, pattern in [
            ("accuracy", r"accuracy ([\d.]+)"),
            ("exchanges", r"(\d+) exchanges"),
            ("sent", r"([\d,]+) bytes sent"),
            ("raw", r"the gradients have ([\d,]+)"),
        ]
    }
    assert all(found.values()), output
    numbers = {what: float(match[1].replace(",", "")) for what, match in found.items() if match}
    assert numbers["accuracy"] > 0.9  # chance is 0.1
    assert numbers["exchanges"] == 120  # 10 epochs of 1,500 digits, on two ranks in batches of 64
    # A rank of two would send as many bytes as the gradients have; 4 bits and a scale every 512 values are an eighth.
    assert numbers["raw"] / 8 < numbers["sent"] < numbers["raw"] / 6
