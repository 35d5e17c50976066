"""Drivers over torch.distributed process groups: one that blocks, and one that overlaps.

Blocks travel over a `Mesh` where every rank has the compiled module, else over gloo; all-reduces always by gloo. Both
match what is sent and received by order alone, so two rounds that are issued in another order on another rank would
swap their data, silently with gloo. Hence *lanes*, each a thread with connections of its own: even round numbers have a
few and odd ones others, messages take them in turn, and a lane runs its rounds strictly in the order of (message, round
number). A round only waits for rounds before it in that order, so that no two lanes can wait for each other. Nothing is
ever issued from a future's callback, and no callback waits.
"""

# torch.distributed annotates few of its parameters.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportPrivateImportUsage=false

import contextlib
import datetime
import functools
import hashlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.lane import Lane
from thinwire.comm.liveness import Liveness
from thinwire.comm.local import check_round
from thinwire.comm.mesh import Mesh, MeshClosedError, agree_on_pieces, choose
from thinwire.comm.nccl import Nccl
from thinwire.comm.node_round import NodeRound
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Exchange, Pull, Push, Round, SendRecv, Transfer, cut
from thinwire.comm.tracing import span
from thinwire.errors import AttachError, ScheduleError
from thinwire.wire import split

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's own for gloo


DEPTH = 6  # exchanges under way at once
SERVED_DEPTH = 16  # likewise through parameter servers, whose answers wait for all workers
LEAVE_S = 0.5  # for a lane to end, after an error
SMALL_NBYTES = 8192  # below this a block costs more in waiting than in bytes


def perform(transfer: Transfer, group: dist.ProcessGroup, mesh: Mesh | Nccl | None = None) -> None:
    """Do one round, over the mesh if there is one, and return when the bytes are here."""
    if isinstance(mesh, Nccl):
        mesh.perform(transfer)
        return
    rank, world_size = group.rank(), group.size()
    match transfer.round:
        case SendRecv() | NodeRound() as moves:
            _send_recv(transfer, moves, group, mesh)
        case AllToAll(nbytes) if mesh is not None:
            _over_mesh(transfer, list(nbytes), [nbytes[rank]] * world_size, mesh)
        case AllGather(nbytes) if mesh is not None:
            _over_mesh(transfer, [nbytes[rank]] * world_size, list(nbytes), mesh)
        case AllToAll(nbytes):
            _exchange(split(transfer.send, nbytes), split(transfer.receive, [nbytes[rank]] * world_size), group)
        case AllGather(nbytes):
            _exchange([transfer.send] * world_size, split(transfer.receive, nbytes), group)
        case AllReduce(op=op):
            reduce = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            group.allreduce([transfer.send], reduce).wait()
            if transfer.receive is not transfer.send:
                transfer.receive.copy_(transfer.send)
        case Push() | Pull() as served:
            raise ScheduleError(f"expected rounds between ranks, got {type(served).__name__}, which needs servers")


def _over_mesh(transfer: Transfer, send_nbytes: list[int], receive_nbytes: list[int], mesh: Mesh) -> None:
    """Move the blocks by their addresses, once it is sure that they lie within the buffers."""
    send, receive = transfer.send, transfer.receive
    gather = isinstance(transfer.round, AllGather)
    wanted = (send_nbytes[mesh.rank] if gather else sum(send_nbytes), sum(receive_nbytes))
    fit = (send.nbytes, receive.nbytes) == wanted and len(send_nbytes) == len(receive_nbytes) == mesh.world_size
    if not (fit and send.is_cpu and receive.is_cpu and send.is_contiguous() and receive.is_contiguous()):
        raise ScheduleError(
            f"expected {wanted} bytes in contiguous buffers on the CPU, got {send.nbytes} and {receive.nbytes}"
        )
    start = send.data_ptr()
    starts = [start] * mesh.world_size if gather else _starts(start, send_nbytes)
    mesh.exchange(
        starts, send_nbytes, _starts(receive.data_ptr(), receive_nbytes), receive_nbytes, free_nbytes=SMALL_NBYTES
    )


