"""Parameter servers beside the workers of a node: started with them, ended when nobody needs them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ServerError
from thinwire.server.cpus import check_cpus, describe, format_cpus, share_out
from thinwire.server.process import GRACE_S
from thinwire.server.sockets import check_address, is_loopback, join_address

ADDRESSES, KEYS = "THINWIRE_SERVERS", "THINWIRE_KEYS"  # what attach(servers="env") reads
POLL_S = 0.2
WORKERS_S = 40.0  # for torchrun to end: it gives its workers 30
SERVERS_S = 10.0  # for servers to close, after their grace


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What runs on one node.

    Attributes:
        hosts: of all nodes, as the others reach them.
        node_rank: which of them this is.
        servers_per_node: servers beside the workers.
        nproc_per_node: workers.
        port: of the first server of every node; the others follow.
        master_port: of the workers' rendezvous, on the first host.
        keys: the folder that `thinwire keys` made; needed unless all is on this machine.
        threads: of every server.
        cpus: processors of this node, to be shared out among its servers and workers; None: all run on any.
        leader_share: how many times as many the first worker gets as each other.
        metrics: host and port at which the first server of this node answers Prometheus; the others follow.
        grace_s: what servers have to serve other nodes after this one's workers have ended.
        server_arguments: further ones of `thinwire server`.
        script: what workers run, with its arguments.

    Raises:
        ServerError: a node that is none, no keys where they are needed, or processors that are too few or not allowed.
    """

    hosts: tuple[str, ...]
    node_rank: int
    servers_per_node: int
    nproc_per_node: int
    port: int
    master_port: int
    keys: Path | None
    threads: int = 1
    cpus: frozenset[int] | None = None
    leader_share: int = 2
    metrics: tuple[str, int] | None = None
    grace_s: float = GRACE_S
    server_arguments: tuple[str, ...] = ()
    script: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < len(self.hosts):
            raise ServerError(f"--node-rank: expected one of {len(self.hosts)} hosts, from 0, got {self.node_rank}")
        if self.keys is None and not all(map(is_loopback, self.hosts)):
            raise ServerError("--keys: expected a folder made by  thinwire keys FOLDER, since nodes are other machines")
        if self.cpus is not None:
            check_cpus(self.cpus)
            self.shares()

    def shares(self) -> tuple[list[set[int]], list[set[int]]]:
        """Return the processors of every server of this node, and of every worker; none where they run on any."""
        if self.cpus is None:
            return [], []
        return share_out(
            self.cpus,
            servers=self.servers_per_node,
            threads=self.threads,
            workers=self.nproc_per_node,
            leader_share=self.leader_share,
        )

    def addresses(self) -> list[str]:
        """Return the address of every server, by its number: node after node."""
        ports = range(self.port, self.port + self.servers_per_node)
        return [f"tcp://{join_address(host, port)}" for host in self.hosts for port in ports]

    def server_commands(self) -> list[list[str]]:
        """Return the commands of this node's servers."""
        addresses, num_workers = self.addresses(), self.nproc_per_node * len(self.hosts)
        first = self.node_rank * self.servers_per_node
        keys = [] if self.keys is None else ["--keys", str(self.keys / "server")]
        pinned = [["--cpu-affinity", format_cpus(cpus)] for cpus in self.shares()[0]] or [[]] * self.servers_per_node
        return [
            [
                *(sys.executable, "-m", "thinwire", "server", "--bind", self._bind(addresses[index])),
                *("--num-workers", str(num_workers), "--server-index", f"{index}/{len(addresses)}"),
                *("--threads", str(self.threads), *keys, *on, *self._metrics(index - first)),
                *("--grace", str(self.grace_s), *self.server_arguments),
            ]
            for index, on in enumerate(pinned, start=first)
        ]

    def _metrics(self, place: int) -> list[str]:
        """Return where this server of the node answers Prometheus."""
        if self.metrics is None:
            return []
        host, port = self.metrics
        return ["--metrics", join_address(host, port and port + place)]  # 0: any

    def _bind(self, address: str) -> str:
        """Return where to listen: a host's name need not be that of one of its own interfaces."""
        if is_loopback(check_address(address)):
            return address
        return f"tcp://{'[::]' if '[' in address else '0.0.0.0'}:{address.rpartition(':')[2]}"

    def worker_command(self) -> list[str]:
        """Return the command that starts this node's workers."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.nproc_per_node)]
        torchrun += ["--nnodes", str(len(self.hosts)), "--node-rank", str(self.node_rank)]
        torchrun += ["--master-addr", self.hosts[0], "--master-port", str(self.master_port)]
        if self.cpus is None:
            return [*torchrun, *self.script]
        # torchrun itself gives every worker one OpenMP thread, unless the user has said how many.
        threads = "kept" if "OMP_NUM_THREADS" in os.environ else "own"
        sets = ":".join(map(format_cpus, self.shares()[1]))
        return [*torchrun, str(Path(__file__).with_name("pin.py")), sets, threads, *self.script]

    def environment(self) -> dict[str, str]:
        """Return what workers find in their environment, beside this process's."""
        keys = {} if self.keys is None else {KEYS: str(self.keys / "worker")}
        return {ADDRESSES: ",".join(self.addresses()), **keys}


def run(launch: Launch, prepare: Callable[[], None] | None = None) -> int:
    """Run servers and workers until the workers have ended, and nobody needs the servers; return the workers' status.

    Args:
        launch: what to run.
        prepare: called in every new process before it becomes a server, or torchrun.

    Raises:
        ServerError: a server ended before; the workers are ended, too.
    """
    if launch.cpus is not None:
        print(describe(*launch.shares()), flush=True)
    servers: list[subprocess.Popen[bytes]] = []
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for command in launch.server_commands():
            servers.append(subprocess.Popen(command, preexec_fn=prepare))
        environment = {**os.environ, **launch.environment()}
        workers.append(subprocess.Popen(launch.worker_command(), env=environment, preexec_fn=prepare))
        while (status := workers[0].poll()) is None:
            for server in servers:
                if (ended := server.poll()) is not None:
                    raise ServerError(
                        f"a server ended with status {ended} before the workers did; see what it says above"
                    )
            time.sleep(POLL_S)
        return status
    finally:
        try:
            _end(workers, signal.SIGTERM, WORKERS_S)
        finally:
            # By a signal that nobody else sends: a terminal or a cluster's manager may have sent them theirs already.
            _end(servers, signal.SIGUSR1, launch.grace_s + SERVERS_S)


def _end(processes: Sequence[subprocess.Popen[bytes]], ask: signal.Signals, patience_s: float) -> None:
    """Ask all to end, then make them."""
    try:
        for process in processes:
            process.send_signal(ask)  # nothing, for one that has ended
        deadline = time.monotonic() + patience_s
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:  # also where another interrupt comes
        for process in processes:
            process.kill()
            process.wait()
