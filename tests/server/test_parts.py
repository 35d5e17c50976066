"""A server's socket: what is no frame is counted and named, and a known worker's ends the run."""

import logging
import threading
from collections.abc import Iterator

import pytest
import zmq

from thinwire.server.process import Server
from thinwire.server.protocol import Failure, Hello, Kind
from thinwire.server.service import ServiceOptions
from thinwire.wire import Frame, parse_frame

SESSION = 7


class Peer:
    """One connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(address)

    def say(self, kind: Kind, rank: int, payload: bytes = b"", session: int = SESSION) -> None:
        frame = Frame(kind=kind, session=session, sender=rank, payload=payload)
        self.socket.send_multipart([frame.header(), payload])

    def heard(self) -> Frame:
        header, payload = self.socket.recv_multipart()
        return parse_frame(header, payload)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("tcp://127.0.0.1:0", ServiceOptions(num_workers=2))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop(at_once=True)
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def peers(server: Server) -> Iterator[list[Peer]]:
    """Two workers of a run, and a stranger."""
    context = zmq.Context()
    peers = [Peer(context, server.address) for _ in range(3)]
    for rank in (0, 1):
        peers[rank].say(Kind.HELLO, rank, Hello(rank, 2, 0, 1, "plan").pack())
    assert [peer.heard().kind for peer in peers[:2]] == [Kind.WELCOME] * 2
    yield peers
    context.destroy(linger=0)


MESSAGES = {
    "expected parts, a header and a payload, got 1 of 3 bytes": [b"one"],
    "expected parts, a header and a payload, got 1 of 0 bytes": [b""],
    "frame: expected a header of 64 bytes, got 3": [b"one", b"", b"three"],
    "frame: expected a header of 64 bytes, got 0": [b""] * 9,
}


def test_a_stranger_that_sends_any_number_of_parts_is_named(
    server: Server, peers: list[Peer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="thinwire")
    for parts in MESSAGES.values():
        peers[2].socket.send_multipart(parts)
    peers[2].say(Kind.HELLO, 0, Hello(0, 2, 0, 1, "plan").pack(), session=8)
    assert peers[2].heard().kind == Kind.ERROR  # "busy": so all of it has arrived
    assert caplog.messages == [f"refused a frame of an unknown peer: {why}" for why in MESSAGES]
    assert server.service.refused["malformed"] == len(MESSAGES)
    peers[1].say(Kind.HEARTBEAT, 1)
    assert peers[1].heard().kind == Kind.HEARTBEAT


def test_parts_of_more_bytes_than_a_payload_may_have_are_not_joined(
    server: Server, peers: list[Peer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="thinwire")
    monkeypatch.setattr("thinwire.server.process.MAX_PAYLOAD_NBYTES", 100)
    peers[1].socket.send_multipart([bytes(64), bytes(60), bytes(60)])
    said = "server 0 of 1: what worker 1 sent: expected a payload of 100 bytes at most, got 120"
    for peer in peers[:2]:
        assert Failure.parse(peer.heard().payload) == Failure("refused", said)
    assert server.service.refused == {"malformed": 1}


@pytest.mark.parametrize("why", MESSAGES)
def test_a_worker_that_does_ends_the_run_and_is_named(
    peers: list[Peer], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="thinwire")
    peers[1].socket.send_multipart(MESSAGES[why])
    said = f"server 0 of 1: what worker 1 sent: {why}"
    for peer in peers[:2]:
        assert Failure.parse(peer.heard().payload) == Failure("refused", said)
