"""Settings and fixtures that all tests share."""

import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from thinwire.errors import LabError
from thinwire.lab import Lab

# The same examples on every run, so that a failure seen once is seen again; no deadline on shared machines.
settings.register_profile("thinwire", deadline=None, derandomize=True, database=None)
settings.load_profile("thinwire")

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs namespaces where none can be had."""
    ours = [item for item in items if item.get_closest_marker("lab")]
    if not ours:
        return
    try:
        Lab(nodes=1).close()
    except LabError as error:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture(autouse=True)
def _clean_globals() -> Iterator[None]:
    """Fail a test that leaves torch's global settings or the library's logger other than it found them."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    level = logging.getLogger("thinwire").level
    yield
    assert torch.get_default_dtype() == dtype
    assert torch.get_num_threads() == threads
    assert logging.getLogger("thinwire").level == level
