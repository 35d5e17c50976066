"""The Triton kernels compile for a GPU. None is needed for that, only Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton_interpreter
pytest.importorskip("triton", reason="Triton is not installed")


def test_every_kernel_compiles(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_triton.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
