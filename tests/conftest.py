"""Fixtures that all tests share."""

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _clean_globals() -> Iterator[None]:
    """Fail a test that leaves torch's global settings or the library's logger other than it found them."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    level = logging.getLogger("thinwire").level
    yield
    assert torch.get_default_dtype() == dtype
    assert torch.get_num_threads() == threads
    assert logging.getLogger("thinwire").level == level
