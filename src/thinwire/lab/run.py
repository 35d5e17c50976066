"""One program on every rank: started together, watched, and ended together."""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

OnLine: TypeAlias = Callable[[int, str], None]
Counters: TypeAlias = Callable[[], list[tuple[int, int]]]

KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
DRAIN_S = 1.0  # for output still in the pipes; they stay open if a process that left its rank's group holds them
_print_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class LabResult:
    """How a run ended.

    Attributes:
        returncodes: exit status per rank; ``-n`` is death by signal ``n``.
        failed_rank: the first rank that failed, None if none did by itself.
        message: what happened, in one line.
        sent_nbytes: bytes that each node's interface sent during the run, headers included.
        received_nbytes: bytes that each node's interface received.
        seconds: from the start of the first process to the end of the last.
        timed_out: the run was ended because `Run.wait` ran out of time.
    """

    returncodes: tuple[int, ...]
    failed_rank: int | None
    message: str
    sent_nbytes: tuple[int, ...]
    received_nbytes: tuple[int, ...]
    seconds: float
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Every rank ended with status 0."""
        return not any(self.returncodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCommand:
    """What one rank runs, and where."""

    argv: Sequence[str]
    env: Mapping[str, str]
    node: int
    cores: Set[int] | None = None  # that it may run on; None for all


def print_line(rank: int, line: str) -> None:
    """Print a rank's line with its number, never mixed with another's."""
    with _print_lock:
        print(f"[rank {rank}] {line}", flush=True)


class Run:
    """Ranks that are running; made by `Network.start`.

    A thread watches them from the start: when the first fails, the others have ``grace_s`` to end by themselves (and
    to say what they lost), then get SIGTERM, and SIGKILL 5 s later. A rank's process group ends with it.
    """

    def __init__(
        self,
        commands: Sequence[RankCommand],
        *,
        counters: Counters,
        on_line: OnLine | None = None,
        cwd: str | os.PathLike[str] | None = None,
        grace_s: float = 10.0,
    ):
        self._commands = commands
        self._counters = counters
        self._grace_s = grace_s
        self._on_line = on_line or print_line
        self._stop_reason: str | None = None
        self._timed_out = False
        self._failed_rank: int | None = None
        self._result: LabResult | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()  # guards the two ends of the wake pipe and the pidfds against their closing

        self._before = counters()
        self._started = time.monotonic()
        self._processes: list[subprocess.Popen[str]] = []
        self._pidfds: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        try:
            for command in commands:
                self._processes.append(self._spawn(command, cwd))
                self._pidfds.append(os.pidfd_open(self._processes[-1].pid))
        except BaseException:
            for rank, process in enumerate(self._processes):
                self._reap(rank)
                assert process.stdout is not None
                process.stdout.close()
            self._close_fds()
            raise
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(len(commands))
        ]
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in (*self._readers, self._watcher):
            thread.start()

    @property
    def running(self) -> bool:
        """True until the last rank has ended and the result is there."""
        return not self._done.is_set()

    def wait(self, timeout: float | None = None) -> LabResult:
        """Wait for the end of every rank; after ``timeout`` seconds end them all, which the result then says."""
        if not self._done.wait(timeout):
            self._timed_out = True
            self.stop(f"timed out after {timeout:g} s")
        self._done.wait()
        assert self._result is not None
        return self._result

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank; nothing if it has ended."""
        with self._lock:
            if self.running:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfds[rank], signal_number)

    def stop(self, reason: str = "stopped") -> None:
        """Ask every rank to end (SIGTERM, SIGKILL 5 s later) and return at once."""
        with self._lock:
            if self.running and self._stop_reason is None:
                self._stop_reason = reason
                os.write(self._wake_write, b".")

    @staticmethod
    def _spawn(command: RankCommand, cwd: str | os.PathLike[str] | None) -> subprocess.Popen[str]:
        # A process inherits the cores of the thread that starts it.
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, command.cores or ours)
        try:
            # A session of its own: Ctrl-C in the terminal reaches only the lab, which then ends the ranks in order.
            return subprocess.Popen(
                command.argv,
                env=dict(command.env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, ours)

    def _read(self, rank: int) -> None:
        stream = self._processes[rank].stdout
        assert stream is not None
        with stream:
            for line in stream:
                self._on_line(rank, line.rstrip("\n"))

    def _watch(self) -> None:
        alive = set(range(len(self._processes)))
        steps = [(signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, None)]  # what is left to do to those who stay
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            for rank in alive:
                selector.register(self._pidfds[rank], selectors.EVENT_READ, rank)
            while alive:
                ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
                ended = [key.data for key, _ in ready if key.data is not None]
                for rank in ended:
                    selector.unregister(self._pidfds[rank])
                    self._reap(rank)
                    alive.discard(rank)
                if deadline is None and self._note_failure(ended):
                    deadline = time.monotonic() + self._grace_s
                if any(key.data is None for key, _ in ready):
                    selector.unregister(self._wake_read)
                    deadline = 0.0
                if deadline is not None and time.monotonic() >= deadline and steps:
                    number, pause_s = steps.pop(0)
                    for rank in alive:
                        self._signal_group(rank, number)
                    deadline = None if pause_s is None else time.monotonic() + pause_s
        self._finish()

    def _note_failure(self, ended: list[int]) -> bool:
        """Remember who failed first. Of several seen at once, one that a signal killed came before its mourners."""
        failed = [rank for rank in ended if self._processes[rank].returncode]
        if not failed or self._failed_rank is not None or self._stop_reason is not None:
            return False
        self._failed_rank = min(failed, key=lambda rank: (self._processes[rank].returncode > 0, rank))
        return True

    def _signal_group(self, rank: int, number: int) -> None:
        # The rank is not reaped yet, so its id cannot have been given to a stranger.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, number)

    def _reap(self, rank: int) -> None:
        self._signal_group(rank, signal.SIGKILL)  # what it left behind in its group
        self._processes[rank].wait()

    def _finish(self) -> None:
        seconds = time.monotonic() - self._started
        patience = time.monotonic() + DRAIN_S
        for reader in self._readers:
            reader.join(max(0.0, patience - time.monotonic()))
        try:
            after = self._counters()
        except Exception:  # the lab may be gone; how the ranks ended must still be told
            after = self._before
        returncodes = tuple(process.returncode for process in self._processes)
        self._result = LabResult(
            returncodes=returncodes,
            failed_rank=self._failed_rank,
            message=self._describe(returncodes),
            sent_nbytes=tuple(a[0] - b[0] for a, b in zip(after, self._before, strict=True)),
            received_nbytes=tuple(a[1] - b[1] for a, b in zip(after, self._before, strict=True)),
            seconds=seconds,
            timed_out=self._timed_out,
        )
        with self._lock:
            self._done.set()
            self._close_fds()

    def _close_fds(self) -> None:
        for fd in (*self._pidfds, self._wake_read, self._wake_write):
            os.close(fd)

    def _describe(self, returncodes: tuple[int, ...]) -> str:
        if self._failed_rank is None:
            return self._stop_reason or f"all {len(returncodes)} ranks finished"
        rank = self._failed_rank
        message = f"rank {rank} (node {self._commands[rank].node}) {describe_status(returncodes[rank])}"
        others = [other for other, code in enumerate(returncodes) if code == -signal.SIGTERM and other != rank]
        if others:
            message += f"; ended after {self._grace_s:g} s: {'rank' if len(others) == 1 else 'ranks'} "
            message += ", ".join(map(str, others))
        return message


def describe_status(returncode: int) -> str:
    """Say a process's exit status in words."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
