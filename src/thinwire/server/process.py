"""A server's process: its socket, its engine threads, and the loop that moves frames between them."""

import threading
import time
from collections import deque
from typing import Any

from thinwire.errors import ServerError
from thinwire.server.engine import Engines
from thinwire.server.keys import ServerKeys
from thinwire.server.service import Peer, Service, ServiceOptions
from thinwire.server.sockets import Wake, check_address, is_loopback, send_frame, set_up, zmq_module
from thinwire.wire import Data

POLL_S = 0.5  # between looks at heartbeats
_MANY = 64  # frames taken in a row, before what waits is sent


class Server:
    """Binds, and serves until told to stop.

    Args:
        bind: such as tcp://0.0.0.0:5555; port 0 takes a free one.
        options: how to serve.
        keys: its own and its workers'; required unless `bind` is loopback.

    Attributes:
        address: what it is bound to.

    Raises:
        ServerError: the address cannot be bound, or keys are missing.
    """

    def __init__(self, bind: str, options: ServiceOptions, keys: ServerKeys | None = None) -> None:
        host = check_address(bind)
        if keys is None and not is_loopback(host):
            raise ServerError(
                f"--bind {bind}: expected keys, since others than this machine can reach it: make some with  thinwire "
                "keys FOLDER  and pass  --keys FOLDER/server; or bind to tcp://127.0.0.1:PORT"
            )
        zmq = zmq_module()
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        set_up(self._socket, host)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._gate = None if keys is None else keys.guard(self._context, self._socket)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ServerError(f"--bind {bind}: {error}; is another server there?") from error
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._wake, self._outbox, self._stopped = Wake(), deque[tuple[Peer, bytes, Data]](), threading.Event()
        self.service = Service(options, self._send, lambda served: self.engines.wake(served))
        self.engines = Engines(options.threads, self.service.work, self.service.missing)

    def _send(self, peer: Peer, header: bytes, payload: Data) -> None:
        self._outbox.append((peer, header, payload))
        self._wake.set()

    def run(self) -> None:
        """Serve until `stop`, in the calling thread."""
        zmq = zmq_module()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        looked_s = time.monotonic()
        try:
            while not self._stopped.is_set():
                ready = dict(poller.poll(1000 * POLL_S))
                if self._wake.fd in ready:
                    self._wake.clear()
                self._send_all()
                if self._socket in ready:
                    self._take_some()
                    self._send_all()
                if time.monotonic() - looked_s >= POLL_S:
                    looked_s = time.monotonic()
                    self.service.check_heartbeats()
            self._send_all()
        finally:
            self.engines.close()
            if self._gate is not None:
                self._gate.stop()
            self._socket.close(linger=200)  # for errors that are on their way
            self._context.term()
            self._wake.close()

    def stop(self) -> None:
        """Let `run` return soon; from any thread, or a signal handler."""
        self._stopped.set()
        self._wake.set()

    def _take_some(self) -> None:
        zmq = zmq_module()
        for _ in range(_MANY):
            try:
                parts = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(parts) != 3:
                self.service.refused["malformed"] += 1
                continue
            peer, header, payload = parts
            # The memory is libzmq's; the payload's view keeps it until an engine thread has read it.
            self.service.receive(peer.bytes, header.bytes, payload.buffer)

    def _send_all(self) -> None:
        while self._outbox:
            peer, header, payload = self._outbox.popleft()
            assert isinstance(peer, bytes)
            send_frame(self._socket, [peer], header, payload)
