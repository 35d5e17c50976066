"""Rounds of a server: what is early waits, what is late or doubled is refused, and slow workers get what is theirs."""

import dataclasses
import logging
import threading
import time

import pytest
import torch
from in_one_process import SESSION, Cluster

from thinwire import BlockQuant, Identity, PlanOptions
from thinwire.aggregators import Message, PushPull
from thinwire.plan import build_plan
from thinwire.server.content import parse_content
from thinwire.server.engine import Engines
from thinwire.server.protocol import AND_PULL, Clocks, Failure, Kind
from thinwire.server.service import Served
from thinwire.state import State
from thinwire.wire import Frame

NUMEL = 10


class Workers:
    """Workers with one parameter, whose frames a test sends when it likes."""

    def __init__(self, num: int, **options) -> None:
        self.cluster = Cluster(num, **options)
        self.service = self.cluster.services[0]
        exact = PushPull(up=Identity(), down=Identity())
        plan = build_plan(
            [("w", torch.zeros(NUMEL))], lambda _: exact, num, PlanOptions(min_nbytes=0, compress_1d=True)
        )
        (self.layout,) = plan.messages(["w"])
        self._states = [State(plan, {"w": torch.zeros(NUMEL)}, rank) for rank in range(num)]
        self._plan = plan
        self.text = self.layout.rounds[0].contents[0]
        for rank in range(num):
            self._send(rank, Kind.DECLARE, 0, self.text.encode())

    def _send(self, rank: int, kind: Kind, round_: int, payload: bytes = b"", flags: int = 0) -> None:
        frame = self.cluster.frame(kind, rank, self.text, round_, payload)
        self.cluster.send(0, rank, dataclasses.replace(frame, flags=flags))

    def push(self, rank: int, round_: int, value: float, *, and_pull: bool = False, step: int | None = None) -> None:
        (partition,) = self.layout.partitions
        block = self._states[rank].block(partition, torch.full((NUMEL,), value), frozenset())
        transfer = next(PushPull.exchange(Message(self.layout, [block], rank, round_ if step is None else step)))
        self._send(rank, Kind.PUSH, round_, transfer.send.numpy().tobytes(), AND_PULL if and_pull else 0)

    def pull(self, rank: int, round_: int) -> None:
        self._send(rank, Kind.PULL, round_)

    def bye(self, rank: int) -> None:
        self.cluster.send(0, rank, Frame(kind=Kind.BYE, session=SESSION, sender=rank))

    def got(self, rank: int) -> list[tuple[int, float, int]]:
        """Return the means that have come: (round, value, over how many)."""
        means = []
        for frame in self.cluster.inbox[0, rank]:
            assert frame.kind == Kind.MEAN, Failure.parse(frame.payload)
            data = bytes(frame.payload)
            values = torch.frombuffer(bytearray(data[-4 * NUMEL :]), dtype=torch.float32)
            assert values.eq(values[0]).all()
            means.append((frame.round, float(values[0]), int.from_bytes(data[4:8], "little")))
        self.cluster.inbox[0, rank].clear()
        return means

    def errors(self, rank: int) -> list[Failure]:
        return [Failure.parse(f.payload) for f in self.cluster.inbox[0, rank] if f.kind == Kind.ERROR]

    @property
    def served(self) -> Served:
        (served,) = self.service._served.values()
        return served


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="thinwire")


def test_a_slow_puller_gets_its_own_round():
    """The race of BytePS's server: a fast worker's next push must not overwrite what a slow one still has to pull."""
    workers = Workers(2)
    for rank in (0, 1):
        workers.push(rank, 0, 1.0 + rank)
    workers.pull(0, 0)
    assert workers.got(0) == [(0, 1.5, 2)]
    workers.push(0, 1, 100.0)
    workers.pull(0, 1)
    assert workers.got(0) == []
    workers.pull(1, 0)
    assert workers.got(1) == [(0, 1.5, 2)]
    workers.push(1, 1, 200.0)
    assert workers.got(0) == [(1, 150.0, 2)]
    workers.pull(1, 1)
    assert workers.got(1) == [(1, 150.0, 2)]
    assert not workers.served.results
    assert not workers.service.refused


