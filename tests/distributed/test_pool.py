"""The pool itself: errors come back with rank and traceback, and a hang ends with stacks."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError


def _sum(rank, world_size, value):
    total = torch.tensor(float(rank + value))
    dist.all_reduce(total)
    return float(total)


def test_results_come_by_rank_and_groups_are_fresh(ranks):
    assert ranks(3).run(_sum, 1) == [6.0] * 3
    assert ranks(2).run(_sum, 0) == [1.0] * 2


def _raise_on_one(rank, world_size):
    if rank == 1:
        raise KeyError("lost my way")


def test_an_exception_comes_back_with_rank_and_traceback(ranks):
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*_raise_on_one.*KeyError: 'lost my way'"):
        ranks(2).run(_raise_on_one, timeout=2)
    assert ranks(2).run(_sum, 0) == [1.0] * 2


def _wait_for_ever(rank, world_size):
    threading.Event().wait()


def test_a_hang_ends_with_stacks(ranks):
    with pytest.raises(RankError, match=r"(?s)still running after 1 s.*_wait_for_ever"):
        ranks(1).run(_wait_for_ever, timeout=1)


def _die(rank, world_size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)


def test_a_death_is_an_outcome(ranks):
    first = ranks(1).outcomes(_die)[0]
    assert "ended with status -9" in first.error
