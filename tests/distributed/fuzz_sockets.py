"""A fuzzer of sockets: two workers train through a server, to which strangers send what is no frame, or none of theirs.

    python tests/distributed/fuzz_sockets.py 100000

Peers speak ZeroMQ, with any number of parts, close in the middle and come again; or they are bare TCP connections, with
noise before, in and after the greeting. All that arrives is refused, counted and named, and the workers' means are
those of a run without servers, to the bit.
"""

import contextlib
import hashlib
import random
import re
import socket
import struct
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import torch
import zmq
from bodies import body_changed
from rank_pool import RankPool, Ranks
from serving import servers
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Tower, attached, batch, gradients, loss, seeded

from thinwire.server.protocol import Failure, Hello, Kind
from thinwire.wire import FRAME_NBYTES, Frame

RECIPE = "topk:0.05"
NUM_PEERS = 16
PAUSE = 1000  # messages between looks at what has arrived
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.1
MORE, LONG, COMMAND = 1, 2, 4  # flags of its frames


# --- workers ----------------------------------------------------------------------------------------------------------


def _steps(rank: int, num_steps: int | None, folder: Path | None = None, **kwargs: Any) -> tuple[int, str]:
    """Train so many steps, or until a file in a folder says stop; return the steps, and a hash of all gradients."""
    model, hasher, step = DDP(seeded(Tower), bucket_cap_mb=0.01), hashlib.sha256(), 0
    with attached(model, RECIPE, **kwargs):
        while step != num_steps:
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
            for grad in gradients(model):
                hasher.update(grad.numpy().tobytes())
            step += 1
            if folder is not None:
                (folder / "begun").touch()
                going = torch.tensor(float(not (folder / "stop").exists()))
                torch.distributed.broadcast(going, 0)
                if not going:
                    break
    return step, hasher.hexdigest()


def _train(rank: int, world_size: int, address: str, folder: str) -> tuple[int, str, str]:
    """Return the steps done, and what came of them with the server and without."""
    num_steps, served = _steps(rank, None, Path(folder), servers=[address])
    return num_steps, served, _steps(rank, num_steps)[1]


# --- strangers --------------------------------------------------------------------------------------------------------


