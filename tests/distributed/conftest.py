"""The pool of rank processes that all tests of this folder share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `rank_pool`, `training`: the import mode does not find them by itself

from rank_pool import RankPool, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Give `ranks(world_size).run(function, *args)`; processes start when first asked for and are reused."""
    pool = RankPool()
    yield pool.ranks
    pool.close()
