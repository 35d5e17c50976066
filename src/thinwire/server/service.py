"""What a server does, without its sockets: rounds of contents, sessions of workers, and who is told what.

Every content goes through explicit rounds. A push or a pull names its round; the result of a round is kept until every
worker has pulled it, so that a fast worker that is a round ahead overwrites nothing that a slow one still has to pull.

Two kinds of threads meet here. One receives frames and calls `receive`, which is short. Some others call `work`, which
decodes and encodes, for contents that are pinned to them. What is to be sent is handed to `send` by either.
"""

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.aggregators import BufferPool
from thinwire.errors import ThinwireError, WireError
from thinwire.plan import first_difference
from thinwire.server.content import Content, parse_content
from thinwire.server.lines import FewLines
from thinwire.server.mean import Mean, Store, Units
from thinwire.server.protocol import (
    AND_PULL,
    Clocks,
    Failure,
    Hello,
    Kind,
    Residuals,
    Welcome,
    check_request,
    unpack_values,
)
from thinwire.wire import ALIGNMENT, Data, Frame, digest_of, parse_frame

Peer = Hashable  # how the transport calls one connection
Send = Callable[[Peer, bytes, Data], None]  # header and payload of a frame
Order = Literal["rank", "arrival"]
OnWorkerLoss = Literal["fail", "continue"]

MAX_RAW_NBYTES = 1 << 37  # of all contents of a session: what one run may make a server allocate


