"""A pool of processes, one per rank, that run functions of test modules in process groups of their own.

A call gives every rank a fresh gloo group. Processes are reused, since importing torch takes longer than most tests.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from thinwire.lab.ports import reserve_port

WORKER = Path(__file__).with_name("rank_worker.py")
GRACE_S = 15.0  # how long the others may go on once a rank has failed


class RankError(AssertionError):
    """A rank raised, died or did not finish. The message holds every rank's story."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `value` if it returned, else `error` (a traceback, an exit status or a stack dump)."""

    rank: int
    value: Any = None
    error: str = ""
    seconds: float = 0.0


class RankProcess:
    """One worker process, with a pipe for calls and a file for its standard error."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.log = tempfile.NamedTemporaryFile(mode="w+", prefix="rank-", suffix=".log")  # noqa: SIM115  # kept open
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=self.log,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def stacks(self) -> str:
        """Return the stacks of all its threads."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self.output()

    def output(self) -> str:
        """Return the end of what it wrote to standard error."""
        return Path(self.log.name).read_text()[-6000:]

    def end(self) -> None:
        """Kill it."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


class RankPool:
    """Worker processes by rank, started when first needed."""

    def __init__(self) -> None:
        self._processes: dict[int, RankProcess] = {}

    def ranks(self, world_size: int) -> "Ranks":
        """Return `world_size` ranks to run functions on."""
        return Ranks(self, world_size)

    def take(self, world_size: int) -> list[RankProcess]:
        """Return live processes for ranks 0 .. world_size - 1."""
        for rank in range(world_size):
            process = self._processes.get(rank)
            if process is None or process.process.poll() is not None:
                self._processes[rank] = RankProcess()
        return [self._processes[rank] for rank in range(world_size)]

    def drop(self, world_size: int) -> None:
        """End the processes of a call that did not leave them as new."""
        for rank in range(world_size):
            self._processes.pop(rank).end()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()


@dataclass(frozen=True)
class Ranks:
    """A world size, over a pool."""

    pool: RankPool
    world_size: int

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `function(rank, world_size, *args)` on every rank and return what they return, by rank.

        The function must be at the top level of a module file, which the workers load by its path.

        Raises:
            RankError: unless all return within `timeout` seconds.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout)
        if any(outcome.error for outcome in outcomes):
            stories = "\n".join(f"--- rank {o.rank}: {o.error or 'returned'}" for o in outcomes)
            raise RankError(f"{function.__qualname__} on {self.world_size} ranks\n{stories}")
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        store: str = "file",
        grace: float = GRACE_S,
    ) -> list[Outcome]:
        """Do as `run`, but return every rank's outcome, errors included.

        Args:
            function, args, timeout: as in `run`.
            grace: seconds that the others have once a rank has failed.
            store: "file", or "tcp" for a rendezvous store that lives in rank 0, as torchrun's may.
        """
        processes = self.pool.take(self.world_size)
        with tempfile.TemporaryDirectory() as folder:
            where = f"file:{folder}/store" if store == "file" else f"tcp:{reserve_port()}"
            for rank, process in enumerate(processes):
                call = (function.__code__.co_filename, function.__qualname__, rank, self.world_size, where, args)
                process.connection.send_bytes(pickle.dumps(call))
            outcomes = _collect(processes, timeout, grace)
        if any(outcome.error for outcome in outcomes):
            self.pool.drop(self.world_size)
        return outcomes


def _collect(processes: Sequence[RankProcess], timeout: float, grace: float) -> list[Outcome]:
    started = time.monotonic()
    deadline = started + timeout
    pending: dict[Connection, int] = {process.connection: rank for rank, process in enumerate(processes)}
    outcomes: dict[int, Outcome] = {}
    while pending and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(pending), left):
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            seconds = time.monotonic() - started
            try:
                value, error = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                status = processes[rank].process.wait()
                value, error = None, f"ended with status {status}\n{processes[rank].output()}"
            outcomes[rank] = Outcome(rank, value, error, seconds)
            if error:
                deadline = min(deadline, time.monotonic() + grace)
    seconds = time.monotonic() - started
    for rank in pending.values():
        story = f"still running after {seconds:.0f} s\n{processes[rank].stacks()}"
        outcomes[rank] = Outcome(rank, None, story, seconds)
    return [outcomes[rank] for rank in range(len(processes))]
