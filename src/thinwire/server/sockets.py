"""What both ends share of ZeroMQ: addresses, frames in parts, who is connected, and a way to wake a waiting thread."""

import functools
import ipaddress
import os
import re
import struct
import threading
import types
from collections.abc import Sequence
from typing import Any

from thinwire.errors import ServerError
from thinwire.wire import Data

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[\w.*-]+):(?P<port>\d{1,5}|\*)")
COPY_NBYTES = 1 << 16  # a payload up to this is cheaper to copy than to be tracked
# Payloads travel in parts up to this: what a peer that has not shown a key can make us hold. 4 MiB of gradients, as
# messages hold, fit in one part in 16 bits or fewer.
PART_NBYTES = (1 << 21) + (1 << 16)
HANDSHAKE_S = 5  # for a peer to show its key
_MONITORED = "inproc://connections"
_EVENT = struct.Struct("=Hi")  # what happened, and to which descriptor


@functools.cache
def zmq_module() -> types.ModuleType:
    """Import pyzmq.

    Raises:
        ServerError: it is not installed.
    """
    try:
        import zmq
    except ImportError as error:
        raise ServerError(
            f"parameter servers: expected pyzmq, got {error}; run  pip install '.[server]'  in thinwire's folder"
        ) from error
    return zmq


def check_address(address: str) -> str:
    """Return the host of `tcp://host:port`.

    Raises:
        ServerError: it is another kind of address.

    Example:
        >>> check_address("tcp://127.0.0.1:5555")
        '127.0.0.1'
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise ServerError(f"expected an address such as tcp://10.0.0.1:5555, got {address!r}")
    return found["host"].strip("[]")


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around what has colons itself.

    >>> join_address("10.0.0.1", 5555), join_address("::1", 5555)
    ('10.0.0.1:5555', '[::1]:5555')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can be reached at, or reach, a host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def set_up(socket: Any, host: str, most: int = 0) -> None:
    """Let a socket that is about to talk to `host` hold so many frames each way for a peer; 0: any number.

    What is left when it closes is dropped.
    """
    zmq = zmq_module()
    socket.setsockopt(zmq.SNDHWM, most)
    socket.setsockopt(zmq.RCVHWM, most)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, PART_NBYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_S)
    socket.setsockopt(zmq.IPV6, int(":" in host))


def send_frame(socket: Any, prefix: list[bytes], header: bytes, payload: Data) -> None:
    """Send one frame; a large payload is not copied, and must stay as it is until it has arrived.

    Raises:
        zmq.Again: the other end takes nothing more: it has turned this one away for good, or does not read.
    """
    zmq = zmq_module()
    *first, last = _cut(memoryview(payload))
    socket.send_multipart([*prefix, header], flags=zmq.SNDMORE | zmq.NOBLOCK)  # all parts of it go, or none
    for part in first:
        socket.send(part, flags=zmq.SNDMORE | zmq.NOBLOCK, copy=False)
    socket.send(last, flags=zmq.NOBLOCK, copy=last.nbytes <= COPY_NBYTES)


def _cut(payload: memoryview) -> list[memoryview]:
    if payload.nbytes <= PART_NBYTES:
        return [payload]
    data = payload.cast("B")
    return [data[start : start + PART_NBYTES] for start in range(0, data.nbytes, PART_NBYTES)]


def join(parts: Sequence[Any]) -> Data:
    """Return the payload that came in these parts; that of one is not copied, and keeps libzmq's memory."""
    if len(parts) == 1:
        return parts[0].buffer
    return bytearray().join(part.buffer for part in parts)


class Connections:
    """Which connections a socket has, whether they have shown a key or not. Made before it is bound.

    Attributes:
        events: a socket that can be read when `update` has something to do.
    """

    def __init__(self, context: Any, socket: Any) -> None:
        zmq = zmq_module()
        self._socket, self._open = socket, set[int]()
        socket.monitor(_MONITORED, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.events = context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # or libzmq's thread would wait for us to read
        self.events.connect(_MONITORED)

    def __len__(self) -> int:
        return len(self._open)

    def update(self) -> None:
        """Read what has happened."""
        zmq = zmq_module()
        while self.events.poll(0):
            event, descriptor = _EVENT.unpack(self.events.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
            else:
                self._open.discard(descriptor)

    def close(self) -> None:
        """Look no more. Before the socket closes."""
        self._socket.disable_monitor()
        self.events.close()


class Wake:
    """Wakes a thread that polls `fd` beside its sockets.

    From any thread, and from a signal handler, which may come in the middle of either method: hence the lock that its
    owner may take again. At worst there is a byte too many, and the thread looks once for nothing.
    """

    def __init__(self) -> None:
        self.fd, self._other = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._other, False)
        self._lock, self._set, self._closed = threading.RLock(), False, False

    def set(self) -> None:
        """Wake it; nothing once it is closed, when the descriptors may be somebody else's."""
        with self._lock:
            if not (self._set or self._closed):
                self._set = True
                os.write(self._other, b"x")

    def clear(self) -> None:
        """Wait for the next `set` again. Only where `fd` can be read."""
        with self._lock:
            self._set = False
            os.read(self.fd, 1)

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            self._closed = True
            os.close(self.fd)
            os.close(self._other)
