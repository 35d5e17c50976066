"""What commands share that run on the ranks of a launcher, or on some of their own over loopback."""

import datetime
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from thinwire.comm.meeting import check_reachable
from thinwire.errors import ThinwireError
from thinwire.lab.ports import reserve_port

MEETING_S = 60.0  # ranks may take so long to start, whatever the timeout of collectives
_GRACE_S = 10.0  # for the others, once a rank has ended with an error


def launched() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(arguments: Sequence[str], num: int) -> int:
    """Run ``thinwire`` with these arguments on ranks of our own; return the status of the first that fails."""
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port()), "WORLD_SIZE": str(num)}
    launch |= {"GLOO_SOCKET_IFNAME": "lo", "THINWIRE_SOCKET_IFNAME": "lo"}
    launch |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "thinwire", *arguments]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num)
    ]
    try:
        return _wait(ranks, arguments[0])
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], command: str) -> int:
    deadline = float("inf")
    failed = dict[int, int]()  # exit status by rank, of those that ended by themselves
    while True:
        running = [process.poll() for process in ranks].count(None)
        for rank, process in enumerate(ranks):
            if process.returncode and rank not in failed:
                failed[rank] = process.returncode
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                if process.returncode < 0:
                    print(f"thinwire {command}: rank {rank} was ended by signal {-process.returncode}", file=sys.stderr)
        if not running or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return 0 if not failed else 2 if set(failed.values()) == {2} else 1


def meet(rank: int, seconds: float) -> None:
    """Make the default process group, once every rank has reached every other.

    Raises:
        ThinwireError: the others did not come, or one cannot be reached; the message names it and its address.
    """
    limit = datetime.timedelta(seconds=seconds)
    try:
        store, _, world_size = next(dist.rendezvous("env://", timeout=limit))
        # Gloo's own error would name a port, not a rank.
        check_reachable(store, list(range(world_size)), rank, seconds)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=world_size, timeout=limit
        )
    except (RuntimeError, ValueError) as error:  # no store, no peers; no address in the environment
        if isinstance(error, ThinwireError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ThinwireError(
            f"rank {rank} did not meet the others, for whom it waits {seconds:g} s at most: {reason}"
        ) from error


def leave() -> NoReturn:
    """End with status 1 at once: threads of a failed exchange may still be waiting for each other."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """Ends the program, with a line that says where, if something takes too long: a user's own loop, for one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._timer: threading.Timer | None = None

    def begin(self, what: str, seconds: float) -> None:
        """Say what comes now, and how long it may take."""
        self.end()
        self._timer = threading.Timer(seconds, self._expire, [what, seconds])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, what: str, seconds: float) -> None:
        print(f"thinwire: rank {self._rank}: {what} took more than {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(1)


def import_factory(place: str) -> Callable[[], Any]:
    """Return the function that ``--model MODULE:FACTORY`` names, from the working directory too.

    Raises:
        ThinwireError: there is none.
    """
    module, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ThinwireError(f"--model {place}: {error}") from error
    if not callable(factory):
        raise ThinwireError(f"--model {place}: expected a function, got {type(factory).__name__}")
    return factory


def model_place(text: str) -> str:
    """Check what stands after ``--model``."""
    if not all(text.partition(":")):
        raise ValueError(f"expected MODULE:FACTORY, got {text!r}")
    return text
