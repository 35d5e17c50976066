"""Which kernels answer, and that the package works without the compiled part."""

import os
import subprocess
import sys

import pytest

BLOCKED = """
import sys
sys.modules["thinwire._native"] = None  # as where it was never built
import warnings
import torch
import thinwire
from thinwire import kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        active = kernels.active()
assert kernels.backend() == "reference", kernels.backend()
out = torch.zeros(16, dtype=torch.uint8)
job = kernels.EncodeJob(torch.tensor([127.0, -1.0, 2.4]), out)
assert active.encode_block_quant([job], bits=8, block=512, stochastic=False) == [True]
assert out[4:].view(torch.int8).tolist() == [127, -1, 2] + [0] * 9
print(*(str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)), sep="\\n")
"""


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "THINWIRE_KERNELS"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env | environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_the_compiled_part_one_warning_and_the_reference_kernels() -> None:
    done = _python(BLOCKED)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1
    assert "the compiled kernels cannot be imported" in lines[0]


@pytest.mark.usefixtures("native")
def test_compiled_kernels_are_the_default() -> None:
    done = _python("import thinwire.kernels as k; print(k.backend())")
    assert done.stdout.strip() == "native", done.stderr


def test_the_environment_chooses() -> None:
    code = "import thinwire.kernels as k; print(k.backend())"
    assert _python(code, THINWIRE_KERNELS="reference").stdout.strip() == "reference"
    refused = _python(code, THINWIRE_KERNELS="fast")
    assert refused.returncode == 1
    assert "expected 'reference' or 'native', got 'fast'" in refused.stderr
    blocked = _python(BLOCKED, THINWIRE_KERNELS="native")
    assert blocked.returncode == 1
    assert "ModuleNotFoundError" in blocked.stderr or "ImportError" in blocked.stderr


def test_cuda_tensors_without_triton_are_an_error_that_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None
from thinwire.errors import ThinwireError
from thinwire.kernels import DecodeJob, EncodeJob, serving
class OnGpu:
    is_cuda = True
for job in (EncodeJob(None, OnGpu()), DecodeJob(None, OnGpu())):
    try:
        print(serving([job]).__name__)
    except ThinwireError as error:
        print(error)
print(serving([]).__name__)
"""
    lines = _python(code).stdout.splitlines()
    assert len(lines) == 3
    for line in lines[:2]:
        assert "CUDA tensors: expected Triton" in line
        assert "pip install '.[gpu]' in thinwire's folder" in line
    assert _python(code, THINWIRE_KERNELS="reference").stdout.splitlines() == ["thinwire.kernels.reference"] * 3
