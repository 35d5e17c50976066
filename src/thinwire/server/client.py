"""The driver that performs rounds through parameter servers."""

import datetime
import functools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.aggregators import Partition
from thinwire.comm.lane import Lane
from thinwire.comm.local import check_round
from thinwire.comm.mesh import MeshClosedError, MeshError
from thinwire.comm.nodes import Nodes
from thinwire.comm.process_group import (
    DEFAULT_TIMEOUT,
    SERVED_DEPTH,
    Outcome,
    all_gather_text,
    own_group,
    own_store,
    perform,
)
from thinwire.comm.rounds import Exchange, Pull, Push, Round, SendRecv, Transfer
from thinwire.comm.tracing import span
from thinwire.errors import AttachError, RankLostError, ServerError
from thinwire.server.channel import LEAVE_S, Channel
from thinwire.server.keys import WorkerKeys
from thinwire.server.node import NodeLanes
from thinwire.server.protocol import AND_PULL, Kind, Residuals, pack_values
from thinwire.server.sockets import check_address, is_loopback, zmq_module
from thinwire.wire import digest_of, split

NEWS_S = 3.0  # for servers to say why a rank of this node is gone, before it is told as seen from here
QUESTION_NBYTES = 1 << 24  # of residuals that one frame asks for or sets, about


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """Where the parameter servers are, and how to talk to them.

    Attributes:
        addresses: tcp://host:port of every server, in the order of their --server-index; the same on all workers.
        keys: the folder FOLDER/worker that `thinwire keys FOLDER` made; required unless all addresses are loopback.
        heartbeat_s: seconds between signs of life.
        heartbeat_timeout_s: a server that says nothing for so long is taken for dead, which is an error here.
        connect_timeout_s: for all servers to answer and all workers to come.

    Raises:
        ServerError: no address, one of another kind, or keys are missing.

    Example:
        >>> Servers(addresses=("tcp://127.0.0.1:5555",)).num_servers
        1
    """

    addresses: tuple[str, ...]
    keys: str | Path | None = None
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    connect_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.addresses or len(set(self.addresses)) < len(self.addresses):
            raise ServerError(f"servers: expected one address per server, each another, got {self.addresses}")
        hosts = [check_address(address) for address in self.addresses]
        if self.keys is None and (remote := [host for host in hosts if not is_loopback(host)]):
            raise ServerError(
                f"servers: expected keys, since {remote[0]} is another machine: attach(..., keys='FOLDER/worker'), "
                "made by  thinwire keys FOLDER"
            )
        if not 0 < self.heartbeat_s < self.heartbeat_timeout_s or self.connect_timeout_s <= 0:
            raise ServerError(
                "servers: expected 0 < heartbeat_s < heartbeat_timeout_s and a positive connect_timeout_s"
            )

    @property
    def num_servers(self) -> int:
        """How many there are."""
        return len(self.addresses)

    def connect(self, group: dist.ProcessGroup, workers: int, timeout: datetime.timedelta | None) -> "ServerDriver":
        """Make a driver. Collective."""
        return ServerDriver(self, group, workers=workers, timeout=timeout)


@dataclass(slots=True, eq=False)
class _Ticket:
    """One exchange under way. Touched by one thread at a time: a pool thread, then the channel's, ..."""

    exchange: Exchange
    schedule: tuple[Round, ...]
    name: str
    done: Future[Outcome] = field(default_factory=lambda: Future[Outcome]())
    outcome: Outcome = field(default_factory=Outcome)
    transfer: Transfer | None = None  # of the round under way: keeps its buffers alive
    pushed: Transfer | None = None  # of the round before a pull
    outstanding: int = 0  # answers that this round waits for
    # Of rounds inside a node: set when their transfer is ready, or will never be, after an error.
    ready: dict[int, threading.Event] = field(default_factory=lambda: {})
    started_s: float = 0.0


