"""`Lab`: N emulated hosts on one machine; `Loopback`: the same interface without the slow network."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from types import TracebackType
from typing import Any, Literal, Self

from thinwire.errors import LabError
from thinwire.lab import bare
from thinwire.lab.counters import read_interface
from thinwire.lab.ports import reserve_port
from thinwire.lab.run import OnLine, RankCommand, Run
from thinwire.lab.units import MAX_NODES, LinkRate, NodeRates, Rate, expand_rates, parse_duration, parse_rate

Direction = Literal["up", "down", "both"]

FIRST_PORT = 29_500
CLOSE_TIMEOUT_S = 20.0


class Network(ABC):
    """Hosts that run one program each: what `Lab` and `Loopback` have in common."""

    emulated: bool
    interfaces: tuple[str, ...]  # each node's network interface
    reason: str | None = None  # why this is not a Lab
    congestion_control: str | None = None  # TCP's in the nodes, which decides how well a slow link is filled

    def __init__(self, nodes: int, nproc_per_node: int):
        if nodes < 1 or nproc_per_node < 1:
            raise LabError(f"expected at least 1 node and 1 process on it, got {nodes} and {nproc_per_node}")
        self.nodes = nodes
        self.nproc_per_node = nproc_per_node
        self._runs: list[Run] = []

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.nproc_per_node

    def start(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
        cwd: str | os.PathLike[str] | None = None,
        grace_s: float = 10.0,
        share_cores: bool = True,
    ) -> Run:
        """Start a program on every rank, with the environment that ``torchrun`` gives.

        Every node gets the same share of this machine's cores and keeps to it, as hosts do: left to the scheduler,
        ranks drift apart within a step, and an exchange waits for the last one.

        Args:
            argv: program and arguments, the same for every rank.
            env: variables added to this process's environment; they win over the lab's.
            on_line: called as ``on_line(rank, line)`` for each line of output, from one thread per rank. Without it
                lines are printed as ``[rank k] line``.
            cwd: directory to run in.
            grace_s: seconds the other ranks have to end by themselves when one has failed.
            share_cores: False lets every rank run on every core, as do nodes and cores of which neither number divides
                the other.

        Raises:
            LabError: if the network is closed.
        """
        words = [os.fspath(word) for word in argv]
        address, port = self._rendezvous()
        every_core = sorted(os.sched_getaffinity(0))
        commands = []
        for rank in range(self.world_size):
            node, local_rank = divmod(rank, self.nproc_per_node)
            interface = self.interfaces[node]
            cores = share_of_cores(node, self.nodes, every_core) if share_cores else None
            threads = len(every_core) // self.world_size if cores is None else len(cores) // self.nproc_per_node
            variables = {
                "RANK": rank,
                "WORLD_SIZE": self.world_size,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": self.nproc_per_node,
                "GROUP_RANK": node,
                "NODE_RANK": node,
                "GROUP_WORLD_SIZE": self.nodes,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": interface,
                "NCCL_SOCKET_IFNAME": interface,
                "PYTHONUNBUFFERED": 1,
                "THINWIRE_LAB_INTERFACE": interface,
            }
            environment = {"OMP_NUM_THREADS": str(max(1, threads)), **os.environ}
            environment |= {name: str(value) for name, value in variables.items()} | dict(env or {})
            commands.append(RankCommand(argv=self._enter(node, words), env=environment, node=node, cores=cores))
        run = Run(commands, counters=self.interface_nbytes, on_line=on_line, cwd=cwd, grace_s=grace_s)
        self._runs.append(run)
        return run

    @abstractmethod
    def interface_nbytes(self) -> list[tuple[int, int]]:
        """Bytes that each node's interface has (sent, received) since the network was made, headers included."""

    @abstractmethod
    def set_rate(self, rate: Rate, *, node: int | None = None, direction: Direction = "both") -> None:
        """Change what one node, or all, may send (up) and receive (down); connections stay up."""

    @abstractmethod
    def _rendezvous(self) -> tuple[str, int]:
        """Address and port where rank 0 of the next run may listen."""

    @abstractmethod
    def _enter(self, node: int, argv: Sequence[str]) -> list[str]:
        """Command line that runs ``argv`` on a node."""

    def close(self) -> None:
        """End every process."""
        for run in self._runs:
            run.stop("ended because the lab closed")
        for run in self._runs:
            run.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def share_of_cores(node: int, nodes: int, cores: Sequence[int]) -> Set[int] | None:
    """Return the cores that a node keeps to, or None where they cannot be shared out evenly.

    Example:
        >>> [share_of_cores(node, 4, [0, 1]) for node in range(4)], share_of_cores(1, 2, range(8))
        ([{0}, {1}, {0}, {1}], {4, 5, 6, 7})
    """
    if nodes % len(cores) == 0:
        return {cores[node % len(cores)]}
    if len(cores) % nodes == 0:
        each = len(cores) // nodes
        return set(cores[node * each : (node + 1) * each])
    return None


