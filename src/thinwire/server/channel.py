"""A worker's side of the sockets: one thread that owns them, sends frames, and hands answers to whoever waits."""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from thinwire.errors import PlanError, RankLostError, ServerError, WireError
from thinwire.server.keys import WorkerKeys
from thinwire.server.protocol import Clocks, Failure, Hello, Kind, Welcome
from thinwire.server.sockets import Wake, check_address, join, send_frame, set_up, zmq_module
from thinwire.wire import Data, Frame, parse_frame

_ERRORS: dict[str, type[Exception]] = {"plan": PlanError, "lost": RankLostError}
BUSY_S = 0.2  # between two hellos to a server that has another run
LEAVE_S = 0.5  # for the last frames to go out


@dataclass(frozen=True, slots=True)
class Awaited:
    """An answer that somebody waits for.

    Attributes:
        into: where its payload goes, (nbytes,) uint8.
        done: called, in the channel's thread, once it is there.
        since_s: when it was asked for.
    """

    into: Tensor
    done: Callable[[], None]
    since_s: float


class Channel:
    """Connections to all servers.

    Args:
        addresses: one per server.
        session: of this run.
        rank, world_size: this worker.
        keys: to authenticate and encrypt with; None on loopback.
        heartbeat_s: how often servers hear of this worker, and answer.
        heartbeat_timeout_s: a server that says nothing for so long is lost.
        timeout_s: an answer that does not come for so long is an error, even where all are alive.
        mates: the other ranks of this node, without which this one cannot go on.
        fail: called once, in the channel's thread, with what ended the run; servers have been told.

    Attributes:
        refused: frames of servers that were not taken, by reason.
        clock: how many exchanges this worker has begun; whoever begins them counts here.
        goes_on: whether a server goes on without workers that are lost; known once `hello` returns.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        session: int,
        rank: int,
        world_size: int,
        keys: WorkerKeys | None,
        heartbeat_s: float,
        heartbeat_timeout_s: float,
        timeout_s: float,
        mates: Sequence[int] = (),
        fail: Callable[[BaseException], None],
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.clock, self.goes_on = 0, False
        self._addresses, self._session, self._rank, self._world_size = list(addresses), session, rank, world_size
        self._heartbeat_s, self._heartbeat_timeout_s, self._timeout_s = heartbeat_s, heartbeat_timeout_s, timeout_s
        self._mates, self._fail = list(mates), fail
        zmq = zmq_module()
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        try:
            for address in addresses:
                self._sockets.append(self._connect(address, keys))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake, self._outbox = Wake(), deque[tuple[int, Frame]]()
        self._awaited: dict[tuple[int, int, int], Awaited] = {}
        self._lock = threading.Lock()
        self._heard_s = [time.monotonic()] * len(addresses)
        self._clocks = [0] * world_size
        self._welcomes: set[int] = set()
        self._turned_away: dict[int, tuple[float, str]] = {}  # by servers that had another run: when, and their words
        self._hello_at_s: dict[int, float] = {}  # of these, whom to ask again, and when; they hear nothing before
        self._said_s = [0.0] * len(addresses)  # when servers last heard a hello, or a heartbeat
        self._welcome, self._closed = threading.Event(), threading.Event()
        self._greeted, self._left, self._hellos = False, False, list[bytes]()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-channel", daemon=True)
        self._thread.start()

    def _connect(self, address: str, keys: WorkerKeys | None) -> Any:
        zmq = zmq_module()
        socket = self._context.socket(zmq.DEALER)
        set_up(socket, check_address(address))
        try:
            if keys is not None:
                keys.use(socket)
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ServerError(f"servers: cannot connect to {address}: {error}; expected tcp://HOST:PORT") from error
        return socket

    # --- any thread -------------------------------------------------------------------------------------------------

    def hello(self, plan: str, timeout_s: float) -> None:
        """Present this worker to all servers; return when all workers have done so.

        Raises:
            PlanError: another worker has another plan, or a server was started for another run.
            ServerError: a server does not answer, or a worker does not come, within `timeout_s` seconds.
        """
        num = len(self._sockets)
        self._hellos = [Hello(self._rank, self._world_size, server, num, plan).pack() for server in range(num)]
        for server in range(num):
            self.send(server, Kind.HELLO, payload=self._hellos[server])
        self._greeted = True
        if not self._welcome.wait(timeout_s):
            missing = sorted(set(range(num)) - self._welcomes)
            where = ", ".join(map(self._name, missing))
            said = [self._turned_away[server] for server in missing if server in self._turned_away]
            last = f" {time.monotonic() - said[0][0]:.1f} s ago it said: {said[0][1]}" if said else ""
            raise ServerError(
                f"{where}: expected a welcome within {timeout_s:g} s; is it running, with --num-workers "
                f"{self._world_size}, --server-index {missing[0]}/{num} and our keys, and have all workers attached?"
                f"{last}"
            )
        if self._failed is not None:
            raise self._failed

    def send(
        self, server: int, kind: Kind, *, content: int = 0, round_: int = 0, payload: Data = b"", flags: int = 0
    ) -> None:
        """Queue a frame. Frames of one server leave in this order."""
        frame = Frame(
            kind=kind,
            session=self._session,
            content=content,
            round=round_,
            clock=self.clock,
            sender=self._rank,
            flags=flags,
            payload=payload,
        )
        self._outbox.append((server, frame))
        self._wake.set()

    def expect(self, server: int, content: int, round_: int, into: Tensor, done: Callable[[], None]) -> None:
        """Let the answer to a pull go to `into`. Call before it is asked for."""
        with self._lock:
            self._awaited[server, content, round_] = Awaited(into, done, time.monotonic())

    def close(self, why: str = "") -> None:
        """Say goodbye to all servers, once, and why, if this worker gives up; end the thread.

        Returns when that has left this process, which may be at its end; or `LEAVE_S` later, where a server is gone.
        """
        with self._lock:  # whoever comes second must not close before goodbyes are queued
            if not self._left:
                self._left = True
                payload = Failure("worker", why).pack() if why else b""
                for server in range(len(self._sockets)):
                    self.send(server, Kind.BYE, payload=payload)
        self._closed.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        zmq = zmq_module()
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        beat_s = 0.0
        try:
            while not self._closed.is_set():
                ready = dict(poller.poll(1000 * min(self._heartbeat_s, BUSY_S if self._hello_at_s else 0.5)))
                if self._wake.fd in ready:
                    self._wake.clear()
                while self._outbox:
                    self._send_next()
                for server, socket in enumerate(self._sockets):
                    if socket in ready:
                        self._take_all(server, socket)
                now_s = time.monotonic()
                self._hello_again(now_s)
                if now_s - beat_s >= self._heartbeat_s:
                    beat_s = now_s
                    if self._welcome.is_set():
                        self._check(now_s)
                for server, said_s in enumerate(self._said_s if self._greeted and not self._left else ()):
                    if now_s - said_s >= self._heartbeat_s and server not in self._hello_at_s:
                        self._said_s[server] = now_s
                        self.send(server, Kind.HEARTBEAT)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._end(error)
        finally:
            while self._outbox:  # goodbyes: a server that cannot be told keeps none from the others
                with contextlib.suppress(Exception):
                    self._send_next()
            for socket in self._sockets:
                socket.close(linger=round(1000 * LEAVE_S))
            self._context.term()
            self._wake.close()
            if self._failed is not None:  # goodbyes have left: whoever hears of it may end this process
                self._welcome.set()
                self._fail(self._failed)

    def _send_next(self) -> None:
        server, frame = self._outbox.popleft()
        try:
            send_frame(self._sockets[server], [], frame.header(), frame.payload)
        except zmq_module().Again as error:  # queues have no limit: there is none left
            raise ServerError(
                f"{self._name(server)} turned this worker away: expected keys that it knows, perhaps; give both ends "
                "the keys that one call of  thinwire keys  made"
            ) from error

    def _take_all(self, server: int, socket: Any) -> None:
        zmq = zmq_module()
        while True:
            try:
                parts = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if len(parts) < 2:
                    raise WireError(f"expected a header and a payload, got {len(parts)} parts")
                self._take(server, parse_frame(parts[0].bytes, join(parts[1:])))
            except WireError as error:
                self.refused["malformed"] += 1
                self._end(ServerError(f"{self._name(server)} sent what cannot be read: {error}"))

    def _hello_again(self, now_s: float) -> None:
        with self._lock:  # a hello after the goodbye would begin a run of nobody
            for server in [server for server, at_s in self._hello_at_s.items() if now_s >= at_s and not self._left]:
                del self._hello_at_s[server]
                self._said_s[server] = now_s
                self.send(server, Kind.HELLO, payload=self._hellos[server])

    def _name(self, server: int) -> str:
        return f"server {server} at {self._addresses[server]}"

    def _take(self, server: int, frame: Frame) -> None:
        if frame.session != self._session or frame.sender != server:
            self.refused["foreign"] += 1
            logging.getLogger("thinwire").warning("refused a frame of %s: of another run", self._name(server))
            return
        self._heard_s[server] = time.monotonic()
        match frame.kind:
            case Kind.WELCOME:
                self._welcomes.add(server)
                self.goes_on = self.goes_on or Welcome.parse(frame.payload).on_worker_loss == "continue"
                if len(self._welcomes) == len(self._sockets):
                    self._heard_s = [time.monotonic()] * len(self._sockets)
                    self._welcome.set()
            case Kind.MEAN | Kind.KEPT:
                self._mean(server, frame)
            case Kind.HEARTBEAT:
                clocks = Clocks.parse(frame.payload).clocks
                if len(clocks) == self._world_size:
                    self._clocks = clocks
                    self._check_mates(server)
            case Kind.ERROR:
                failure = Failure.parse(frame.payload)
                if failure.kind == "busy" and not self._welcome.is_set():
                    # The run before may be ending: its last goodbye is still on its way.
                    self._turned_away[server] = self._heard_s[server], failure.message
                    self._hello_at_s[server] = self._heard_s[server] + BUSY_S
                    return
                self._end(_ERRORS.get(failure.kind, ServerError)(failure.message))
            case kind:
                raise WireError(f"expected a frame that servers send, got kind {kind}")

    def _mean(self, server: int, frame: Frame) -> None:
        with self._lock:
            awaited = self._awaited.pop((server, frame.content, frame.round), None)
        if awaited is None:
            self.refused["late"] += 1
            logging.getLogger("thinwire").warning(
                "refused a frame of %s: nobody waits for round %d of content %016x",
                self._name(server),
                frame.round,
                frame.content,
            )
            return
        data = np.frombuffer(frame.payload, np.uint8)
        if data.nbytes != awaited.into.numel():
            raise WireError(f"pull: expected {awaited.into.numel()} bytes, got {data.nbytes}")
        awaited.into.numpy()[:] = data
        awaited.done()

    def _check_mates(self, server: int) -> None:
        """End the run here where a rank of this node is gone: other nodes may go on without this one."""
        gone = [rank for rank in self._mates if self._clocks[rank] < 0]
        if gone and self._welcome.is_set():
            self._end(
                RankLostError(
                    f"{self._name(server)} takes rank {', '.join(map(str, gone))} of this node for lost, without "
                    "whom this one cannot take part"
                )
            )

    def _check(self, now_s: float) -> None:
        """End the run where a server is silent, or an answer does not come."""
        for server, heard_s in enumerate(self._heard_s):
            if now_s - heard_s > self._heartbeat_timeout_s:
                self._end(
                    ServerError(
                        f"{self._name(server)} said nothing for {self._heartbeat_timeout_s:g} s: look at its log; "
                        "start it again, attach anew, and load the last state"
                    )
                )
        with self._lock:
            oldest = min(self._awaited.items(), key=lambda item: item[1].since_s, default=None)
        if oldest is not None and now_s - oldest[1].since_s > self._timeout_s:
            server, _, _ = oldest[0]
            least = min((clock for clock in self._clocks if clock >= 0), default=0)  # below 0: lost before
            behind = [rank for rank, clock in enumerate(self._clocks) if clock == least]
            self._end(
                RankLostError(
                    f"{self._name(server)} had no mean for {self._timeout_s:g} s; fewest exchanges begun: rank "
                    f"{', '.join(map(str, behind))} ({least}), which lives but does not come"
                )
            )

    def _end(self, error: BaseException) -> None:
        if self._failed is None:
            self._failed = error
            with self._lock:
                self._awaited.clear()
            self.close(f"{type(error).__name__}: {error}")
