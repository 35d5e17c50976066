"""How the ranks of a group meet: each finds its address, and they make a TCP connection between every two.

Addresses meet in the rendezvous store. Whoever connects says so with a `Hello` that holds a token from that store, and
is answered with one; all else that knocks is turned away. docs/wire-format.md has the bytes.
"""

# pyright: reportPrivateImportUsage=false

import contextlib
import hmac
import ipaddress
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

from thinwire.errors import AttachError
from thinwire.wire import WIRE_FORMAT

HELLO_S = 10.0  # for a client that connected to say who it is
TICK_S = 1.0  # between looks whether another rank has given up connecting
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that lost power: 60 s


@dataclass(frozen=True, slots=True)
class Hello:
    """What both ends of a new connection say first."""

    rank: int
    name: bytes
    token: bytes
    wire_format: int = WIRE_FORMAT

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<8sII16s16s")
    MAGIC: ClassVar[bytes] = b"thinwire"

    def pack(self) -> bytes:
        """Return its bytes."""
        return self.FORMAT.pack(self.MAGIC, self.wire_format, self.rank, self.name, self.token)

    @classmethod
    def parse(cls, data: bytes) -> "Hello | None":
        """Return what the bytes say, or None if they are no hello."""
        magic, wire_format, rank, name, token = cls.FORMAT.unpack(data)
        return cls(rank, name.rstrip(b"\0"), token, wire_format) if magic == cls.MAGIC else None


class Meeting:
    """Connects to lower ranks and waits for higher ones, once."""

    def __init__(self, store: dist.Store, ranks: list[int], rank: int, timeout_s: float, name: str) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._name = name.encode()[:16]
        self._token = b""
        self._met: dict[int, socket.socket] = {}
        self._guests: dict[socket.socket, tuple[bytearray, float]] = {}  # what they said so far, and until when

    def connect(self) -> dict[int, socket.socket]:
        """Return a socket per other rank.

        Nobody waits for an answer before it has called everybody and has heard all who call, so nobody waits in a ring.
        """
        if self._rank == 0:
            self._store.set("token", secrets.token_hex(16))
        try:
            with self._listen() as listener:
                self._token = bytes.fromhex(self._get("token", 0))
                for lower in range(self._rank):
                    self._call(lower)
                self._hear_higher(listener)
                for lower in range(self._rank):
                    self._hear_answer(lower)
        except BaseException:
            close_all([*self._met.values(), *self._guests])
            raise
        for connection in self._met.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                if hasattr(socket, option):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return self._met

    def _listen(self) -> socket.socket:
        address = local_address(self._store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(min(len(self._ranks) + 16, socket.SOMAXCONN))
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._store.set(f"address/{self._rank}", f"{listener.getsockname()[1]} {address}")
        return listener

    def _call(self, lower: int) -> None:
        port, address = self._get(f"address/{lower}", lower).split(" ", 1)
        try:
            connection = socket.create_connection((address, int(port)), timeout=self._left(lower))
            self._met[lower] = connection
            connection.sendall(self._hello().pack())
        except OSError as error:
            raise AttachError(
                f"expected to reach {self._named(lower)} at {address} port {port}, got {error}. If that is the wrong "
                "address, set THINWIRE_SOCKET_IFNAME to the network interface to use, on every host"
            ) from error

    def _hear_higher(self, listener: socket.socket) -> None:
        expected = set(range(self._rank + 1, len(self._ranks)))
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while expected - set(self._met):
                self._left(min(expected - set(self._met)))
                for key, _ in selector.select(TICK_S):
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):  # gone again
                            guest, _ = listener.accept()
                            guest.setblocking(False)
                            self._guests[guest] = (bytearray(), time.monotonic() + HELLO_S)
                            selector.register(guest, selectors.EVENT_READ)
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._hear_guest(key.fileobj, selector)
                for guest in [guest for guest, (_, until) in self._guests.items() if until < time.monotonic()]:
                    self._turn_away(guest, selector, "it said nothing")
            for guest in list(self._guests):
                self._turn_away(guest, selector, "all ranks are here")

    def _hear_guest(self, guest: socket.socket, selector: selectors.BaseSelector) -> None:
        said, _ = self._guests[guest]
        try:
            more = guest.recv(Hello.FORMAT.size - len(said))
        except OSError:
            more = b""
        said += more
        if not more:
            self._turn_away(guest, selector, "it left")
        elif len(said) == Hello.FORMAT.size:
            hello = Hello.parse(bytes(said))
            if hello is None or not hmac.compare_digest(hello.token, self._token):
                self._turn_away(guest, selector, "it is no rank of this run")
                return
            self._check(hello, f"rank {hello.rank}")
            if not self._rank < hello.rank < len(self._ranks) or hello.rank in self._met:
                self._turn_away(guest, selector, f"it says it is place {hello.rank}, which is not awaited")
                return
            selector.unregister(guest)
            del self._guests[guest]
            self._met[hello.rank] = guest
            guest.sendall(self._hello().pack())  # the first bytes on this connection: they fit

    def _turn_away(self, guest: socket.socket, selector: selectors.BaseSelector, why: str) -> None:
        with contextlib.suppress(OSError):
            logging.getLogger("thinwire").warning("turned away a connection from %s: %s", guest.getpeername()[0], why)
        selector.unregister(guest)
        del self._guests[guest]
        guest.close()

    def _hear_answer(self, lower: int) -> None:
        connection, said = self._met[lower], b""
        while len(said) < Hello.FORMAT.size:
            connection.settimeout(min(TICK_S, self._left(lower)))
            try:
                more = connection.recv(Hello.FORMAT.size - len(said))
            except TimeoutError:
                continue
            except OSError as error:
                raise AttachError(f"{self._named(lower)} broke off the connection: {error}") from error
            if not more:
                raise AttachError(f"{self._named(lower)} turned this rank's connection away; its log says why")
            said += more
        hello = Hello.parse(said)
        if hello is None or hello.rank != lower or not hmac.compare_digest(hello.token, self._token):
            raise AttachError(f"expected {self._named(lower)} to answer, got something that is no rank of this run")
        self._check(hello, self._named(lower))

    def _check(self, hello: Hello, named: str) -> None:
        mine = self._hello()
        if (hello.wire_format, hello.name) != (mine.wire_format, mine.name):
            raise AttachError(
                f"expected wire format {mine.wire_format} on {mine.name.decode()!r} from {named}, got "
                f"{hello.wire_format} on {hello.name.decode(errors='replace')!r}; run one version on all ranks"
            )

    def _hello(self) -> Hello:
        return Hello(self._rank, self._name, self._token)

    def _get(self, key: str, owner: int) -> str:
        """Return what a rank has put into the store."""
        pause = 0.001
        while not self._store.check([key]):
            self._left(owner)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return self._store.get(key).decode()

    def _left(self, awaited: int) -> float:
        """Return the seconds left, or raise if there are none, or some rank has given up."""
        if self._store.check(["failed"]):
            raise AttachError(f"another rank could not connect: {self._store.get('failed').decode()}")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise AttachError(
                f"{self._named(awaited)} did not connect within {self._timeout_s:g} s: look at its output first. If it "
                "is well, set THINWIRE_SOCKET_IFNAME to the network interface to use, on every host"
            )
        return left

    def _named(self, place: int) -> str:
        return f"rank {self._ranks[place]}"