def _send_recv(transfer: Transfer, moves: SendRecv | NodeRound, group: dist.ProcessGroup, mesh: Mesh | None) -> None:
    """Cut the moves of this rank out of the buffers, then send and receive them all at once: each rank has few."""
    world_size = group.size()
    sends, receives = cut(transfer, moves, group.rank())
    if mesh is None:
        started = [group.recv([data], source, 0) for source, data in enumerate(receives) if data.numel()]
        started += [group.send([data], target, 0) for target, data in sends.items() if data.numel()]
        for work in started:
            work.wait()
        return
    if not all(data.is_cpu and data.is_contiguous() for data in (*sends.values(), *receives)):
        raise ScheduleError("expected contiguous buffers on the CPU")
    nothing, sizes = transfer.receive.data_ptr(), [data.nbytes for data in receives]
    to = [sends[target].data_ptr() if target in sends else nothing for target in range(world_size)]
    to_nbytes = [sends[target].nbytes if target in sends else 0 for target in range(world_size)]
    mesh.exchange(to, to_nbytes, [data.data_ptr() for data in receives], sizes, free_nbytes=2**31)


def _starts(address: int, sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes[:-1], initial=address))


def _exchange(sends: Sequence[Tensor], receives: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send sends[r] to rank r and fill receives[r] from it, for every r.

    In shift order: at distance i a rank sends to rank + i and waits for rank - i, so that every link carries about one
    flow at a time. All at once, as gloo's own all-to-all does it, flows share links unevenly and the slowest decides:
    four hosts at 100 Mbit/s then fill little more than half of the wire. Gloo's collectives also run in a thread of
    gloo's own, which may be the last to hold our tensors when the interpreter is gone, and then aborts the program.
    """
    rank, world_size = group.rank(), group.size()
    receives[rank].copy_(sends[rank])
    started: list[dist.Work] = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        incoming = group.recv([receives[source]], source, 0)
        started.append(group.send([sends[target]], target, 0))
        if receives[source].numel() > SMALL_NBYTES:
            incoming.wait()
        else:
            started.append(incoming)
    for work in started:
        work.wait()


@dataclass(slots=True)
class Outcome:
    """What an exchange cost, once it is done.

    Attributes:
        sent_nbytes: payload bytes that left this rank.
        num_collectives: collectives issued.
        transport_s: wall seconds inside collectives, waiting included.
        finished_s: `time.perf_counter()` at the end.
    """

    sent_nbytes: int = 0
    num_collectives: int = 0
    transport_s: float = 0.0
    finished_s: float = 0.0


def run_blocking(exchange: Exchange, schedule: Sequence[Round], group: dist.ProcessGroup) -> Outcome:
    """Run an exchange in the calling thread.

    Raises:
        ScheduleError: it yields other rounds than its schedule.
    """
    outcome, rank = Outcome(), dist.get_rank(group)
    for position, transfer in enumerate(exchange):
        check_round(transfer.round, schedule[position] if position < len(schedule) else None, position, rank)
        _timed(transfer, group, None, rank, outcome, "")
    if outcome.num_collectives < len(schedule):
        check_round(None, schedule[outcome.num_collectives], outcome.num_collectives, rank)
    outcome.finished_s = time.perf_counter()
    return outcome


def _timed(
    transfer: Transfer, group: dist.ProcessGroup, mesh: Mesh | Nccl | None, rank: int, outcome: Outcome, name: str
) -> None:
    sent_nbytes, kind = transfer.round.sent_nbytes(rank), type(transfer.round).__name__
    with span("transport", f"{name} {kind}", round=outcome.num_collectives, sent_nbytes=sent_nbytes):
        started = time.perf_counter()
        perform(transfer, group, mesh)
        outcome.transport_s += time.perf_counter() - started
    outcome.sent_nbytes += sent_nbytes
    outcome.num_collectives += 1


@dataclass(slots=True, eq=False)
class _Ticket:
    """One exchange on its way through the lanes. Touched by one thread at a time: a pool thread, then a lane, ..."""

    exchange: Exchange
    schedule: tuple[Round, ...]
    name: str
    done: Future[Outcome] = field(default_factory=lambda: Future[Outcome]())
    outcome: Outcome = field(default_factory=Outcome)
    position: int = 0
    transfer: Transfer | None = None
    # One per round: set when the round's transfer is ready (or will never be, after an error).
    ready: list[threading.Event] = field(default_factory=lambda: [])


class OverlappedDriver:
    """Runs many exchanges at once: one is encoded while another is on the wire and a third is decoded.

    At most `depth` exchanges are under way; the next starts when one ends, which bounds work memory. After an error
    every exchange, present or future, fails with it: ranks would no longer agree on what comes next.

    Args:
        group: the ranks that take part; its own collectives are never touched.
        lane_sets: round r of a schedule takes a lane of set r modulo this.
        lanes: in each set; two keep the wire busy while one waits for the slowest peer.
        workers: threads that encode and decode; as many as `depth` where they wait for a device.
        depth: exchanges under way at once.
        timeout: of each collective; None for torch's default.
        device: where the values lie; with THINWIRE_TRANSPORT=nccl a GPU's memories exchange blocks by themselves, over
            one lane: `on_device`.

    Creating and closing one is collective: every rank of `group` must do it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        lane_sets: int = 2,
        lanes: int = 2,
        workers: int = 1,
        depth: int = DEPTH,
        timeout: datetime.timedelta | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self._depth = depth
        self._lock = threading.Lock()
        self._waiting: deque[_Ticket] = deque()
        self._open: set[_Ticket] = set()  # submitted and not done
        self._under_way = 0
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="thinwire-codec")
        ranks = dist.get_process_group_ranks(group)
        store = own_store(ranks, self.rank)
        self._liveness = Liveness(store, ranks, self.rank, self.fail)
        weakref.finalize(self, self._liveness.stop)  # its thread would keep it, were the driver dropped unclosed
        self._lanes: list[list[Lane]] = []
        transport = choose(store, ranks, self.rank, on_gpu=device is not None and device.type == "cuda")
        timeout = timeout or DEFAULT_TIMEOUT
        self.on_device = transport == "nccl"
        if self.on_device:
            assert device is not None
            control = own_group(dist.PrefixStore("control", store), self.rank, len(ranks), timeout)
            nccl = Nccl(dist.PrefixStore("nccl", store), ranks, self.rank, device, timeout)
            self._lanes.append([Lane(control, nccl, "thinwire-nccl")])
            return
        for position in range(lane_sets):
            self._lanes.append([])
            for name in (f"lane-{position}-{lane}" for lane in range(lanes)):
                group = own_group(dist.PrefixStore(name, store), self.rank, len(ranks), timeout)
                mesh_store = dist.PrefixStore(f"{name}-mesh", store)
                mesh = Mesh(mesh_store, ranks, self.rank, timeout, name) if transport == "mesh" else None
                self._lanes[-1].append(Lane(group, mesh, f"thinwire-{name}"))
        meshes = [lane.mesh for each in self._lanes for lane in each if isinstance(lane.mesh, Mesh)]
        if meshes and len(ranks) > 1:
            agree_on_pieces(meshes, store)

    def submit(self, exchange: Exchange, schedule: tuple[Round, ...], name: str = "") -> "Future[Outcome]":
        """Queue an exchange; call in the same order on every rank. Traces call it by its name.

        Returns:
            A future of its `Outcome`. It carries the error, whatever its type, if this or an earlier exchange failed.
        """
        if not self._lanes:
            raise AttachError("the link is closed: attach again, to a freshly wrapped model, to go on training")
        ticket = _Ticket(exchange, schedule, name, ready=[threading.Event() for _ in schedule])
        with self._lock:
            if self._error is not None:
                ticket.done.set_exception(self._error)
                return ticket.done
            turn = self._liveness.begun
            self._liveness.begun += 1
            for position in range(len(schedule)):
                lanes = self._lanes[position % len(self._lanes)]
                lane = lanes[turn % len(lanes)]
                lane.submit(functools.partial(self._run_round, ticket, position, lane))
            self._waiting.append(ticket)
            self._open.add(ticket)
        self._start_waiting()
        return ticket.done

    @property
    def control(self) -> dist.ProcessGroup:
        """A group of the same ranks, with CPU tensors, for agreeing before the first exchange."""
        return self._lanes[0][0].group

    def close(self) -> None:
        """Stop the threads and leave the process groups, once all submitted exchanges are done.

        After an error a lane may be waiting for a peer that gave up: it is left behind, to end with its connections.
        """
        for lane in itertools.chain.from_iterable(self._lanes):
            lane.close(None if self._error is None else LEAVE_S)
            if lane.mesh is not None:
                lane.mesh.close()
        self._pool.shutdown()
        self._liveness.close()
        self._lanes.clear()

    def _start_waiting(self) -> None:
        with self._lock:
            while self._waiting and self._under_way < self._depth:
                self._under_way += 1
                self._pool.submit(self._advance, self._waiting.popleft())

    def _advance(self, ticket: _Ticket) -> None:
        """Run an exchange up to its next round, in a pool thread."""
        try:
            with span("exchange", ticket.name, round=ticket.position):
                transfer = next(ticket.exchange, None)
            expected = ticket.schedule[ticket.position] if ticket.position < len(ticket.schedule) else None
            check_round(None if transfer is None else transfer.round, expected, ticket.position, self.rank)
        except BaseException as error:
            self.fail(error)
            return
        if transfer is not None:
            ticket.transfer = transfer
            ticket.ready[ticket.position].set()
            return
        ticket.outcome.finished_s = time.perf_counter()
        with self._lock:
            self._under_way -= 1
            self._open.discard(ticket)
        self._start_waiting()
        ticket.done.set_result(ticket.outcome)

    def _run_round(self, ticket: _Ticket, position: int, lane: Lane) -> None:
        """Perform one round, in the lane's thread."""
        with span("wait", ticket.name, round=position):
            ticket.ready[position].wait()
        if self._error is not None:
            self._settle(ticket, self._error)
            return
        transfer, ticket.transfer = ticket.transfer, None
        assert transfer is not None
        try:
            _timed(transfer, lane.group, lane.mesh, self.rank, ticket.outcome, ticket.name)
        except MeshClosedError as error:
            self.fail(error)  # no news: the exchange has failed before, or the program ends
            return
        except BaseException as error:
            during = f"round {position} of {ticket.name}" if ticket.name else ""
            self.fail(self._liveness.explain(error, during))
            return
        if self._error is not None:
            return  # settled meanwhile: what this round brought is of no use
        ticket.position += 1
        self._pool.submit(self._advance, ticket)

    def fail(self, error: BaseException) -> None:
        """Fail every exchange that is not done, those on the wire too.

        A peer may have given up the round that one of them waits for while it lives itself; its connections close when
        its program ends, and for that `backward` must raise there, and here. Rounds over meshes end at once.
        """
        with self._lock:
            if self._error is None:
                self._error = error
            error = self._error
            failed = list(self._open)
            self._open.clear()
            self._waiting.clear()
        for lane in itertools.chain.from_iterable(self._lanes):
            lane.interrupt()
        for ticket in failed:
            self._settle(ticket, error)

    @staticmethod
    def _settle(ticket: _Ticket, error: BaseException) -> None:
        for event in ticket.ready:
            event.set()
        with contextlib.suppress(InvalidStateError):  # two lanes may settle one ticket at the same moment
            ticket.done.set_exception(error)