@pytest.mark.parametrize("order", ["rank", "arrival"])
def test_a_push_that_pulls_too_is_answered_once(order):
    workers = Workers(3, order=order)
    workers.push(2, 0, 3.0, and_pull=True)
    workers.push(1, 0, 2.0)
    workers.push(2, 0, 9.0, and_pull=True)
    workers.pull(2, 0)
    assert workers.service.refused == {"duplicate": 2}
    workers.push(0, 0, 1.0, and_pull=True)
    assert (workers.got(0), workers.got(1), workers.got(2)) == ([(0, 2.0, 3)], [], [(0, 2.0, 3)])
    workers.push(0, 1, 4.0, and_pull=True)  # beside the round that one has still to pull
    workers.pull(1, 0)
    assert workers.got(1) == [(0, 2.0, 3)]
    assert workers.got(0) == []


def test_frames_of_other_rounds_are_refused_and_counted():
    workers = Workers(2)
    workers.push(0, 0, 1.0)
    workers.push(0, 0, 1.0)
    workers.pull(0, 0)
    workers.pull(0, 0)
    workers.push(0, 1, 1.0)
    workers.pull(1, 5)
    workers.push(1, 0, 3.0)
    assert workers.got(0) == [(0, 2.0, 2)]
    workers.push(1, 0, 7.0)
    workers.pull(0, 0)
    workers.pull(1, 0)
    assert workers.got(1) == [(0, 2.0, 2)]
    workers.pull(1, 0)
    assert workers.service.refused == {"duplicate": 2, "out of order": 2, "late": 3}
    assert workers.got(0) == workers.got(1) == []


def test_contributions_are_added_in_the_order_of_ranks():
    workers = Workers(3)
    order = []
    add = workers.served.mean.add
    workers.served.mean.add = lambda rank, data: (order.append(rank), add(rank, data))
    for rank in (2, 1):
        workers.push(rank, 0, 1.0)
    assert order == []
    assert workers.service.missing(workers.served) == 1
    workers.push(0, 0, 1.0)
    assert order == [0, 1, 2]


def test_what_is_declared_waits_for_engine_threads_that_go_through_all_contents():
    """They do so under the lock, when a first round ends while workers are still declaring."""
    workers = Workers(1)
    plan = build_plan(
        [("v", torch.zeros(NUMEL))], lambda _: PushPull(up=Identity(), down=Identity()), 1,
        PlanOptions(min_nbytes=0, compress_1d=True),
    )  # fmt: skip
    (layout,) = plan.messages(["v"])
    text = layout.rounds[0].contents[0]
    frame = workers.cluster.frame(Kind.DECLARE, 0, text, payload=text.encode())
    receiving = threading.Thread(target=workers.cluster.send, args=(0, 0, frame))
    with workers.service._lock:
        receiving.start()
        receiving.join(0.2)
        assert receiving.is_alive()
        assert len(workers.service._served) == 1
    receiving.join(10)
    assert len(workers.service._served) == 2


def test_a_lost_worker_is_an_error_on_all_others():
    workers = Workers(3, heartbeat_timeout_s=5.0)
    workers.push(1, 0, 1.0)
    now = time.monotonic()
    for rank in (0, 2):
        frame = Frame(kind=Kind.HEARTBEAT, session=SESSION, sender=rank, clock=rank + 1)
        workers.service.receive(rank, frame.header(), b"", now + 4)
        (answer,) = workers.cluster.inbox[0, rank]
        workers.cluster.inbox[0, rank].clear()
    assert Clocks.parse(answer.payload).clocks == [1, 0, 3]
    workers.service.check_heartbeats(now + 4.5)
    assert workers.errors(0) == []
    workers.service.check_heartbeats(now + 6)
    for rank in (0, 2):
        assert workers.errors(rank) == [Failure("lost", "worker 1 said nothing for 5 s (seen by server 0 of 1)")]
    assert workers.errors(1) == []
    assert workers.service.is_over
    assert workers.service.clocks() == [1, -1, 3]


