"""CURVE keys: who may talk to a server, and which server a worker talks to. Everything between them is encrypted.

`thinwire keys FOLDER` makes two folders. FOLDER/server goes to the machines of servers: their secret key, and the
public keys of those that are let in. FOLDER/worker goes to the machines of workers: their secret key, and the servers'
public one. A secret key never has to leave the folder it is made in.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ServerError
from thinwire.server.sockets import zmq_module

DOMAIN = "thinwire"
_SECRET, _PUBLIC = "{}.secret", "{}.public"


def make_keys(folder: Path) -> None:
    """Make FOLDER/server and FOLDER/worker.

    Raises:
        ServerError: there are keys already, which workers or servers may be using.
    """
    curve_keypair = zmq_module().curve_keypair
    if any((folder / side).exists() for side in ("server", "worker")):
        raise ServerError(f"{folder}: expected no keys there, since others may be using them; name another folder")
    pairs = {side: curve_keypair() for side in ("server", "worker")}
    for side, other in (("server", "worker"), ("worker", "server")):
        (folder / side).mkdir(parents=True)
        secret = folder / side / _SECRET.format(side)
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pairs[side][1] + b"\n")
        (folder / side / _PUBLIC.format(side)).write_bytes(pairs[side][0] + b"\n")
        (folder / side / _PUBLIC.format(other)).write_bytes(pairs[other][0] + b"\n")


def _read(path: Path) -> bytes:
    """Return the key in a file: 40 characters of Z85."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ServerError(
            f"expected a key in {path}: {error.strerror}; make keys with  thinwire keys FOLDER"
        ) from error
    if len(key) != 40:
        raise ServerError(f"{path}: expected a key of 40 characters, got {len(key)}")
    zmq_module()
    from zmq.utils import z85

    try:
        z85.decode(key)
    except (KeyError, struct.error):
        raise ServerError(
            f"{path}: expected a key in Z85, got other characters; copy the file again, or make keys with  thinwire "
            "keys FOLDER"
        ) from None
    return key


@dataclass(frozen=True, slots=True, repr=False)
class ServerKeys:
    """A server's keys, and those of whoever it talks to."""

    secret: bytes
    public: bytes
    workers: frozenset[bytes]

    @staticmethod
    def read(folder: Path) -> "ServerKeys":
        """Read FOLDER/server: its own pair, and every other public key there."""
        own = _PUBLIC.format("server")
        others = (path for path in sorted(folder.glob(_PUBLIC.format("*"))) if path.name != own)
        keys = ServerKeys(
            _read(folder / _SECRET.format("server")), _read(folder / own), frozenset(_read(path) for path in others)
        )
        if not keys.workers:
            raise ServerError(f"{folder}: expected the public key of workers there, worker.public")
        return keys

    def guard(self, context: Any, socket: Any) -> Any:
        """Let a socket, before it is bound, talk only to peers with a known key; return what must be stopped."""
        zmq_module()
        from zmq.auth.thread import ThreadAuthenticator

        socket.zap_domain = DOMAIN.encode()
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = self.secret, self.public
        gate = ThreadAuthenticator(context)
        gate.start()
        gate.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        return gate

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer is let in. Called by pyzmq."""
        return key in self.workers


@dataclass(frozen=True, slots=True, repr=False)
class WorkerKeys:
    """A worker's keys, and the servers'."""

    secret: bytes
    public: bytes
    server: bytes

    @staticmethod
    def read(folder: Path) -> "WorkerKeys":
        """Read FOLDER/worker."""
        return WorkerKeys(
            _read(folder / _SECRET.format("worker")),
            _read(folder / _PUBLIC.format("worker")),
            _read(folder / _PUBLIC.format("server")),
        )

    def use(self, socket: Any) -> None:
        """Let a socket, before it connects, talk only to the server."""
        socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = self.secret, self.public, self.server
