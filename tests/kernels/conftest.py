"""Fixtures of the kernel tests."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `cases`, which the import mode does not find by itself


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The compiled kernels; tests that need them are skipped without."""
    return pytest.importorskip(
        "thinwire.kernels.native", reason="the compiled kernels are not built", exc_type=ImportError
    )
