"""A process of the rung that kills: one rank that trains, saves and is killed or sees another go, or that goes on."""

import datetime
import json
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.ladder.kill import ANSWER, START_S, STATE, Task
from thinwire.ladder.training import Training, Trial


def main() -> NoReturn:
    """Do the task that comes through standard input, leave the answer in its folder, and end."""
    task = pickle.load(sys.stdin.buffer)  # from the rank that has started this process
    assert isinstance(task, Task)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = _train(task)
    except Exception as error:
        answer = {"error": _said(error)}
    _write(task, answer)
    os._exit(0)  # threads of a failed exchange may still be waiting


def _train(task: Task) -> dict[str, Any]:
    torch.set_num_threads(task.num_threads)
    limit = task.settings["timeout"]
    assert isinstance(limit, datetime.timedelta)
    patient = limit + datetime.timedelta(seconds=START_S)  # others may start later
    store = dist.PrefixStore(task.launch, dist.TCPStore(*task.store, is_master=False, timeout=patient))
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=patient)
    group = dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(group, dist.ProcessGroup)
    trial = Trial(**task.settings, group=group)
    state = Path(task.folder, STATE)
    with trial.training(trial.recipe) as training:
        if task.launch == "anew":
            training.load(state)
            return {"seen": training.run(range(task.half, trial.steps))}
        seen = training.run(range(task.half))
        training.save(state)
        _write(task, {"seen": seen})
        dist.barrier()  # all have saved
        return {"seen": seen, **_lose(training, task)}
    raise AssertionError("unreachable")


def _lose(training: Training, task: Task) -> dict[str, Any]:
    """Take a step in which the last rank is killed on its way back; return what this one notices."""
    training.optimizer.zero_grad()
    value = training.value(training.model, task.half)
    if task.dies:
        value.register_hook(_kill)
    started = time.perf_counter()
    try:
        value.backward()
    except Exception:
        return {"noticed_s": time.perf_counter() - started}
    if task.world_size == 1:
        return {}
    return {"error": f"expected an error, since rank {task.world_size - 1} was gone, got gradients as if nothing were"}


def _kill(_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _write(task: Task, answer: dict[str, Any]) -> None:
    Path(task.folder, ANSWER).write_text(json.dumps(answer))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