def common_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default one.

    Raises:
        AttachError: there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise AttachError(
            "the process group is not initialised: call torch.distributed.init_process_group() (and wrap the model "
            "in DistributedDataParallel) before thinwire"
        )
    if group is not None:
        return group
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    return dist.group.WORLD


def own_store(ranks: Sequence[int], rank: int) -> dist.Store:
    """Return a part of the rendezvous store that only this call, on these ranks, uses. Every rank must call.

    Args:
        ranks: global ranks of the group.
        rank: this rank's place in it.
    """
    name = hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:16]
    store = dist.distributed_c10d._get_default_store()  # the public API has no way to the rendezvous store
    count = store.add(f"thinwire/{name}/count/{rank}", 1)  # equal on all ranks, as every use is collective
    return dist.PrefixStore(f"thinwire/{name}/{count}", store)


def own_group(store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Make a gloo group that torch.distributed's own registry does not know.

    The names that `torch.distributed.new_group` gives to groups of some ranks repeat once a group is destroyed, so that
    a second attach would meet the addresses of the first; and they differ between ranks that belong to different
    numbers of groups, which would never meet.
    """
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def all_gather_text(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return every rank's text, by rank. UTF-8 bytes travel, never a pickle."""
    data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    size = torch.tensor([len(text.encode())], dtype=torch.int64)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    group.allgather([sizes], [size]).wait()
    longest = max(1, *(int(s) for s in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    texts = [torch.zeros_like(padded) for _ in range(group.size())]
    group.allgather([texts], [padded]).wait()
    return [bytes(t[: int(s)].numpy()).decode() for t, s in zip(texts, sizes, strict=True)]