class Lab(Network):
    """Emulated hosts: network namespaces joined by shaped links. Needs root or user namespaces, and iproute2.

    Args:
        nodes: number of hosts, up to 250.
        rate: what each host may send, and receive: ``"100mbit"``, a number of bit/s, None for unshaped, or a list
            with one entry per node, each optionally an ``(up, down)`` pair.
        latency: one-way delay between any two hosts (a round trip takes twice that): ``"5ms"``, or seconds.
        nproc_per_node: ranks per host. Those of one host talk through its loopback, unshaped.

    Raises:
        LabError: if the network cannot be had here. The message says why and names the command that helps.

    Example:
        >>> with Lab(nodes=4, rate="100mbit") as lab:  # doctest: +SKIP
        ...     result = lab.start([sys.executable, "train.py"]).wait()
    """

    emulated = True

    def __init__(self, nodes: int, rate: NodeRates = None, latency: str | float | None = None, nproc_per_node: int = 1):
        super().__init__(nodes, nproc_per_node)
        if nodes > MAX_NODES:
            raise LabError(f"a lab has at most {MAX_NODES} nodes, got {nodes}")
        if not sys.platform.startswith("linux"):
            raise LabError(f"the lab emulates hosts with Linux network namespaces; this is {sys.platform}")
        self.rates = list(expand_rates(rate, nodes))
        self.latency = parse_duration(latency)
        settings = {
            "parent": os.getpid(),
            "rates": [dataclasses.asdict(r) for r in self.rates],
            "latency": self.latency,
        }
        self._lock = threading.Lock()  # one request at a time
        self._holder = subprocess.Popen(
            bare.command("holder", settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            made = self._receive()
        except BaseException:
            self.close()
            raise
        self.interfaces = tuple(made["interfaces"])
        self.delay_line: str | None = made["delay_line"]  # "netem", "user space", or None without latency
        self.congestion_control = made["congestion_control"]
        self.in_user_namespace: bool = made["user_namespace"] is not None
        self._namespaces: list[str] = made["namespaces"]
        self._user_namespace: str | None = made["user_namespace"]

    def interface_nbytes(self) -> list[tuple[int, int]]:
        """Bytes that each node's interface has (sent, received) since the lab was made, headers included."""
        return [(sent, received) for sent, received in self._request({})["counters"]]

    def set_rate(self, rate: Rate, *, node: int | None = None, direction: Direction = "both") -> None:
        """Change the rate of one node, or of all, in one direction or both; connections stay up.

        Raises:
            LabError: for an unknown node or direction, or a rate that is none.
        """
        if direction not in ("up", "down", "both"):
            raise LabError(f'expected direction "up", "down" or "both", got {direction!r}')
        if node is not None and not 0 <= node < self.nodes:
            raise LabError(f"expected a node from 0 to {self.nodes - 1}, got {node}")
        bits = parse_rate(rate)
        change = {way: bits for way in ("up", "down") if direction in (way, "both")}
        changed = range(self.nodes) if node is None else (node,)
        self._apply({which: dataclasses.replace(self.rates[which], **change) for which in changed})

    def set_rates(self, rate: NodeRates) -> None:
        """Change the rates of all nodes, given as to the constructor."""
        self._apply(dict(enumerate(expand_rates(rate, self.nodes))))

    def close(self) -> None:
        """End every process and let the namespaces go. Also happens when this process dies."""
        try:
            super().close()
        finally:
            assert self._holder.stdin is not None
            assert self._holder.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._holder.stdin.close()
            self._holder.stdout.close()
            try:
                self._holder.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise LabError(
                    f"the lab's processes did not end within {CLOSE_TIMEOUT_S:g} s; try `thinwire lab --clean`"
                ) from error

    def _apply(self, rates: dict[int, LinkRate]) -> None:
        self._request({"rates": {node: dataclasses.asdict(rate) for node, rate in rates.items()}})
        for node, rate in rates.items():
            self.rates[node] = rate

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._holder.stdin is not None
            try:
                self._holder.stdin.write(json.dumps(message) + "\n")
                self._holder.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise LabError("the lab is closed, or the process that holds its namespaces was killed") from error
            return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._holder.stdout is not None
        line = self._holder.stdout.readline()
        if not line:
            raise LabError(f"the process that holds the lab's namespaces ended (status {self._holder.wait()})")
        reply = json.loads(line)
        if "error" in reply:
            raise LabError(f"lab: {reply['error']}")
        return reply

    def _rendezvous(self) -> tuple[str, int]:
        # Addresses are the lab's own; another port per run, lest one that just ended still holds the last.
        return "10.117.0.1", FIRST_PORT + len(self._runs)

    def _enter(self, node: int, argv: Sequence[str]) -> list[str]:
        return bare.command("enter", self._user_namespace, self._namespaces[node], list(argv))


class Loopback(Network):
    """All ranks on this machine's loopback: no slow network, no hosts, the same interface as `Lab`.

    Args:
        nodes: number of hosts to pretend.
        nproc_per_node: ranks per host.
        reason: why this is not a `Lab`, for reports.
    """

    emulated = False

    def __init__(self, nodes: int, nproc_per_node: int = 1, reason: str | None = None):
        super().__init__(nodes, nproc_per_node)
        self.reason = reason
        self.rates = [LinkRate(up=None, down=None)] * nodes
        self.latency = None
        self.interfaces = ("lo",) * nodes

    def interface_nbytes(self) -> list[tuple[int, int]]:
        """An equal share of what ``lo`` carried for the whole machine, other programs included; 0 if unknown."""
        try:
            sent, received = read_interface("lo")
        except (OSError, KeyError):
            sent = received = 0
        return [(sent // self.nodes, received // self.nodes)] * self.nodes

    def set_rate(self, rate: Rate, *, node: int | None = None, direction: Direction = "both") -> None:
        """Loopback has no rate.

        Raises:
            LabError: unless the rate is None.
        """
        if parse_rate(rate) is not None:
            raise LabError(f"loopback cannot be slowed to {rate}: {self.reason or 'use Lab'}")

    def _rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", reserve_port()

    def _enter(self, node: int, argv: Sequence[str]) -> list[str]:
        return list(argv)


def open_network(
    nodes: int,
    rate: NodeRates = None,
    latency: str | float | None = None,
    nproc_per_node: int = 1,
    *,
    allow_loopback: bool = True,
) -> Network:
    """Open a `Lab`, or, where none can be had and ``allow_loopback``, a `Loopback` whose ``reason`` says why.

    Raises:
        LabError: for settings that no lab can have, and, without ``allow_loopback``, where none can be had.
    """
    expand_rates(rate, nodes)
    parse_duration(latency)
    try:
        return Lab(nodes, rate, latency, nproc_per_node)
    except LabError as error:
        if not allow_loopback:
            raise
        return Loopback(nodes, nproc_per_node, reason=str(error))
