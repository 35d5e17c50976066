"""A server's process: its socket, its engine threads, and the loop that moves frames between them."""

import math
import time
from collections import deque
from typing import Any

from thinwire.errors import ServerError, WireError
from thinwire.server.engine import Engines
from thinwire.server.keys import ServerKeys
from thinwire.server.service import Peer, Service, ServiceOptions
from thinwire.server.sockets import (
    Connections,
    Wake,
    check_address,
    is_loopback,
    join,
    send_frame,
    set_up,
    zmq_module,
)
from thinwire.wire import MAX_PAYLOAD_NBYTES, Data

POLL_S = 0.5  # between looks at heartbeats
GRACE_S = 60.0  # for a last step and a checkpoint
LAST_S = 1.0  # for errors that are on their way when all ends
_MANY = 64  # frames taken in a row, before what waits is sent
# Frames held for a peer each way. One that works has at most as many means under way as a worker has exchanges.
_QUEUED = 128


class Server:
    """Binds, and serves until told to stop.

    Args:
        bind: such as tcp://0.0.0.0:5555; port 0 takes a free one.
        options: how to serve.
        keys: its own and its workers'; required unless `bind` is loopback.
        grace_s: how long it serves on, at most, after it was told to stop.

    Attributes:
        address: what it is bound to.

    Raises:
        ServerError: the address cannot be bound, or keys are missing.
    """

    def __init__(
        self, bind: str, options: ServiceOptions, keys: ServerKeys | None = None, grace_s: float = GRACE_S
    ) -> None:
        host = check_address(bind)
        if keys is None and not is_loopback(host):
            raise ServerError(
                f"--bind {bind}: expected keys, since others than this machine can reach it: make some with  thinwire "
                "keys FOLDER  and pass  --keys FOLDER/server; or bind to tcp://127.0.0.1:PORT"
            )
        zmq = zmq_module()
        self._context, self._gate = zmq.Context(), None
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._connections = Connections(self._context, self._socket)
        try:
            set_up(self._socket, host, _QUEUED)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or what a full queue does not take would be lost unseen
            self._gate = None if keys is None else keys.guard(self._context, self._socket)
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._close_sockets()
            why = "is another server there?" if error.errno == zmq.EADDRINUSE else "expected an address of this machine"
            raise ServerError(f"--bind {bind}: {error}; {why}") from error
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._wake, self._outbox = Wake(), deque[tuple[Peer, bytes, Data]]()
        self._grace_s, self._until_s, self._closed = grace_s, math.inf, False
        self.service = Service(options, self._send, lambda served: self.engines.wake(served))
        self.engines = Engines(options.threads, self.service.work, self.service.missing)

    def _send(self, peer: Peer, header: bytes, payload: Data) -> None:
        self._outbox.append((peer, header, payload))
        self._wake.set()

    def run(self) -> None:
        """Serve until `stop`, in the calling thread; then tell workers that are still there, and close."""
        zmq = zmq_module()
        poller = zmq.Poller()
        for one in (self._socket, self._connections.events, self._wake.fd):
            poller.register(one, zmq.POLLIN)
        looked_s = time.monotonic()
        try:
            while not self._is_done():
                ready = dict(poller.poll(1000 * POLL_S))
                if self._wake.fd in ready:
                    self._wake.clear()
                self._connections.update()
                self._send_all()
                if self._socket in ready:
                    self._take_some()
                    self._send_all()
                if time.monotonic() - looked_s >= POLL_S:
                    looked_s = time.monotonic()
                    self.service.check_heartbeats()
            self.service.stop()
            self._send_all()
        finally:
            self.close()

    def _is_done(self) -> bool:
        if self._until_s == math.inf:
            return False
        # Whose connection has closed comes back as another peer, if at all: a run without connections is over.
        return self.service.is_over or not self._connections or time.monotonic() >= self._until_s

    def stop(self, *, at_once: bool = False) -> None:
        """Let `run` return when its run is over, or its grace; from any thread, or a signal handler."""
        self._until_s = -math.inf if at_once else min(self._until_s, time.monotonic() + self._grace_s)
        self._wake.set()

    def close(self) -> None:
        """End its threads and give back its address; `run` does."""
        if not self._closed:
            self._closed = True
            self.engines.close()
            self._close_sockets()
            self._wake.close()

    def _close_sockets(self) -> None:
        if self._gate is not None:  # first: its thread has a socket in this context
            self._gate.stop()
        self._connections.close()
        self._socket.close(linger=round(1000 * LAST_S))
        self._context.term()

    def _take_some(self) -> None:
        zmq = zmq_module()
        for _ in range(_MANY):
            try:
                parts = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer, *rest = parts
            if len(rest) < 2:
                came = f"{len(rest)} of {', '.join(str(len(part.buffer)) for part in rest)} bytes"
                self.service.refuse(peer.bytes, WireError(f"expected parts, a header and a payload, got {came}"))
                continue
            header, *payload = rest
            if (nbytes := sum(len(part.buffer) for part in payload)) > MAX_PAYLOAD_NBYTES:
                error = WireError(f"expected a payload of {MAX_PAYLOAD_NBYTES} bytes at most, got {nbytes}")
                self.service.refuse(peer.bytes, error)
                continue
            # The memory is libzmq's; the payload's view keeps it until an engine thread has read it.
            self.service.receive(peer.bytes, header.bytes, join(payload))

    def _send_all(self) -> None:
        zmq = zmq_module()
        while self._outbox:
            peer, header, payload = self._outbox.popleft()
            assert isinstance(peer, bytes)
            try:
                send_frame(self._socket, [peer], header, payload)
            except zmq.Again:
                self.service.unread(peer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # its connection has closed: heartbeats tell
                    raise
