"""Settings and fixtures that all tests share."""

import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples on every run, so that a failure seen once is seen again; no deadline on shared machines.
settings.register_profile("thinwire", deadline=None, derandomize=True, database=None)
settings.load_profile("thinwire")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_globals() -> Iterator[None]:
    """Fail a test that leaves torch's global settings or the library's logger other than it found them."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    level = logging.getLogger("thinwire").level
    yield
    assert torch.get_default_dtype() == dtype
    assert torch.get_num_threads() == threads
    assert logging.getLogger("thinwire").level == level
