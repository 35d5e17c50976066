"""What both ends share of ZeroMQ: its import, addresses, and a way to wake a thread that waits for sockets."""

import functools
import ipaddress
import os
import re
import threading
import types
from typing import Any

from thinwire.errors import ServerError
from thinwire.wire import FRAME_NBYTES, MAX_PAYLOAD_NBYTES, Data

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[\w.*-]+):(?P<port>\d{1,5}|\*)")
COPY_NBYTES = 1 << 16  # a payload up to this is cheaper to copy than to be tracked


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


def set_up(socket: Any, host: str) -> None:
    """Let a socket that is about to talk to `host` hold any number of frames, none larger than ours.

    What is left when it closes is dropped.
    """
    zmq = zmq_module()
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_NBYTES + FRAME_NBYTES)
    socket.setsockopt(zmq.IPV6, int(":" in host))


def send_frame(socket: Any, prefix: list[bytes], header: bytes, payload: Data) -> None:
    """Send one frame; a large payload is not copied, and must stay as it is until it has arrived.

    Raises:
        zmq.Again: the other end has turned this one away for good; a socket that may wait would wait for ever.
    """
    zmq = zmq_module()
    socket.send_multipart([*prefix, header], flags=zmq.SNDMORE | zmq.NOBLOCK)
    socket.send(payload, flags=zmq.NOBLOCK, copy=memoryview(payload).nbytes <= COPY_NBYTES)


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