def check_reachable(store: dist.Store, ranks: list[int], rank: int, timeout_s: float) -> None:
    """Return once every rank has reached every other. Every rank must call.

    Args:
        store: a rendezvous store; a part of it is used.
        ranks: global ranks of the group, for messages.
        rank: this rank's place in it.
        timeout_s: for all to come.

    Raises:
        AttachError: a rank did not come in time, or cannot be reached; the message names it and its address.
    """
    close_all([*Meeting(dist.PrefixStore("reach", store), ranks, rank, timeout_s, "reach").connect().values()])


def close_all(sockets: list[socket.socket]) -> None:
    """Close each."""
    for each in sockets:
        each.close()


# --- addresses ------------------------------------------------------------------------------------------------------


def local_address(store: dist.Store) -> str:
    """Return the address at which other ranks reach this one.

    It is that of the interface that THINWIRE_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names; else the one from which this
    host reaches the store's; else that of the host's name.

    Raises:
        AttachError: there is no such interface, or it has no address.
    """
    for variable in ("THINWIRE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        names = os.environ.get(variable, "").split(",")
        if names[0]:
            return _interface_address(names[0], variable)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, dist.TCPStore) else ""
    address = _address_towards(host) if host else ""
    if address and (not _is_loopback(address) or host == "localhost" or _is_loopback(host)):
        return address
    # The store is on this very host, under a name; others come to it from elsewhere.
    return _address_towards(socket.gethostname()) or address or "127.0.0.1"


def _address_towards(host: str) -> str:
    """Return the address from which this host reaches another, or "". Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _interface_address(name: str, variable: str) -> str:
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != "20":  # link-local addresses need more than themselves
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    have = ", ".join(interface for _, interface in socket.if_nameindex())
    raise AttachError(f"{variable}: expected a network interface with an address, got {name!r}; there are {have}")
