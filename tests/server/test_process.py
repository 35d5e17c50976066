"""A server with its sockets, in this process or another: how it starts and ends, and what strangers can do to it."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq
from channels import SESSION, open_channel
from serving import ServerProcess, start

from thinwire.errors import ServerError
from thinwire.lab.ports import reserve_port
from thinwire.server.keys import ServerKeys, WorkerKeys, make_keys
from thinwire.server.process import Server
from thinwire.server.protocol import Hello, Kind, Residuals, pack_values
from thinwire.server.service import ServiceOptions
from thinwire.server.sockets import PART_NBYTES
from thinwire.wire import FRAME_NBYTES, Frame


@contextmanager
def _serving(num_workers: int = 1, grace_s: float = 30.0) -> Iterator[tuple[Server, threading.Thread]]:
    server = Server("tcp://127.0.0.1:*", ServiceOptions(num_workers=num_workers), grace_s=grace_s)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server, thread
    finally:
        server.stop(at_once=True)
        thread.join(10.0)
        assert not thread.is_alive()


class Worker:
    """A worker that has said hello."""

    def __init__(self, address: str) -> None:
        self.error: BaseException | None = None
        self.failed = threading.Event()
        self.channel = open_channel([address], self._fail, timeout_s=20.0)
        self.channel.hello("a plan", 10.0)
        self._asked = 0

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.failed.set()

    def ask(self, kind: Kind, payload: bytes, nbytes: int = 0) -> torch.Tensor:
        into, done = torch.empty(nbytes, dtype=torch.uint8), threading.Event()
        self._asked += 1
        self.channel.expect(0, 0, self._asked, into, done.set)
        self.channel.send(0, kind, round_=self._asked, payload=payload)
        assert done.wait(10.0), self.error
        return into


def _about(numel: int) -> Residuals:
    return Residuals(names=["weight"], offsets=[0], numels=[numel], rates=[0.0], loss_scale=1.0, step=0)


# --- how it starts --------------------------------------------------------------------------------------------------


def test_an_address_that_is_taken_with_keys(tmp_path: Path) -> None:
    make_keys(tmp_path)
    keys = ServerKeys.read(tmp_path / "server")
    first = Server("tcp://127.0.0.1:*", ServiceOptions(num_workers=1), keys)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(ServerError, match=r"Address already in use.*is another server there"):
            Server(first.address, ServiceOptions(num_workers=1), keys)
    assert threading.active_count() == before
    first.close()


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ServerError, match=r"nowhere:5555: .*; expected an address of this machine"):
        Server("tcp://nowhere:5555", ServiceOptions(num_workers=1), ServerKeys(b"", b"", frozenset()))


@pytest.mark.parametrize("side", ["server", "worker"])
def test_a_key_in_other_characters_is_named(tmp_path: Path, side: str) -> None:
    make_keys(tmp_path)
    read = ServerKeys.read if side == "server" else WorkerKeys.read
    for key in (b"~" * 40, b"#" * 40):  # no digit of Z85; digits that make a number too large
        file = tmp_path / side / "worker.public"
        file.write_bytes(key)
        with pytest.raises(ServerError, match=rf"{file}: expected a key in Z85"):
            read(tmp_path / side)


def test_a_channel_that_cannot_be_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[zmq.Context]()

    class Context(zmq.Context):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(zmq, "Context", Context)
    bad = WorkerKeys(b"~" * 40, b"~" * 40, b"~" * 40)
    with pytest.raises(ServerError, match=r"cannot connect to tcp://127\.0\.0\.1:5555"):
        open_channel(["tcp://127.0.0.1:5555"], lambda error: None, keys=bad)
    assert [context.closed for context in made] == [True]


def test_localhost() -> None:
    port = reserve_port()
    server = Server(f"tcp://localhost:{port}", ServiceOptions(num_workers=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    Worker(f"tcp://localhost:{port}").channel.close()
    server.stop()
    thread.join(10.0)
    assert not thread.is_alive()


# --- how it ends ----------------------------------------------------------------------------------------------------


def test_a_server_that_is_stopped_serves_until_workers_have_left() -> None:
    values = torch.randn(1000)
    with _serving() as (server, thread):
        worker = Worker(server.address)
        worker.ask(Kind.PUT, pack_values(_about(1000), values.numpy().tobytes()))
        server.stop()
        server.stop()
        time.sleep(1.0)
        found = worker.ask(Kind.GET, _about(1000).pack(), 4000)
        assert torch.equal(found.view(torch.float32), values)
        assert thread.is_alive()
        worker.channel.close()
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("at_once", [False, True])
def test_workers_hear_at_once_of_a_server_that_ends(at_once: bool) -> None:
    with _serving(grace_s=0.5) as (server, _):
        worker = Worker(server.address)
        started = time.monotonic()
        server.stop(at_once=at_once)
        assert worker.failed.wait(10.0)
        assert time.monotonic() - started < 10.0
    assert isinstance(worker.error, ServerError)
    assert "server 0 of 1 was stopped while it had worker 0" in str(worker.error)


def test_a_worker_that_ended_without_goodbye_is_not_waited_for() -> None:
    with _serving() as (server, thread), zmq.Context() as context:
        worker = context.socket(zmq.DEALER)
        worker.connect(server.address)
        hello = Frame(kind=Kind.HELLO, session=SESSION, payload=Hello(0, 1, 0, 1, "a plan").pack())
        worker.send_multipart([hello.header(), hello.payload])
        worker.recv_multipart()
        server.stop()
        time.sleep(1.0)
        assert thread.is_alive()
        worker.close(linger=0)
        thread.join(5.0)
        assert not thread.is_alive()


def test_the_same_signal_twice_ends_a_server_and_another_one_does_not() -> None:
    server = start(1, 0, 1, "--heartbeat-timeout", "600")
    worker = Worker(server.address)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1):  # the last as `launch` asks
        server.process.send_signal(number)
        time.sleep(1.0)
        assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert worker.failed.wait(5.0)
    assert "serving on until the run is over, for 60 s at most" in server.output()
    server.close()


# --- payloads of any size, and strangers ----------------------------------------------------------------------------


def test_a_payload_of_several_parts_arrives_as_it_was() -> None:
    for numel in (PART_NBYTES // 4, PART_NBYTES // 4 + 1, PART_NBYTES):
        values = torch.randn(numel)
        with _serving() as (server, _):
            worker = Worker(server.address)
            worker.ask(Kind.PUT, pack_values(_about(numel), values.numpy().tobytes()))
            found = worker.ask(Kind.GET, _about(numel).pack(), 4 * numel)
            assert torch.equal(found.view(torch.float32), values)
            worker.channel.close()


def _resident_nbytes(server: ServerProcess) -> int:
    statm = Path(f"/proc/{server.process.pid}/statm").read_text()
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _greet(server: ServerProcess, mechanism: bytes) -> socket.socket:
    """Connect and say, in ZMTP 3.0, with which mechanism; the server's greeting is read."""
    host, port = server.address.removeprefix("tcp://").split(":")
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    peer.settimeout(30.0)
    peer.connect((host, int(port)))
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:
        greeting += peer.recv(64 - len(greeting))
    return peer