@pytest.mark.parametrize("stage", ["nothing", "pushed", "pulling", "first"])
@pytest.mark.parametrize("order", ["rank", "arrival"])
def test_those_present_finish_the_round(stage, order):
    """Whatever the lost worker has sent by then."""
    workers = Workers(3, on_worker_loss="continue", order=order)
    if stage != "nothing":
        workers.push(1, 0, 30.0)
    if stage == "pulling":
        workers.pull(1, 0)
    for rank in (0, 2):
        if stage == "first" and rank == 2:
            workers.service.lose([1], "is gone")
        workers.push(rank, 0, float(rank))
        workers.pull(rank, 0)
    if stage != "first":
        workers.service.lose([1], "is gone")
    expected = (0, 1.0, 2) if stage == "nothing" else (0, pytest.approx(32 / 3), 3)
    assert workers.got(0) == workers.got(2) == [expected]
    for rank in (2, 0):
        workers.push(rank, 1, float(rank))
        workers.pull(rank, 1)
    assert workers.got(0) == workers.got(2) == [(1, 1.0, 2)]
    assert not workers.served.results
    workers.push(1, 1, 5.0)
    assert workers.service.refused == {"late": 1}


def test_a_worker_that_was_taken_for_lost_is_told_and_can_end_nothing():
    """It was stopped and goes on, or what it sends is damaged: the others have gone on without it."""
    workers = Workers(3, on_worker_loss="continue")
    workers.service.lose([1], "is gone")
    beat = workers.cluster.frame(Kind.HEARTBEAT, 1, "")
    workers.cluster.send(0, 1, beat)
    (failure,) = workers.errors(1)
    assert failure == Failure("lost", "worker 1 was taken for lost before (seen by server 0 of 1)")
    workers.service.receive(1, beat.header()[:-1], b"")
    assert workers.service.refused == {"late": 1, "malformed": 1}
    for rank in (0, 2):
        workers.push(rank, 0, float(rank), and_pull=True)
    workers.got(0)
    assert workers.errors(0) == workers.errors(2) == []
    assert not workers.service.is_over


def test_a_round_that_ends_while_a_worker_is_taken_for_lost():
    """It has pulled with its push, and is not answered: that would be an error for all."""
    workers = Workers(3, on_worker_loss="continue")
    workers.push(2, 0, 3.0, and_pull=True)
    workers.push(0, 0, 1.0, and_pull=True)
    workers.service._lost.add(2)  # what `lose` does first, in the other thread
    workers.push(1, 0, 2.0, and_pull=True)
    assert workers.got(0) == workers.got(1) == [(0, 2.0, 3)]
    assert not workers.errors(0)
    assert not workers.served.results


def test_a_worker_that_gives_up_takes_the_others_along():
    workers = Workers(2)
    bye = Failure("worker", "ValueError: no").pack()
    workers.cluster.send(0, 1, Frame(kind=Kind.BYE, session=SESSION, sender=1, payload=bye))
    (failure,) = workers.errors(0)
    assert failure.message.startswith("worker 1 gave up: ValueError: no")


def test_a_worker_that_leaves_too_soon_is_named():
    workers = Workers(2)
    for rank in (0, 1):
        workers.push(rank, 0, 1.0)
    workers.bye(1)
    workers.pull(0, 0)
    assert workers.got(0) == [(0, 1.0, 2)]  # it may have been the last round
    workers.push(0, 1, 1.0)
    (failure,) = workers.errors(0)
    assert failure.message.startswith("worker 1 closed its link while others go on")


@pytest.mark.parametrize("on_worker_loss", ["fail", "continue"])
@pytest.mark.parametrize("order", ["rank", "arrival"])
def test_a_worker_that_leaves_while_others_wait_is_named(on_worker_loss, order):
    """No further push may come to notice it by: others have pushed all that they have."""
    workers = Workers(3, on_worker_loss=on_worker_loss, order=order)
    for rank in (0, 1, 2):
        workers.push(rank, 0, 1.0, and_pull=True)
        assert rank < 2 or workers.got(rank) == [(0, 1.0, 3)]
    for rank in (0, 2):
        workers.push(rank, 1, float(rank), and_pull=True)
    workers.got(0)
    workers.bye(1)
    if on_worker_loss == "continue":
        assert workers.got(0) == workers.got(2) == [(1, 1.0, 2)]
        assert workers.service.clocks() == [0, -1, 0]
        workers.bye(0)
        workers.bye(2)
        assert workers.service.counts["lost_workers"] == 1
    else:
        for rank in (0, 2):
            (failure,) = workers.errors(rank)
            assert failure.message == "worker 1 closed its link while others go on (seen by server 0 of 1)"