class ServerDriver:
    """Runs many exchanges at once through parameter servers: `OverlappedDriver`'s methods, other rounds.

    Exchanges whose rounds are all-reduces (of parameters that no compressor takes) go through a process group of their
    own, one after another. Rounds inside a node have lanes of their own (`NodeLanes`), where they run in the order of
    exchanges. After an error every exchange, present or future, fails with it, and servers are told.

    Args:
        servers: where they are.
        group: the ranks that take part.
        workers: threads that encode and decode.
        depth: exchanges under way at once, which bounds work memory.
        timeout: of each mean and each all-reduce; None for torch's default.

    Creating one is collective: every rank of `group` must do it.
    """

    on_device = False

    def __init__(
        self,
        servers: Servers,
        group: dist.ProcessGroup,
        *,
        workers: int = 1,
        depth: int = SERVED_DEPTH,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        zmq_module()
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._servers, self._depth = servers, depth
        self._timeout = timeout or DEFAULT_TIMEOUT
        ranks = dist.get_process_group_ranks(group)
        store = own_store(ranks, self.rank)
        control, reducing = (dist.PrefixStore(name, store) for name in ("control", "all-reduce"))
        self.control = own_group(control, self.rank, len(ranks), self._timeout)
        self._group = own_group(reducing, self.rank, len(ranks), self._timeout)
        self._session = int(all_gather_text(str(secrets.randbits(63) + 1), self.control)[0])
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="thinwire-codec")
        self._lane = Lane(self._group, None, "thinwire-all-reduce")
        self._channel: Channel | None = None
        self._ranks = ranks
        self._node: NodeLanes | None = None
        self._told = threading.Event()  # there is an error
        self._lock = threading.Lock()
        self._waiting, self._open = deque[_Ticket](), set[_Ticket]()
        self._under_way = 0
        self._rounds: dict[str, tuple[int, int]] = {}  # content -> its digest, and how often it was pushed
        self._goes_on = False
        self._asked = 0  # questions to servers, each with a number
        self._error: BaseException | None = None

    def open(self, plan: Sequence[str], node_sizes: tuple[int, ...] | None = None) -> None:
        """Connect to all servers, which compare the plans of all workers, and to the ranks of this node.

        Args:
            plan: all that must agree between workers, one fact a line.
            node_sizes: ranks of each node, where exchanges go through nodes.

        Raises:
            PlanError: they differ; the first difference is named. Or a server was started for another run.
            ServerError: a server does not answer in time.
        """
        servers, mates = self._servers, list[int]()
        if node_sizes is not None:
            nodes = Nodes.sized(node_sizes)
            mates = [rank for rank in nodes.ranks(nodes.of[self.rank]) if rank != self.rank]
            self._node = NodeLanes(self._ranks, self.rank, nodes, self._timeout) if mates else None
        self._channel = Channel(
            servers.addresses,
            session=self._session,
            rank=self.rank,
            world_size=self.world_size,
            keys=None if servers.keys is None else WorkerKeys.read(Path(servers.keys)),
            heartbeat_s=servers.heartbeat_s,
            heartbeat_timeout_s=servers.heartbeat_timeout_s,
            timeout_s=self._timeout.total_seconds(),
            mates=mates,
            fail=self.fail,
        )
        self._channel.hello("\n".join(plan), servers.connect_timeout_s)
        self._goes_on = self._channel.goes_on

    def submit(self, exchange: Exchange, schedule: tuple[Round, ...], name: str = "") -> "Future[Outcome]":
        """Queue an exchange; call in the same order on every rank. Traces call it by its name.

        Returns:
            A future of its `Outcome`. It carries the error, whatever its type, if this or an earlier exchange failed.
        """
        if self._channel is None:
            raise AttachError("the link is closed: attach again, to a freshly wrapped model, to go on training")
        ticket = _Ticket(exchange, schedule, name)
        with self._lock:
            if self._error is not None:
                ticket.done.set_exception(self._error)
                return ticket.done
            self._channel.clock += 1
            self._open.add(ticket)
            served = all(isinstance(round_, Push | Pull | SendRecv) for round_ in schedule)
            if served:
                self._queue_rounds_inside(ticket)
                self._waiting.append(ticket)
        if served:
            self._start_waiting()
        else:
            self._lane.submit(functools.partial(self._all_reduce, ticket))
        return ticket.done

    def _queue_rounds_inside(self, ticket: _Ticket) -> None:
        """Queue an exchange's rounds inside this node, each in its lane; they wait there for their transfers."""
        for position, round_ in enumerate(ticket.schedule):
            if isinstance(round_, SendRecv) and self._node is not None:
                ticket.ready[position] = threading.Event()
                self._node.lane(position).submit(functools.partial(self._run_inside, ticket, position))

    def read_residuals(
        self, partitions: Sequence[Partition], loss_scale: float, rates: Mapping[str, float], step: int
    ) -> list[Tensor]:
        """Return what servers owe of these partitions, (numel,) float32 each. Between steps only.

        Args:
            partitions: any.
            loss_scale: in units of which they are to be.
            rates: likewise, learning rates by parameter, where feedback corrects for them.
            step: steps committed: of these partitions servers undo what they did in the step of that number.

        Raises:
            ServerError: the run has failed, or this driver is closed.
        """
        out = [torch.empty(p.numel, dtype=torch.float32) for p in partitions]
        for server, places in _by_server(partitions):
            into = torch.empty(sum(partitions[i].numel for i in places), dtype=torch.float32)
            about = _about([partitions[i] for i in places], rates, loss_scale, step)
            self._ask(server, Kind.GET, about.pack(), into.view(torch.uint8))
            for i, found in zip(places, into.split([partitions[i].numel for i in places]), strict=True):
                out[i].copy_(found)
        return out

    def write_residuals(
        self, partitions: Sequence[Partition], values: Sequence[Tensor], loss_scale: float, rates: Mapping[str, float]
    ) -> None:
        """Set what servers owe of these partitions. Between steps only.

        Args:
            partitions: any.
            values: (numel,) float32 each.
            loss_scale: in units of which they are.
            rates: learning rates in units of which they are, by parameter, where feedback corrects for them.

        Raises:
            ServerError: the run has failed, or this driver is closed.
        """
        for server, places in _by_server(partitions):
            about = _about([partitions[i] for i in places], rates, loss_scale, 0)
            data = torch.cat([values[i] for i in places]).numpy().tobytes()
            self._ask(server, Kind.PUT, pack_values(about, data), torch.empty(0, dtype=torch.uint8))

    def _ask(self, server: int, kind: Kind, payload: bytes, into: Tensor) -> None:
        channel = self._channel
        if self._error is not None:
            raise ServerError("the run has failed: servers cannot be asked") from self._error
        if channel is None:
            raise ServerError(
                "the link is closed: servers cannot be asked; call state_dict() and load_state_dict() before close()"
            )
        arrived = threading.Event()
        self._asked += 1
        channel.expect(server, 0, self._asked, into, arrived.set)
        channel.send(server, kind, round_=self._asked, payload=payload)
        while not arrived.wait(0.1):  # bounded: the channel looks after heartbeats and its time-out
            if self._error is not None:
                raise ServerError("servers did not answer") from self._error

    def fail(self, error: BaseException) -> None:
        """Fail every exchange that is not done, and tell the servers, so that other workers fail, too."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            failed = list(self._open)
            self._open.clear()
            self._waiting.clear()
        self._told.set()
        if self._channel is not None:  # first: ranks of this node ask servers why its connections have closed
            self._channel.close(f"{type(error).__name__}: {error}")
        if self._node is not None:
            self._node.interrupt()
        for ticket in failed:
            for ready in ticket.ready.values():
                ready.set()
            ticket.done.set_exception(error)

    def close(self) -> None:
        """Say goodbye to the servers and stop the threads, once all submitted exchanges are done."""
        if self._error is None:
            for ticket in list(self._open):
                ticket.done.exception()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close("" if self._error is None else f"{type(self._error).__name__}: {self._error}")
        if self._node is not None:
            self._node.close(None if self._error is None else LEAVE_S)
        self._pool.shutdown(cancel_futures=True)
        self._lane.close(None if self._error is None else LEAVE_S)

    @property
    def goes_on(self) -> bool:
        """Whether servers go on without workers that are lost; known once `open` returns."""
        return self._goes_on

    @property
    def error(self) -> BaseException | None:
        """What ended the run, if something has."""
        return self._error

    @property
    def refused(self) -> dict[str, int]:
        """Frames of servers that were not taken, by reason."""
        return {} if self._channel is None else dict(self._channel.refused)

    def _start_waiting(self) -> None:
        with self._lock:
            while self._waiting and self._under_way < self._depth:
                self._under_way += 1
                self._pool.submit(self._advance, self._waiting.popleft())

    def _advance(self, ticket: _Ticket) -> None:
        """Run an exchange up to the next answer that it waits for, in a pool thread."""
        try:
            while self._error is None:
                position = ticket.outcome.num_collectives
                with span("exchange", ticket.name, round=position):
                    transfer = next(ticket.exchange, None)
                expected = ticket.schedule[position] if position < len(ticket.schedule) else None
                check_round(None if transfer is None else transfer.round, expected, position, self.rank)
                if transfer is None:
                    self._finish(ticket)
                    return
                ticket.transfer = transfer
                ticket.outcome.sent_nbytes += transfer.round.sent_nbytes(self.rank)
                ticket.outcome.num_collectives += 1
                match transfer.round:
                    case SendRecv() if position in ticket.ready:
                        ticket.ready[position].set()
                        return
                    case Push() as push if push.includes(self.rank):
                        ticket.pushed = transfer  # leaves with the question for its mean
                    case Pull() as pull if pull.includes(self.rank):
                        self._push_and_pull(ticket, transfer, pull)
                        return
                    case _:  # this rank moves nothing
                        assert not transfer.round.sent_nbytes(self.rank)
        except BaseException as error:
            self.fail(error)

    def _push_and_pull(self, ticket: _Ticket, transfer: Transfer, pull: Pull) -> None:
        channel, pushed = self._channel, ticket.pushed
        assert channel is not None
        assert pushed is not None
        assert isinstance(pushed.round, Push)
        ticket.outstanding, ticket.started_s = sum(bool(text) for text in pull.contents), time.perf_counter()
        sent, received = split(pushed.send, pushed.round.nbytes), split(transfer.receive, pull.nbytes)
        for server, text in enumerate(pull.contents):
            if not text:
                continue
            with self._lock:
                digest, round_ = self._rounds.get(text, (digest_of(text), 0))
                self._rounds[text] = digest, round_ + 1
            if not round_:
                channel.send(server, Kind.DECLARE, content=digest, payload=text.encode())
            channel.expect(server, digest, round_, received[server], lambda: self._arrived(ticket))
            data = memoryview(sent[server].numpy())  # pyright: ignore[reportArgumentType]  # numpy's stubs hide its buffer
            channel.send(server, Kind.PUSH, content=digest, round_=round_, payload=data, flags=AND_PULL)

    def _arrived(self, ticket: _Ticket) -> None:
        ticket.outstanding -= 1  # by the channel's thread, which alone gets here
        if not ticket.outstanding:
            ticket.outcome.transport_s += time.perf_counter() - ticket.started_s
            self._pool.submit(self._advance, ticket)

    def _run_inside(self, ticket: _Ticket, position: int) -> None:
        """Perform one round inside this node, in the lane's thread."""
        with span("wait", ticket.name, round=position):
            ticket.ready[position].wait()
        node, transfer = self._node, ticket.transfer
        if self._error is not None or node is None or transfer is None:
            return
        started = time.perf_counter()
        try:
            with span("transport", f"{ticket.name} SendRecv", round=position):
                node.perform(transfer, node.lane(position))
        except MeshClosedError:
            return  # from this side, after an error
        except BaseException as error:
            # Servers hear of whoever gave up, and why, and miss whoever died; gloo does not even say who that is.
            self._told.wait(NEWS_S + (0.0 if isinstance(error, MeshError) else self._servers.heartbeat_timeout_s))
            self.fail(RankLostError(f"round {position} of {ticket.name}, inside the node: {error}"))
            return
        ticket.outcome.transport_s += time.perf_counter() - started
        if self._error is None:
            self._pool.submit(self._advance, ticket)

    def _all_reduce(self, ticket: _Ticket) -> None:
        outcome = ticket.outcome
        try:
            for position, transfer in enumerate(ticket.exchange):
                check_round(transfer.round, ticket.schedule[position], position, self.rank)
                started = time.perf_counter()
                with span("transport", f"{ticket.name} AllReduce", round=position):
                    perform(transfer, self._group)
                outcome.transport_s += time.perf_counter() - started
                outcome.sent_nbytes += transfer.round.sent_nbytes(self.rank)
                outcome.num_collectives += 1
        except BaseException as error:
            self.fail(error)
            return
        self._settle(ticket)

    def _finish(self, ticket: _Ticket) -> None:
        with self._lock:
            self._under_way -= 1
        self._start_waiting()
        self._settle(ticket)

    def _settle(self, ticket: _Ticket) -> None:
        ticket.outcome.finished_s = time.perf_counter()
        ticket.transfer = ticket.pushed = None
        with self._lock:
            if ticket not in self._open:  # failed meanwhile
                return
            self._open.discard(ticket)
        ticket.done.set_result(ticket.outcome)


def _by_server(partitions: Sequence[Partition]) -> Iterator[tuple[int, list[int]]]:
    """Yield servers and which partitions, as indices, to ask them about in one frame."""
    pending: dict[int, list[int]] = {}
    numel: Counter[int] = Counter()
    for i, partition in enumerate(partitions):
        server = partition.owner
        if numel[server] and 4 * (numel[server] + partition.numel) > QUESTION_NBYTES:
            yield server, pending.pop(server)
            numel[server] = 0
        pending.setdefault(server, []).append(i)
        numel[server] += partition.numel
    yield from pending.items()


def _about(partitions: Sequence[Partition], rates: Mapping[str, float], loss_scale: float, step: int) -> Residuals:
    return Residuals(
        names=[p.name for p in partitions],
        offsets=[p.offset for p in partitions],
        numels=[p.numel for p in partitions],
        rates=[float(rates.get(p.name, 0.0)) for p in partitions],
        loss_scale=float(loss_scale),
        step=step,
    )
