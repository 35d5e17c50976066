"""A worker's side of the sockets, against sockets that only listen."""

import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq
from channels import SESSION, open_channel

from thinwire.errors import RankLostError, ServerError
from thinwire.server import channel as module
from thinwire.server.protocol import Clocks, Failure, Kind, Welcome
from thinwire.server.sockets import Wake
from thinwire.wire import Frame, parse_frame


@pytest.fixture
def listeners() -> Iterator[list[zmq.Socket[bytes]]]:
    context = zmq.Context()
    sockets = [context.socket(zmq.ROUTER) for _ in range(2)]
    for socket in sockets:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("tcp://127.0.0.1:*")
    yield sockets
    for socket in sockets:
        socket.close()
    context.term()


class Worker:
    """A channel whose owner closes it on an error, as the driver does."""

    def __init__(self, listeners: list[zmq.Socket[bytes]], timeout_s: float = 5.0, world_size: int = 1) -> None:
        self.errors: list[BaseException] = []
        self.failed, self.sockets_closed = threading.Event(), False
        addresses = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in listeners]
        self.channel = open_channel(addresses, self._fail, timeout_s=timeout_s, world_size=world_size)

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.sockets_closed = all(socket.closed for socket in self.channel._sockets)
        self.channel.close(f"{type(error).__name__}: {error}")
        self.failed.set()


def _heard(listener: zmq.Socket[bytes], timeout_s: float) -> Frame | None:
    if not listener.poll(1000 * timeout_s):
        return None
    _, header, payload = listener.recv_multipart()
    return parse_frame(header, payload)


def _serve(listener: zmq.Socket[bytes], seconds: float, answer: Callable[[Frame], tuple[Kind, bytes] | None]) -> None:
    """Answer frames of one worker, as server 0, for so long."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if listener.poll(1000 * left):
            peer, header, payload = listener.recv_multipart()
            if (said := answer(parse_frame(header, payload))) is not None:
                frame = Frame(kind=said[0], session=SESSION, sender=0, payload=said[1])
                listener.send_multipart([peer, frame.header(), said[1]])


@pytest.mark.parametrize("ends", [False, True])
def test_that_a_server_has_another_run_is_said(listeners: list[zmq.Socket[bytes]], ends: bool) -> None:
    """And only as long as it has: whoever is taken in the end waits for other workers, and sends heartbeats."""
    kinds, came_s = list[Kind](), list[float]()
    busy = Kind.ERROR, Failure("busy", "server 0 of 1: another run is under way here").pack()

    def answer(frame: Frame) -> tuple[Kind, bytes] | None:
        kinds.append(Kind(frame.kind))
        came_s.append(time.monotonic())
        return busy if frame.kind == Kind.HELLO and not (ends and kinds.count(Kind.HELLO) > 2) else None

    worker = Worker(listeners[:1])
    server = threading.Thread(target=_serve, args=(listeners[0], 5.0, answer))
    server.start()
    with pytest.raises(ServerError) as told:
        worker.channel.hello("plan", 4.0)
    server.join()
    worker.channel.close()
    message = str(told.value)
    assert "expected a welcome within 4 s" in message
    said = re.search(r"attached\? (\S+) s ago it said: server 0 of 1: another run is under way here", message)
    assert said is not None
    assert (float(said[1]) > 2) == ends
    assert (kinds.count(Kind.HELLO) == 3) == ends
    if ends:  # with the hello that is taken, beats begin: ten in a second
        taken = [i for i, kind in enumerate(kinds) if kind == Kind.HELLO][2]
        assert came_s[kinds.index(Kind.HEARTBEAT, taken)] - came_s[taken] < 1.0
    else:
        assert kinds.count(Kind.HEARTBEAT) < 10


def test_a_lost_worker_is_not_the_one_that_is_behind(listeners: list[zmq.Socket[bytes]]) -> None:
    def answer(frame: Frame) -> tuple[Kind, bytes] | None:
        if frame.kind == Kind.HELLO:
            return Kind.WELCOME, Welcome("continue").pack()
        return (Kind.HEARTBEAT, Clocks([3, -1, 2]).pack()) if frame.kind == Kind.HEARTBEAT else None

    worker = Worker(listeners[:1], timeout_s=1.0, world_size=3)
    server = threading.Thread(target=_serve, args=(listeners[0], 3.0, answer))
    server.start()
    worker.channel.hello("plan", 3.0)
    worker.channel.expect(0, 1, 0, torch.empty(8, dtype=torch.uint8), lambda: None)
    assert worker.failed.wait(5.0)
    server.join()
    (error,) = worker.errors
    assert isinstance(error, RankLostError)
    assert "fewest exchanges begun: rank 2 (2), which lives but does not come" in str(error)


def test_a_goodbye_has_left_when_close_returns(listeners: list[zmq.Socket[bytes]]) -> None:
    worker = Worker(listeners)
    worker.channel.close("ValueError: no")
    assert not worker.channel._thread.is_alive()
    for listener in listeners:
        frame = _heard(listener, 5.0)
        assert frame is not None
        assert (frame.kind, Failure.parse(frame.payload)) == (Kind.BYE, Failure("worker", "ValueError: no"))
    worker.channel.close("again")
    worker.channel.send(0, Kind.HEARTBEAT)
    assert _heard(listeners[0], 0.2) is None


def test_a_wake_bears_a_signal_in_its_middle() -> None:
    """A server is stopped from a handler, which runs in the thread that may be in `set` or `clear` just then."""
    wake = Wake()
    before = signal.signal(signal.SIGVTALRM, lambda *_: wake.set())
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 1e-4)
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            wake.set()
            assert select.select([wake.fd], [], [], 1.0)[0]
            wake.clear()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    wake.set()
    wake.clear()
    assert not select.select([wake.fd], [], [], 0.0)[0]
    wake.close()
    wake.set()


def test_a_server_that_is_gone_does_not_hold_a_worker(listeners: list[zmq.Socket[bytes]]) -> None:
    worker = Worker(listeners)
    for listener in listeners:
        listener.close()
    time.sleep(0.2)
    started = time.monotonic()
    worker.channel.close()
    assert not worker.channel._thread.is_alive()
    assert time.monotonic() - started < 5.0


def test_all_others_hear_why_a_worker_that_one_turned_away_gives_up(
    listeners: list[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, send = Worker(listeners), module.send_frame

    def send_frame(socket: object, prefix: list[bytes], header: bytes, payload: bytes) -> None:
        if socket is worker.channel._sockets[0]:
            raise zmq.Again
        send(socket, prefix, header, payload)

    monkeypatch.setattr(module, "send_frame", send_frame)
    worker.channel.send(0, Kind.HEARTBEAT)
    assert worker.failed.wait(5.0)
    (error,) = worker.errors
    assert isinstance(error, ServerError)
    assert worker.sockets_closed  # goodbyes have left before anybody hears of the error, and may end the process
    assert "server 0 at tcp://127.0.0.1" in str(error)
    assert "turned this worker away" in str(error)
    frame = _heard(listeners[1], 5.0)
    assert frame is not None
    assert frame.kind == Kind.BYE
    assert "turned this worker away" in Failure.parse(frame.payload).message
    assert _heard(listeners[0], 0.2) is None
