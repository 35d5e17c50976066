"""Ranks that die, hang or raise: the others end soon, with an error that names whom to look at."""

import datetime
import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Tower, attached, batch, loss, seeded

from thinwire.errors import RankLostError, StateError
from thinwire.lab.ports import reserve_port

LIMIT_S = 20.0


def _until_it_fails(rank, world_size, recipe, victim, how):
    """Train until the exchange fails; return the error's message, and how long that step took."""
    width = 256 if world_size == 4 else 48  # blocks so large that ranks wait for one peer after the other
    model = DDP(seeded(Tower, width), bucket_cap_mb=0.01)
    timeout = datetime.timedelta(seconds=5) if how == "hang" else None
    with attached(model, recipe, timeout=timeout) as link:
        for step in range(1000):
            started = time.monotonic()
            if step == 3 and rank == victim:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "exit":
                    os._exit(3)
                time.sleep(15)
                return "", 0.0, 0
            try:
                loss(model, batch(rank, step, width=width)).backward()
            except RuntimeError as error:
                assert isinstance(link.error, RankLostError), link.error
                with pytest.raises(StateError, match="go on from the checkpoint before it"):
                    link.state_dict()
                seconds = time.monotonic() - started
                _say_it_again(model, rank, step, width)
                return str(error), seconds, step
    raise AssertionError("it never failed")


def _say_it_again(model, rank, step, width):
    """A failed exchange stays failed, and says so at once."""
    model.zero_grad()
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        loss(model, batch(rank, step + 1, width=width)).backward()
    assert time.monotonic() - started < 2


# Survivors leave their stories in files: what becomes of a call that has lost a rank is the pool's business.
def _tell(rank, world_size, folder, recipe, victim, how):
    message, seconds, step = _until_it_fails(rank, world_size, recipe, victim, how)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"{seconds}\n{step}\n{message}")
    dist.destroy_process_group()


def _stories(ranks, tmp_path, world_size, *args, store="tcp"):
    limit = LIMIT_S + 30
    outcomes = ranks(world_size).outcomes(_tell, str(tmp_path), *args, timeout=limit, store=store, grace=limit)
    stories = {}
    for rank in range(world_size):
        path = tmp_path / str(rank)
        if path.exists() and rank != args[1]:
            seconds, step, message = path.read_text().split("\n", 2)
            stories[rank] = (float(seconds), int(step), message)
    victim = args[1]
    assert set(stories) == set(range(world_size)) - {victim}, "\n".join(f"{o.rank}: {o.error}" for o in outcomes)
    return stories


@pytest.mark.parametrize(("recipe", "world_size"), [("int8", 3), ("gather/onebit", 3), ("int8", 4), ("onebit", 4)])
def test_a_killed_rank_is_named_and_no_other(ranks, tmp_path, recipe, world_size):
    stories = _stories(ranks, tmp_path, world_size, recipe, 1, "kill")
    for seconds, step, message in stories.values():
        assert "collective failed; rank 1 did not answer" in message
        assert "RankLostError" in message
        assert seconds < LIMIT_S
        assert step == 3
    # Whoever notices first says in which round of which message; the others have the alarm alone.
    assert any("(round " in message and " of bucket " in message for _, _, message in stories.values())


def test_rank_0_with_the_store_is_named_when_killed(ranks, tmp_path):
    stories = _stories(ranks, tmp_path, 3, "int8", 0, "kill")
    for seconds, _, message in stories.values():
        assert "rank 0" in message
        assert seconds < LIMIT_S


def test_a_hanging_rank_is_named_after_the_timeout(ranks, tmp_path):
    stories = _stories(ranks, tmp_path, 3, "int8", 2, "hang")
    for seconds, _, message in stories.values():
        assert "collective failed; rank 2 did not come to the exchange" in message
        assert 3 < seconds < LIMIT_S


def test_a_rank_that_exits_is_named(ranks, tmp_path):
    stories = _stories(ranks, tmp_path, 2, "topk:0.05", 1, "exit")
    assert "rank 1 did not answer" in stories[0][2]
    assert stories[0][0] < LIMIT_S


# --- whole programs, as torchrun would start them -------------------------------------------------------------------

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, thinwire
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.01)
link = thinwire.attach(model, "int4", options=thinwire.PlanOptions(min_nbytes=0))
for step in range(6):
    if how == "raise" and step == 3 and rank == 1:
        raise KeyError("user code went wrong")
    model(torch.randn(4, 64)).square().sum().backward()
if how == "close":
    link.close()
if how != "nothing":
    dist.destroy_process_group()
print("done", rank, flush=True)
"""


def _programs(how, timeout=45.0):
    port = reserve_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("how", ["close", "destroy only", "nothing"])
def test_programs_end_cleanly_whether_they_close_or_not(how):
    for rank, (status, out, err) in enumerate(_programs(how)):
        assert status == 0, err
        assert out == f"done {rank}\n"
        assert "Traceback" not in err
        assert "terminate" not in err


def test_an_exception_in_user_code_ends_the_program_and_the_others():
    (status_0, _, err_0), (status_1, _, err_1) = _programs("raise")
    assert status_1 == 1, err_1
    assert "KeyError: 'user code went wrong'" in err_1
    assert status_0 == 1, err_0
    assert "rank 1 did not answer" in err_0