def _flood(server: ServerProcess, peer: socket.socket) -> int:
    """Send a command of 64 MiB, but its end; return the most that the server held, which must hang up."""
    most, block = 0, bytes(1 << 20)
    try:
        peer.sendall(b"\x06" + struct.pack(">Q", 64 << 20))
        for _ in range(63):
            peer.sendall(block)
            most = max(most, _resident_nbytes(server))
    except ConnectionError:
        return most
    raise AssertionError(f"the server took 64 MiB, and held {most} bytes")


def test_peers_without_keys_make_a_server_hold_no_memory(tmp_path: Path) -> None:
    """A huge command instead of a handshake is not read; neither is a small one kept for long."""
    make_keys(tmp_path)
    with contextlib.closing(start(1, 0, 1, "--keys", str(tmp_path / "server"))) as server:
        before = most = _resident_nbytes(server)
        for _ in range(8):
            with contextlib.closing(_greet(server, b"CURVE")) as peer:
                most = max(most, _flood(server, peer))
        assert most - before < 8 << 20
        with contextlib.closing(_greet(server, b"CURVE")) as slow:
            slow.sendall(b"\x06" + struct.pack(">Q", PART_NBYTES) + bytes(1 << 20))
            began = time.monotonic()
            assert slow.recv(1) == b""  # it shows no key: turned away
            assert time.monotonic() - began < 20.0  # libzmq's own limit is 30


def test_a_peer_that_does_not_read_its_answers_makes_a_server_hold_no_memory() -> None:
    with contextlib.closing(start(2)) as server, contextlib.closing(_greet(server, b"NULL")) as peer:
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        hello = Frame(kind=Kind.HELLO, session=SESSION, sender=7, payload=Hello(7, 2, 0, 1, "a plan").pack())
        message = b"\x01" + bytes([FRAME_NBYTES]) + hello.header() + b"\0" + bytes([len(hello.payload)]) + hello.payload
        peer.sendall(12_000 * message)  # more than the kernel holds answers to
        time.sleep(3.0)
        before = _resident_nbytes(server)
        for _ in range(30):
            peer.sendall(1000 * message)
        time.sleep(3.0)
        assert _resident_nbytes(server) - before < 8 << 20
        assert 10 <= len(server.output().splitlines()) < 100  # in lines a few, in numbers all