class Strangers:
    """Peers that nobody knows, and what the server says of them."""

    def __init__(self, address: str, metrics: str, seed: int) -> None:
        self._address, self._metrics, self._rng = address, metrics, random.Random(seed)
        self._context = zmq.Context()
        self._peers = [self._peer() for _ in range(NUM_PEERS)]
        self.sent = Counter[str]()

    def _peer(self) -> Any:
        peer = self._context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(self._address)
        return peer

    def send(self, count: int) -> None:
        """Send so many messages and bare connections."""
        for i in range(count):
            match self._rng.randrange(100):
                case 0:
                    self._reconnect()
                case n if n < 6:
                    self._connect_bare()
                case _:
                    self._message()
            if i % PAUSE == PAUSE - 1:
                self.settle()

    def settle(self) -> Counter[str]:
        """Wait until all has arrived that will; return what the server has refused, by reason."""
        before, now = None, self.refused()
        while before != now:
            time.sleep(0.05)
            before, now = now, self.refused()
        return now

    def refused(self) -> Counter[str]:
        with urllib.request.urlopen(self._metrics, timeout=20) as answer:
            found = re.findall(r'^thinwire_server_refused_total{reason="(.+?)"} (\S+)', answer.read().decode(), re.M)
        return Counter({reason: round(float(count)) for reason, count in found})

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _message(self) -> None:
        rng = self._rng
        parts = self._frame() if rng.random() < 0.5 else self._parts()
        self.sent[f"{min(len(parts), 4)}{' or more' if len(parts) > 3 else ''} parts"] += 1
        peer = rng.choice(self._peers)
        peer.send_multipart(parts)
        while peer.poll(0):  # errors alone, for those that say hello
            header, payload = peer.recv_multipart()
            assert header[6] == Kind.ERROR
            Failure.parse(payload)

    def _parts(self) -> list[bytes]:
        rng = self._rng
        sizes = (0, 0, 1, 5, FRAME_NBYTES - 1, FRAME_NBYTES, FRAME_NBYTES + 1, 300, 1 << 17)
        many = 1000 if rng.random() < 0.01 else 7
        return [rng.randbytes(rng.choice(sizes if many < 10 else sizes[:4])) for _ in range(rng.randrange(1, many))]

    def _frame(self) -> list[bytes]:
        """Return a frame that is whole, of no worker's: as it is, without a part, with another, or in pieces."""
        rng = self._rng
        session, rank = rng.getrandbits(64), rng.choice((0, 1, 2, 77))
        hello = Frame(kind=Kind.HELLO, session=session, sender=rank, payload=Hello(rank, 2, 0, 1, "plan").pack())
        push = Frame(kind=Kind.PUSH, session=session, content=7, sender=rank, payload=rng.randbytes(100))
        frame = body_changed(rng, rng.choice((hello, push)), [hello, push])
        header, payload = frame.header(), bytes(frame.payload)
        at = rng.randrange(len(header))
        shapes = [
            [header],
            [payload],
            [b"", header, payload],
            [header, payload, b""],
            [header + payload],
            [payload, header],
        ]
        return rng.choice(([header, payload], [header[:at], payload], [header[:at], header[at:], payload], *shapes))

    def _reconnect(self) -> None:
        """Close a peer in the middle of a message, or of many; another one comes."""
        self.sent["closed"] += 1
        place = self._rng.randrange(NUM_PEERS)
        with contextlib.suppress(zmq.Again):
            for _ in range(self._rng.randrange(3)):
                self._peers[place].send(b"part", flags=zmq.SNDMORE | zmq.NOBLOCK)
        self._peers[place].close(linger=0)
        self._peers[place] = self._peer()

    def _connect_bare(self) -> None:
        """Connect without ZeroMQ, send some, and close, or reset."""
        self.sent["bare connections"] += 1
        rng, (host, port) = self._rng, self._address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as bare, contextlib.suppress(OSError):
            bare.settimeout(0.2 * (rng.random() < 0.1))  # mostly nobody reads what it says
            bare.sendall(self._bytes())
            if bare.gettimeout():
                bare.recv(1 << 12)
            if rng.random() < 0.5:  # a reset
                bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _bytes(self) -> bytes:
        rng, noise = self._rng, self._rng.randbytes(self._rng.choice((0, 1, 9, 64, 3000)))
        identity = rng.choice((b"", b"\0" + rng.randbytes(4), rng.randbytes(255)))  # those of others begin with a zero
        ready = b"\x05READY" + _property(b"Socket-Type", rng.choice((b"DEALER", b"ROUTER", b"PUB", noise[:50])))
        ready += _property(b"Identity", identity)
        opened = GREETING + _zmtp(COMMAND, ready)
        size = rng.choice((0, 1, 1 << 30, 1 << 62, (1 << 64) - 1))
        return rng.choice(
            (
                b"",
                noise,
                GREETING[: rng.randrange(64)],
                GREETING[: rng.randrange(64)] + noise,
                GREETING + noise,
                opened,
                opened + noise,
                opened + _zmtp(MORE, b"part"),  # the rest never comes
                opened + bytes([LONG | MORE]) + size.to_bytes(8, "big") + noise,
                opened + _zmtp(MORE, b"") + _zmtp(0, noise[:200]),
                opened + _zmtp(0, noise[:200]) + _zmtp(rng.randrange(256), noise[:200]),
                opened + _zmtp(COMMAND, rng.choice((b"\x04PING\0\0", b"\x05ERROR\xff", noise[:200]))),
                b"GET / HTTP/1.1\r\nHost: server\r\n\r\n",
            )
        )


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _zmtp(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags & ~LONG, len(body)]) + body


# --- both -------------------------------------------------------------------------------------------------------------


def fuzz_sockets(ranks: Ranks, count: int, *, seed: int = 0) -> tuple[Counter[str], Counter[str], int]:
    """Send `count` messages while two workers train; return them by kind, the refusals, and the workers' steps."""
    with tempfile.TemporaryDirectory() as folder, servers(2, 1, "--metrics", "0") as (server,):
        assert server.process.stdout is not None
        metrics = server.process.stdout.readline().split()[-1]
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(ranks.run, _train, server.address, folder, timeout=60 + count / 100)
            strangers = Strangers(server.address, metrics, seed)
            try:
                while not (Path(folder) / "begun").exists() and not training.done():
                    time.sleep(0.05)  # before, whoever comes first may begin a run
                strangers.send(count)
                refused = strangers.settle()
            finally:
                strangers.close()
                (Path(folder) / "stop").touch()
            results = training.result()
        said = server.output().splitlines()
    assert not (others := [line for line in said if not line.startswith("refused a frame of an unknown peer: ")]), (
        others
    )
    assert len(said) <= refused.total()
    (num_steps, served, plain), other = results[0], results[1]
    assert other == (num_steps, served, plain)
    assert served == plain
    return strangers.sent, refused, num_steps


def main() -> None:
    pool, started = RankPool(), time.monotonic()
    try:
        sent, refused, num_steps = fuzz_sockets(pool.ranks(2), int(sys.argv[1]))
    finally:
        pool.close()
    print(f"{sent.total()} messages in {time.monotonic() - started:.0f} s, beside {num_steps} steps: {dict(sent)}")
    print(f"{refused.total()} refused: {dict(refused)}")


if __name__ == "__main__":
    main()