def test_a_worker_that_leaves_after_its_part_of_a_round_is_not_missed():
    workers = Workers(2)
    workers.push(1, 0, 3.0)
    workers.bye(1)
    workers.push(0, 0, 1.0, and_pull=True)
    assert workers.got(0) == [(0, 2.0, 2)]
    workers.cluster.send(0, 1, workers.cluster.frame(Kind.HEARTBEAT, 1, ""))
    assert workers.errors(1) == []  # its last sign of life was late: nobody takes it for lost
    workers.bye(0)
    assert not workers.service.counts["lost_workers"]


def test_a_push_that_is_refused_blames_nobody_who_left():
    workers = Workers(2)
    for rank in (0, 1):
        workers.push(rank, 0, 1.0, and_pull=True)
    workers.cluster.send(0, 0, Frame(kind=Kind.BYE, session=SESSION, sender=0))
    workers.push(1, 0, 1.0)
    workers.push(1, 5, 1.0)
    assert workers.service.refused == {"late": 1, "out of order": 1}
    assert not workers.service.is_over


def test_workers_at_different_steps_are_both_named():
    workers = Workers(2)
    workers.push(0, 0, 1.0)
    workers.push(1, 0, 1.0, step=3)
    for rank in (0, 1):
        (failure,) = workers.errors(rank)
        assert "what worker 1 pushed: push: expected step 0 as of worker 0, got 3" in failure.message


def test_a_goodbye_that_cannot_be_read_is_refused():
    workers = Workers(2)
    workers.cluster.send(0, 1, Frame(kind=Kind.BYE, session=SESSION, sender=1, payload=b"{"))
    assert workers.service.refused == {"malformed": 1}


def test_a_frame_that_nobody_foresaw_ends_the_run_and_not_the_server(monkeypatch):
    workers = Workers(2)
    workers.push(0, 0, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(workers.service, "_push", lambda rank, frame: 1 // 0)
        workers.push(1, 0, 1.0)
    for rank in (0, 1):
        (failure,) = workers.errors(rank)
        assert "what worker 1 sent: ZeroDivisionError" in failure.message
    assert workers.service.is_over


def test_bytes_that_are_no_encoding_end_the_run():
    workers = Workers(1)
    workers._send(0, Kind.PUSH, 0, bytes(workers.served.content.push_nbytes))  # a loss scale of 0
    (failure,) = workers.errors(0)
    assert "what worker 0 pushed: push: expected a positive loss scale" in failure.message


def test_compressed_partitions_weigh_more():
    texts = []
    for compressor in (Identity(), BlockQuant(bits=8)):
        settings = PushPull(up=compressor, down=compressor)
        plan = build_plan([("w", torch.zeros(100, 100))], lambda _, s=settings: s, 2, PlanOptions(min_nbytes=0))
        texts.append(plan.messages(["w"])[0].rounds[0].contents[0])
    exact, compressed = (parse_content(text, 2).work for text in texts)
    assert (exact, compressed) == (40_000, 80_000)


class _Stub:
    thread = 0

    def __init__(self, missing: int) -> None:
        self.missing = missing


def test_an_engine_thread_takes_what_is_nearest_to_completion():
    done, started, go_on = [], threading.Event(), threading.Event()

    def work(one):
        done.append(one.missing)
        started.set()
        assert go_on.wait(10)

    engines = Engines(1, work, lambda one: one.missing)
    first, *others = (_Stub(missing) for missing in (9, 3, 1, 2))
    engines.wake(first)
    assert started.wait(10)
    for one in others:
        engines.wake(one)
    others[0].missing = 0  # another contribution has come meanwhile
    go_on.set()
    deadline = time.monotonic() + 10
    while len(done) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    engines.close()
    assert done == [9, 0, 1, 2]
