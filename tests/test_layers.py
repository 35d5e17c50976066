"""The package as a whole: it imports quietly anywhere, and its examples run."""

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import thinwire

# Heavier layers need extras or privileges, and have tests of their own.
OTHERS = (
    *("thinwire.bench", "thinwire.lab", "thinwire.cli", "thinwire._native"),
    *("thinwire.kernels.native", "thinwire.kernels.triton"),
)
MODULES = sorted(
    found.name for found in pkgutil.walk_packages(thinwire.__path__, "thinwire.") if not found.name.startswith(OTHERS)
)


def _names(module: ModuleType) -> dict[str, object]:
    """Return what an example may use without importing it: the module, its package, torch and all of thinwire."""
    return {**vars(thinwire), **vars(module), "torch": torch}


@pytest.mark.parametrize("name", ["thinwire", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs=_names(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_there_are_examples() -> None:
    found = doctest.DocTestFinder()
    with_examples = {
        test.name for name in MODULES for test in found.find(importlib.import_module(name)) if test.examples
    }
    compressors = ("Identity", "Cast", "BlockQuant", "LinearDithering", "NaturalDithering", "OneBit", "TopK")
    compressors += ("NaturalCompression", "TernGrad", "LowRank")
    for shown in (*compressors, "Dense", "Gather", "TwoShot", "ErrorFeedback"):
        assert any(test.endswith(f".{shown}") for test in with_examples), shown


def test_everything_public_has_a_docstring() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__doc__, name
    for name, value in vars(thinwire).items():
        if not name.startswith("_") and callable(value):
            assert value.__doc__, name


def _fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(thinwire.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_import_is_quiet_and_changes_nothing_global() -> None:
    code = """
import torch
def settings():
    return torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state().tolist()
before = settings()
import thinwire, thinwire.kernels
thinwire.BlockQuant().encode(torch.ones(3))
assert settings() == before
print(thinwire.kernels.backend())
"""
    done = _fresh(code, THINWIRE_KERNELS="reference")
    assert (done.returncode, done.stdout, done.stderr) == (0, "reference\n", "")


def test_import_does_not_reach_for_extras() -> None:
    code = """
import sys, thinwire
extras = {"rich", "matplotlib", "sklearn", "tensorboard", "zmq", "prometheus_client"}
heavy = extras & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
upper = [name for name in sys.modules if name.startswith(("thinwire.cli", "thinwire.bench", "thinwire.lab"))]
assert not upper, upper
"""
    done = _fresh(code, THINWIRE_KERNELS="reference")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_backend_is_refused_with_the_choices() -> None:
    done = _fresh("import thinwire.kernels as k; k.active()", THINWIRE_KERNELS="fast")
    assert done.returncode == 1
    assert "THINWIRE_KERNELS: expected 'reference' or 'native', got 'fast'" in done.stderr
