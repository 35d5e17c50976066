"""The rung that kills: a rank's process ends in the middle of a step, and all start anew from what they had saved.

A launcher ends a run, or starts it again, when one of its ranks dies. So those that die here are processes of the
check's own: every rank starts one, on its host and network, and they meet in a store that rank 0 keeps.
"""

import dataclasses
import datetime
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from thinwire.comm.meeting import local_address
from thinwire.comm.process_group import all_gather_text, own_store
from thinwire.ladder.exact import anywhere, cuts_show, first_step_apart
from thinwire.ladder.report import Rung
from thinwire.ladder.training import Trial

ANSWER, STATE, LOG = "answer.json", "state.pt", "log"  # what a process leaves in its rank's folder
START_S = 30.0  # for a process to start, on a busy machine, beside the time that collectives may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a process of the check is to do.

    Attributes:
        settings: the fields of its `Trial`, without groups.
        rank, world_size: of the process, as of the rank that starts it.
        store: (host, port) where all meet.
        launch: "killed" trains, saves and then loses its last rank; "anew" goes on from what was saved.
        half: the step in between.
        folder: of this rank.
        num_threads: of torch, which may show in the bits.
    """

    settings: Mapping[str, Any]
    rank: int
    world_size: int
    store: tuple[str, int]
    launch: Literal["killed", "anew"]
    half: int
    folder: str
    num_threads: int

    @property
    def dies(self) -> bool:
        """Whether this process is the one to be killed."""
        return self.launch == "killed" and self.rank == self.world_size - 1


def kill(trial: Trial) -> Rung:
    """(g) After a rank's process was killed, the others must notice, and all must go on from what they had saved."""
    half = max(1, trial.steps // 2)
    settings = {one.name: getattr(trial, one.name) for one in dataclasses.fields(trial) if one.name != "group"}
    if why := anywhere(_unknown_elsewhere(settings), trial.group):
        return Rung(name="kill", verdict="not applicable", sentence=why)
    with trial.training(trial.recipe) as training:
        if why := cuts_show(training, trial.group):
            return Rung(name="kill", verdict="not applicable", sentence=why)
        expected, names = training.run(range(trial.steps)), training.names
    limit = 2 * trial.timeout + datetime.timedelta(seconds=START_S)
    patient = dist.new_group(backend="gloo", timeout=2 * limit)  # a process may end at once, and another by its limit
    assert isinstance(patient, dist.ProcessGroup)
    rung = _kill(trial, settings, half, limit, patient, expected, names)
    dist.destroy_process_group(patient)  # not after an error: ranks may be waiting for each other
    return rung


def _kill(
    trial: Trial,
    settings: Mapping[str, Any],
    half: int,
    limit: datetime.timedelta,
    patient: dist.ProcessGroup,
    expected: Sequence[list[str]],
    names: Sequence[str],
) -> Rung:
    """Run both launches, and compare what their processes see with what is expected. Collective."""
    rank, num = dist.get_rank(trial.group), dist.get_world_size(trial.group)
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        server, store = _open_store(patient)
        task = Task(
            settings=settings,
            rank=rank,
            world_size=num,
            store=store,
            launch="killed",
            half=half,
            folder=folder,
            num_threads=torch.get_num_threads(),
        )
        before = _run(task, limit)
        if where := anywhere(before.finding, patient):
            return Rung(name="kill", verdict="failed", sentence=where)
        if where := anywhere(first_step_apart(expected[:half], before.seen, names), patient):
            why = f"another process trains to other bits before anything is killed: {where}"
            return Rung(name="kill", verdict="not applicable", sentence=why)
        after = _run(dataclasses.replace(task, launch="anew"), limit)
    where = anywhere(after.finding, patient)
    del server  # the processes of all ranks have left it
    where = where or anywhere(first_step_apart(expected[half:], after.seen, names, half), patient)
    victim = f"rank {num - 1}'s process was killed in step {half}"
    if where:
        sentence = f"{victim}; from what was saved training does not go on as if nothing had happened: {where}"
        return Rung(name="kill", verdict="failed", sentence=sentence)
    noticed = "" if num == 1 else f"the others noticed within {before.noticed_s:.1f} s; "
    sentence = f"{victim}; {noticed}new processes went on from what was saved with the same bits as without"
    return Rung(name="kill", verdict="ok", sentence=sentence, numbers={"noticed_s": before.noticed_s})


def _unknown_elsewhere(settings: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return why another process cannot be given the factory or the recipe, or None."""
    try:
        data = pickle.dumps(settings)
    except Exception as error:  # PicklingError, AttributeError or TypeError, by what it is
        why = " ".join(str(error).split())
    else:
        if b"__main__" not in data:
            return None
        why = "it is in the script itself"
    return 0, (
        "another process cannot import the factory, or the recipe's function: expected them at the top of a module, "
        f"as in  --model module:factory  ({why})"
    )


def _open_store(group: dist.ProcessGroup) -> tuple[dist.TCPStore | None, tuple[str, int]]:
    """Open a rendezvous store in rank 0, open as long as it holds on to it; return where it is. Collective."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    address = local_address(own_store(ranks, rank))
    server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = "" if server is None else str(server.port)
    host, port = json.loads(all_gather_text(json.dumps([address, port]), group)[0])
    return server, (host, int(port))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What became of a process.

    Attributes:
        finding: what went wrong, as (0, text), or None.
        seen: hashes, as of `Training.run`.
        noticed_s: seconds after which it noticed that another one was gone.
    """

    finding: tuple[int, str] | None = None
    seen: list[list[str]] = dataclasses.field(default_factory=lambda: [])
    noticed_s: float = 0.0


def _run(task: Task, limit: datetime.timedelta) -> _Outcome:
    """Run a process and wait for its end, but not for ever."""
    folder, seconds = Path(task.folder), limit.total_seconds()
    (folder / ANSWER).unlink(missing_ok=True)
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    command = [sys.executable, "-c", "from thinwire.ladder.process import main; main()"]
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
        )
        assert process.stdin is not None
        try:
            process.stdin.write(pickle.dumps(task))  # and stays open: where it closes, the process ends
            process.stdin.flush()
            status = process.wait(seconds)
        except (OSError, subprocess.TimeoutExpired):
            status = process.poll()
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
    answer = json.loads((folder / ANSWER).read_text()) if (folder / ANSWER).exists() else {}
    if task.dies and status == -signal.SIGKILL:
        return _Outcome(seen=answer.get("seen", []))
    if status == 0 and "error" not in answer and not task.dies:
        return _Outcome(**answer)
    lines = (folder / LOG).read_text(errors="replace").strip().splitlines()
    ended = f"did not end within {seconds:g} s" if status is None else f"ended with status {status}"
    return _Outcome(finding=(0, f"its process {ended}: {answer.get('error') or (lines or ['it said nothing'])[-1]}"))