class RefusedError(ThinwireError):
    """A frame that is not taken; counted by its reason, and otherwise without effect."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceOptions:
    """How a server serves.

    Attributes:
        num_workers: how many belong to a run.
        server, num_servers: which of how many servers this is.
        order: "rank": contributions are added in the order of ranks, so that runs repeat to the bit; "arrival": as
            they come.
        on_worker_loss: "fail": all others get an error that names it; "continue": rounds go on with those present, and
            the mean is over them.
        heartbeat_timeout_s: a worker that says nothing for so long is lost.
        threads: engine threads, over which contents are dealt by estimated work.
    """

    num_workers: int
    server: int = 0
    num_servers: int = 1
    order: Order = "rank"
    on_worker_loss: OnWorkerLoss = "fail"
    heartbeat_timeout_s: float = 30.0
    threads: int = 1


@dataclass(slots=True)
class _Worker:
    peer: Peer
    rank: int
    last_heard_s: float
    clock: int = 0
    left: bool = False  # said BYE


@dataclass(slots=True)
class _Result:
    frame: Frame  # the same to all
    header: bytes  # of it: its checksum is the dearest part of an answer
    waiting: set[int]  # ranks that have not pulled it


@dataclass(slots=True, eq=False)
class Served:
    """One content and its rounds.

    Attributes:
        digest: by which frames name it.
        session: in which it was declared.
        content: what it is.
        thread: the engine thread that it is pinned to.
        mean: does the arithmetic; touched by that thread, only. None while others hold its partitions.
        is_new: whether `mean` has no result yet: those that held its partitions before may hold them still.
        round: the round that is being gathered.
        arrived: payloads of this round that are not added yet, by rank, with the frame that owns the memory.
        added: ranks whose payloads are.
        pulls: ranks that wait for the result of this round.
        results: of rounds before, as long as somebody has to pull them.
        busy: whether the thread is at work on it, or knows that it should be.
    """

    digest: int
    session: int
    content: Content
    thread: int
    mean: Mean | None = None
    is_new: bool = True
    round: int = 0
    arrived: dict[int, Data] = field(default_factory=dict[int, Data])
    added: set[int] = field(default_factory=lambda: set())
    pulls: set[int] = field(default_factory=lambda: set())
    results: dict[int, _Result] = field(default_factory=dict[int, _Result])
    busy: bool = False


def _is_idle(served: Served) -> bool:
    return not (served.busy or served.arrived or served.added)


def _awaited(served: Served) -> set[int]:
    """Return the ranks whose part its round still lacks: all of a node whose leader has not pushed."""
    pushed, sizes = served.arrived.keys() | served.added, served.content.stands_for
    return {rank for first in sizes.keys() - pushed for rank in range(first, first + sizes[first])}


class Service:
    """Serves one run after another. See the module's docstring for its threads.

    Args:
        options: how.
        send: takes a frame's header and payload for a peer; must not block.
        wake: called when `work(served)` has something to do; by default it is done at once.

    Attributes:
        refused: frames that were not taken, by reason.
        counts: frames and bytes that were, by what they are.
    """

    def __init__(self, options: ServiceOptions, send: Send, wake: Callable[[Served], None] | None = None) -> None:
        self.options = options
        self.refused: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.store = Store()
        self.loads = [0] * options.threads  # estimated work of a round, by thread
        self._send, self._wake = send, wake or self.work
        self._lines = FewLines()
        self._buffers = BufferPool()
        self._lock = threading.RLock()
        self._session = 0
        self._plan: list[str] = []
        self._workers: dict[int, _Worker] = {}
        self._lost: set[int] = set()
        self._served: dict[int, Served] = {}
        self._raw_nbytes = 0
        self._failure: Failure | None = None
        self._finished_rounds = 0

    # --- frames (one thread) ----------------------------------------------------------------------------------------

    def receive(self, peer: Peer, header: Data, payload: Data, now_s: float | None = None) -> None:
        """Take one frame. What cannot be taken is counted and named, and has no other effect.

        A known worker whose bytes were damaged is told so: what it sent is lost, and its round would never end.
        """
        now_s = time.monotonic() if now_s is None else now_s
        worker = self._worker_of(peer)
        try:
            self._take(peer, worker, parse_frame(header, payload), now_s)
        except RefusedError as refusal:
            self._note(worker, refusal, now_s)
        except WireError as error:
            self.refuse(peer, error, now_s)
        except Exception as error:  # ours: workers must not wait for a server that died of it
            logging.getLogger("thinwire").exception("a frame was not foreseen")
            self.refuse(peer, WireError(f"{type(error).__name__}: {error}"), now_s)

    def refuse(self, peer: Peer, error: WireError, now_s: float | None = None) -> None:
        """Refuse what came from a peer and is no frame at all, as `receive` does with one that is damaged."""
        now_s = time.monotonic() if now_s is None else now_s
        self._note(self._worker_of(peer), RefusedError("malformed", str(error)), now_s)

    def _note(self, worker: _Worker | None, refusal: RefusedError, now_s: float) -> None:
        self.refused[refusal.reason] += 1
        who = "an unknown peer" if worker is None else f"worker {worker.rank}"
        level = logging.INFO if refusal.reason == "busy" else logging.WARNING
        if (left_out := self._lines.admit(refusal.reason, now_s)) is not None:
            more = f" (and {left_out} more of this kind)" if left_out else ""
            logging.getLogger("thinwire").log(level, "refused a frame of %s: %s%s", who, refusal, more)
        if worker is not None and worker in self._present() and refusal.reason in ("malformed", "content"):
            self.fail(Failure("refused", f"server {self._name}: what worker {worker.rank} sent: {refusal}"))

    @property
    def _name(self) -> str:
        return f"{self.options.server} of {self.options.num_servers}"

    def _worker_of(self, peer: Peer) -> _Worker | None:
        return next((worker for worker in self._workers.values() if worker.peer == peer), None)

    def _take(self, peer: Peer, worker: _Worker | None, frame: Frame, now_s: float) -> None:
        if frame.kind == Kind.HELLO:
            self._hello(peer, frame, now_s)
            return
        if worker is None or frame.session != self._session or frame.sender != worker.rank:
            raise RefusedError(
                "foreign", f"session {frame.session:016x}, rank {frame.sender}: not of this run, or not from there"
            )
        if worker.rank in self._lost or worker.left:
            if (
                frame.kind == Kind.HEARTBEAT and worker.rank in self._lost
            ):  # it waits for an answer, and should not blame this server
                gone = Failure("lost", f"worker {worker.rank} was taken for lost before (seen by server {self._name})")
                self._tell(peer, self._frame(Kind.ERROR, payload=gone.pack()))
            raise RefusedError("late", f"worker {worker.rank} has left this run, or was taken for lost")
        worker.last_heard_s = now_s
        worker.clock = max(worker.clock, frame.clock)
        if self._failure is not None and frame.kind != Kind.BYE:
            if frame.kind != Kind.HEARTBEAT:
                raise RefusedError("late", "the run is over")
            self._tell(peer, self._frame(Kind.ERROR, payload=self._failure.pack()))
            return
        check_request(frame)
        match frame.kind:
            case Kind.HEARTBEAT:
                self._tell(peer, self._frame(Kind.HEARTBEAT, payload=Clocks(self.clocks()).pack()))
            case Kind.DECLARE:
                self._declare(frame)
            case Kind.PUSH:
                self._push(worker.rank, frame)
            case Kind.PULL:
                self._pull(worker, frame)
            case Kind.GET | Kind.PUT:
                self._residuals(worker, frame)
            case Kind.BYE:
                self._bye(worker, frame)
            case kind:
                raise RefusedError("malformed", f"expected a frame that workers send, got kind {kind}")

    def _hello(self, peer: Peer, frame: Frame, now_s: float) -> None:
        options = self.options
        hello = Hello.parse(frame.payload)
        rank, plan = hello.rank, hello.plan.split("\n")
        other, kind = frame.session != self._session, "plan"
        if not other and (rank in self._workers or self._worker_of(peer) is not None):
            raise RefusedError("duplicate", f"worker {rank} has said hello before")
        if not other and len(self._workers) == options.num_workers:
            raise RefusedError("foreign", f"expected no hello of {rank}: all workers of this run have said theirs")
        try:
            if (hello.world_size, hello.server, hello.num_servers) != (
                options.num_workers,
                options.server,
                options.num_servers,
            ):
                raise WireError(
                    f"expected {options.num_workers} workers and server {self._name}, got a worker of "
                    f"{hello.world_size} for server {hello.server} of {hello.num_servers}: start servers with "
                    "--num-workers and --server-index as in attach(servers=...)"
                )
            if not 0 <= rank < options.num_workers or rank != frame.sender or not frame.session:
                raise WireError(f"expected a rank below {options.num_workers} and a session, got {rank}")
            if other and not self.is_over:
                kind = "busy"
                raise WireError("another run is under way here: end it, or start servers of its own")
            if not other and self._failure is not None:
                raise WireError(self._failure.message)
            if not other and self._plan != plan:
                first = min(self._workers)
                difference = first_difference([self._plan, plan]) or ""
                difference = difference.replace("rank 0", f"worker {first}").replace("rank 1", f"worker {rank}")
                raise WireError(f"workers have different plans: {difference}")
        except WireError as error:
            failure = Failure(kind, f"server {self._name}: {error}")
            self._tell(
                peer, dataclasses.replace(self._frame(Kind.ERROR, payload=failure.pack()), session=frame.session)
            )
            if not other:
                self.fail(failure)
            raise RefusedError(kind, str(error)) from None
        if other:
            self._open(frame.session, plan)
        with self._lock:  # engine threads and metrics go through them
            self._workers[rank] = _Worker(peer, rank, now_s)
        if len(self._workers) == options.num_workers:
            welcome = Welcome(options.on_worker_loss)
            for worker in self._workers.values():
                self._tell(worker.peer, self._frame(Kind.WELCOME, payload=welcome.pack()))

    @property
    def is_over(self) -> bool:
        """Whether no run is under way: none has begun, it failed, or all workers have left."""
        return self._failure is not None or not self._present()

    def _present(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if not worker.left and worker.rank not in self._lost]

    def _open(self, session: int, plan: list[str]) -> None:
        """Begin a run, with nothing of the one before."""
        with self._lock:
            self._session, self._plan, self._failure = session, plan, None
            self._workers, self._lost, self._served = {}, set(), {}
            self.store, self._raw_nbytes, self.loads = Store(), 0, [0] * self.options.threads

    def _declare(self, frame: Frame) -> None:
        text = bytes(frame.payload).decode(errors="replace")
        digest = digest_of(text)
        if digest != frame.content:
            raise RefusedError("content", f"expected the text of content {frame.content:016x}, got {digest:016x}")
        if digest in self._served:  # another worker was first
            return
        try:
            content = parse_content(text, self.options.num_workers)
            with self._lock:  # engine threads go through them
                served = Served(digest, frame.session, content, self.loads.index(min(self.loads)))
                self._hold(served)
                self._served[digest] = served
        except (WireError, RuntimeError) as error:  # RuntimeError: no memory
            raise RefusedError("content", str(error)) from None

    def _push(self, rank: int, frame: Frame) -> None:
        served, nbytes = self._of(frame, rank), memoryview(frame.payload).nbytes
        with self._lock:
            self._check_round(served, rank, frame, done=rank in served.added or rank in served.arrived)
        if nbytes != served.content.push_nbytes:
            raise RefusedError("malformed", f"push: expected {served.content.push_nbytes} bytes, got {nbytes}")
        with self._lock:
            served.arrived[rank] = frame.payload
            if frame.flags & AND_PULL:
                served.pulls.add(rank)
            self.counts["pushes"] += 1
            self.counts["pushed_nbytes"] += nbytes
        self._lose_who_left()
        self._work_soon(served)

    def _pull(self, worker: _Worker, frame: Frame) -> None:
        served = self._of(frame, worker.rank)
        with self._lock:
            result = served.results.get(frame.round)
            if result is not None and worker.rank in result.waiting:
                self._answer(served, frame.round, worker.rank)
                return
            self._check_round(served, worker.rank, frame, done=worker.rank in served.pulls)
            served.pulls.add(worker.rank)

    def _of(self, frame: Frame, rank: int) -> Served:
        served = self._served.get(frame.content)
        if served is None:
            raise RefusedError("content", f"content {frame.content:016x} was not declared")
        if rank not in served.content.stands_for:
            raise RefusedError("content", f"content {frame.content:016x} is for leaders of nodes, not for {rank}")
        return served

    @staticmethod
    def _check_round(served: Served, rank: int, frame: Frame, *, done: bool) -> None:
        what = f"{Kind(frame.kind).name.lower()} of worker {rank} for round {frame.round}"
        if frame.round < served.round:
            raise RefusedError("late", f"{what}: round {served.round} is under way")
        if frame.round > served.round:
            raise RefusedError("out of order", f"{what}: round {served.round} is under way")
        if done:
            raise RefusedError("duplicate", f"{what}: it came before")

    def _residuals(self, worker: _Worker, frame: Frame) -> None:
        """Give or take residuals. Workers ask between steps: a round may have begun, but ends when they have pushed."""
        try:
            text, values = (frame.payload, b"") if frame.kind == Kind.GET else unpack_values(frame.payload)
            about = Residuals.parse(text)
            about.check()
            numel = sum(about.numels)
            if frame.kind == Kind.PUT and memoryview(values).nbytes != 4 * numel:
                raise WireError(f"expected {numel} values, got {memoryview(values).nbytes} bytes")
            places = list(zip(about.names, about.offsets, strict=True))
            if frame.kind == Kind.GET:
                out = torch.empty(numel, dtype=torch.float32)
                for place, one, rate in zip(places, out.split(about.numels), about.rates, strict=True):
                    self.store.read(place, one, loss_scale=about.loss_scale, step=about.step, rate=rate or None)
                payload = memoryview(out.numpy())  # pyright: ignore[reportArgumentType]  # as below
            else:
                found = as_tensor(values).view(torch.float32) if numel else torch.empty(0)
                if not bool(found.isfinite().all()):
                    raise WireError("expected residuals that are finite, got others")
                for place, one, rate in zip(places, found.split(about.numels), about.rates, strict=True):
                    self.store.write(place, one, Units(loss_scale=about.loss_scale, rate=rate or None))
                payload = b""
        except WireError as error:
            raise RefusedError("content", str(error)) from None
        self._tell(worker.peer, self._frame(Kind.KEPT, round_=frame.round, payload=payload))

    def _bye(self, worker: _Worker, frame: Frame) -> None:
        gave_up = Failure.parse(frame.payload) if memoryview(frame.payload).nbytes else None
        worker.left = True
        if self._failure is not None:
            return
        if gave_up is not None:
            self.lose([worker.rank], f"gave up: {gave_up.message}")
        else:
            self._lose_who_left()

    # --- losses -----------------------------------------------------------------------------------------------------

    def clocks(self) -> list[int]:
        """Return how many exchanges every worker has begun, by rank; -1 for one that is not there."""
        with self._lock:
            present = {rank: worker.clock for rank, worker in self._workers.items() if rank not in self._lost}
        return [present.get(rank, -1) for rank in range(self.options.num_workers)]

    def check_heartbeats(self, now_s: float | None = None) -> None:
        """Take workers that have been silent for too long for lost. Call every now and then, where `receive` is."""
        now_s = time.monotonic() if now_s is None else now_s
        limit = self.options.heartbeat_timeout_s
        silent = [
            worker.rank
            for worker in self._workers.values()
            if not worker.left and worker.rank not in self._lost and now_s - worker.last_heard_s > limit
        ]
        if silent and self._failure is None:
            self.lose(silent, f"said nothing for {limit:g} s")

    def _lose_who_left(self) -> None:
        """Take workers that have closed their links for lost if a round waits for them: their part will never come."""
        gone = {worker.rank for worker in self._workers.values() if worker.left} - self._lost
        if not gone:
            return
        with self._lock:
            begun = [served for served in self._served.values() if served.arrived or served.added]
            awaited = gone & set[int]().union(*map(_awaited, begun))
        if awaited:
            self.lose(sorted(awaited), "closed its link while others go on")

    def lose(self, ranks: Iterable[int], why: str) -> None:
        """Go on without these workers, or end the run, as `on_worker_loss` says."""
        ranks = list(ranks)
        names = ", ".join(map(str, ranks))
        self._lost.update(ranks)
        self.counts["lost_workers"] += len(ranks)
        logging.getLogger("thinwire").warning("worker %s %s", names, why)
        if self.options.on_worker_loss == "fail":
            self.fail(Failure("lost", f"worker {names} {why} (seen by server {self._name})"))
            return
        for served in self._served.values():
            with self._lock:
                served.pulls.difference_update(ranks)
                for round_ in list(served.results):
                    self._pulled(served, round_, ranks)
            self._work_soon(served)

    def fail(self, failure: Failure) -> None:
        """End the run: every worker that is still there gets an error, now and whatever it asks later."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            for served in self._served.values():
                served.arrived.clear()
                served.results.clear()
        for worker in self._present():
            self._tell(worker.peer, self._frame(Kind.ERROR, payload=failure.pack()))

    def stop(self) -> None:
        """Tell workers that are still there that this server ends."""
        if not self.is_over:
            names = ", ".join(str(worker.rank) for worker in self._present())
            self.fail(
                Failure(
                    "stopped",
                    f"server {self._name} was stopped while it had worker {names}; start it again, attach anew, and "
                    "load the last state",
                )
            )

    def unread(self, peer: Peer) -> None:
        """Take note that a peer does not read: what it was to be told is dropped, and a worker lost."""
        self.counts["unread"] += 1
        worker = self._worker_of(peer)
        if worker is not None and worker in self._present() and self._failure is None:
            self.lose([worker.rank], "does not read what it is sent")

    # --- rounds (the thread that a content is pinned to) ------------------------------------------------------------

    def _work_soon(self, served: Served) -> None:
        with self._lock:
            if served.busy or not self._has_work(served):
                return
            served.busy = True
        self._wake(served)

    def missing(self, served: Served) -> int:
        """Return how many contributions its round still waits for: what is nearest to completion goes first."""
        expected = sum(rank not in self._lost for rank in served.content.stands_for)
        return expected - len(served.added) - len(served.arrived)

    def work(self, served: Served) -> None:
        """Add all that has come and is next in order; if that was the last, publish the round's result."""
        try:
            while True:
                with self._lock:
                    if served.session != self._session:  # its run is over, and another one has begun
                        return
                    rank = self._next(served)
                    payload = None if rank is None else served.arrived.pop(rank)
                    if rank is not None:
                        served.added.add(rank)
                    complete = rank is None and self._is_complete(served)
                    if rank is None and not complete:
                        served.busy = False
                        return
                    mean = served.mean or self._hold(served)
                if complete:
                    self._publish(served, mean.close())
                    continue
                assert rank is not None
                assert payload is not None
                try:
                    mean.add(rank, as_tensor(payload))
                except WireError as error:
                    self.refused["malformed"] += 1
                    raise WireError(f"what worker {rank} pushed: {error}") from None
        except Exception as error:  # whatever it is, workers must not wait for the result for ever
            if not isinstance(error, WireError):
                logging.getLogger("thinwire").exception("a round failed")
            with self._lock:
                if served.session == self._session:
                    self.fail(Failure("refused", f"server {self._name}: {error}"))

    def _has_work(self, served: Served) -> bool:
        return self._failure is None and (self._next(served) is not None or self._is_complete(served))

    def _next(self, served: Served) -> int | None:
        """Return whose contribution is added next, if it is here."""
        if self._failure is not None or not served.arrived:
            return None
        if self.options.order == "arrival":
            return next(iter(served.arrived))
        first, missing = min(served.arrived), served.content.stands_for.keys() - self._lost - served.added
        return None if any(rank < first for rank in missing) else first

    def _is_complete(self, served: Served) -> bool:
        if self._failure is not None or served.arrived or not served.added:
            return False
        return all(rank in served.added or rank in self._lost for rank in served.content.stands_for)

    def _publish(self, served: Served, data: Tensor) -> None:
        payload = memoryview(data.numpy())  # pyright: ignore[reportArgumentType]  # numpy's stubs hide its buffer
        frame = self._frame(Kind.MEAN, content=served.digest, round_=served.round, payload=payload)
        header = frame.header()
        with self._lock:
            if self._failure is not None or served.session != self._session:
                return
            pulling = {rank for rank, worker in self._workers.items() if not worker.left} - self._lost
            present = pulling & served.content.stands_for.keys()
            served.results[served.round] = _Result(frame, header, present)
            self._finished_rounds += 1
            self.counts["rounds"] += 1
            if served.is_new:
                served.is_new = False
                self._drop_others(served)
            waiting = sorted(served.pulls & present)  # one may be lost, or have left, meanwhile
            done, served.round = served.round, served.round + 1
            served.added, served.pulls = set(), set()
            for rank in waiting:
                self._answer(served, done, rank)

    def _drop_others(self, served: Served) -> None:
        """Give back the memory of contents with the same partitions: DDP has made other buckets, or a phase begins."""
        places = served.content.places_in_model
        for other in self._served.values():
            if other is served or other.mean is None or not _is_idle(other):
                continue
            if not places.isdisjoint(other.content.places_in_model):
                other.mean = None
                self._count(other, -1)

    def _hold(self, served: Served) -> Mean:
        """Give a content its memory."""
        nbytes = served.content.raw_nbytes
        if self._raw_nbytes + nbytes > MAX_RAW_NBYTES:
            raise WireError(
                f"content: expected at most {MAX_RAW_NBYTES} bytes of gradients in all, got {nbytes} beside "
                f"{self._raw_nbytes}"
            )
        served.mean, served.is_new = Mean(served.content, self.store, self._buffers), True
        self._count(served, 1)
        return served.mean

    def _count(self, served: Served, sign: int) -> None:
        """Note what a content takes of this server as long as it has memory."""
        self._raw_nbytes += sign * served.content.raw_nbytes
        self.loads[served.thread] += sign * served.content.work

    def _answer(self, served: Served, round_: int, rank: int) -> None:
        """Send a result to a worker; the last to get it lets it go."""
        result = served.results[round_]
        self._send(self._workers[rank].peer, result.header, result.frame.payload)
        self.counts["pulls"] += 1
        self.counts["pulled_nbytes"] += memoryview(result.frame.payload).nbytes
        self._pulled(served, round_, [rank])

    def _tell(self, peer: Peer, frame: Frame) -> None:
        self._send(peer, frame.header(), frame.payload)

    @staticmethod
    def _pulled(served: Served, round_: int, ranks: Iterable[int]) -> None:
        result = served.results[round_]
        result.waiting.difference_update(ranks)
        if not result.waiting:
            del served.results[round_]

    def _frame(self, kind: Kind, *, content: int = 0, round_: int = 0, payload: Data = b"") -> Frame:
        return Frame(
            kind=kind,
            session=self._session,
            content=content,
            round=round_,
            clock=self._finished_rounds,
            sender=self.options.server,
            payload=payload,
        )


def as_tensor(payload: Data) -> Tensor:
    """Return the bytes as a uint8 tensor that kernels can read; a copy only where they are not aligned."""
    array = np.frombuffer(payload, np.uint8)
    if not array.flags.writeable or array.ctypes.data % ALIGNMENT:
        array = array.copy()
    return torch.from_numpy(array)
