"""Parameter servers beside the ranks of a benchmark: processes of their own, on the same emulated hosts."""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.advisor.served import split_method as split_method
from thinwire.comm.rounds import Pull, Push
from thinwire.errors import ServerError
from thinwire.plan import Plan
from thinwire.server.client import Servers
from thinwire.server.keys import make_keys
from thinwire.wire import FRAME_NBYTES

_running: list[subprocess.Popen[str]] = []  # of this rank


def start_servers(here: int, num_workers: int) -> Servers:
    """Start `here` servers on this rank's host, for the first `num_workers` ranks. Collective.

    Raises:
        ServerError: one does not start.
    """
    rank = dist.get_rank()
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, here)
    first, host = sum(counts[:rank]), _own_address()
    # All hosts are emulated on one machine: they share its files.
    folder: list[Any] = [tempfile.mkdtemp(prefix="thinwire-keys-") if rank == 0 else None]
    if rank == 0:
        make_keys(Path(folder[0]) / "keys")
    dist.broadcast_object_list(folder, 0)
    keys = Path(folder[0]) / "keys"
    addresses: list[str] = []
    for number in range(first, first + here):
        command = [sys.executable, "-W", "ignore", "-m", "thinwire", "server", "--bind", f"tcp://{host}:0"]
        command += ["--num-workers", str(num_workers), "--server-index", f"{number}/{sum(counts)}"]
        command += ["--grace", "1"]  # by then all ranks are done, or have failed
        server = subprocess.Popen([*command, "--keys", str(keys / "server")], stdout=subprocess.PIPE, text=True)
        _running.append(server)
        assert server.stdout is not None
        line = server.stdout.readline()
        if " at tcp://" not in line:
            raise ServerError(f"a server did not start on the host of rank {rank}: {line!r}")
        addresses.append(line.split(" at ")[1].strip())
    everyone: list[Any] = [None] * len(counts)
    dist.all_gather_object(everyone, addresses)
    return Servers(addresses=tuple(address for own in everyone for address in own), keys=keys / "worker")


def host_nbytes(plan: Plan, rank: int, per_rank: int) -> int:
    """Return what leaves a rank's host in a step: its pushes, and its servers' answers, to other hosts."""
    own = range(per_rank * rank, per_rank * (rank + 1))
    total = 0
    for layout in plan.messages([param.info.name for param in reversed(plan.params)]):
        for round_ in layout.rounds:
            if isinstance(round_, Push | Pull):
                there = [nbytes for server, nbytes in enumerate(round_.nbytes) if nbytes and server not in own]
                asked = [nbytes for server, nbytes in enumerate(round_.nbytes) if nbytes and server in own]
                if isinstance(round_, Push):
                    total += FRAME_NBYTES * len(there) + sum(there)
                else:
                    total += (plan.world_size - 1) * sum(FRAME_NBYTES + nbytes for nbytes in asked)
    return total


def _own_address() -> str:
    """Return the address from which this host reaches the first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return probe.getsockname()[0]


@atexit.register
def end_servers() -> None:
    """End what `start_servers` has started on this rank."""
    while _running:
        server = _running.pop()
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
