"""Frames: what is damaged is refused with a reason, and never does anything."""

import json
import logging

import pytest
import torch
from fuzz import fuzz
from hypothesis import given
from hypothesis import strategies as st
from in_one_process import SESSION, Cluster

from thinwire import Identity, PlanOptions
from thinwire.aggregators import PushPull
from thinwire.aggregators.push_pull import describe
from thinwire.errors import WireError
from thinwire.plan import build_plan
from thinwire.server.content import parse_content
from thinwire.server.protocol import Failure, Hello, Kind
from thinwire.wire import FRAME_NBYTES, Frame, digest_of, parse_frame

NUMBERS = st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    Frame,
    kind=st.integers(0, 255),
    flags=st.integers(0, 255),
    session=NUMBERS,
    content=NUMBERS,
    round=NUMBERS,
    clock=NUMBERS,
    sender=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=64),
)


@pytest.fixture
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="thinwire")


@given(FRAMES)
def test_a_frame_comes_back(frame):
    assert len(frame.header()) == FRAME_NBYTES
    assert parse_frame(frame.header(), frame.payload) == frame


@given(FRAMES, st.data())
def test_no_bit_may_change(frame, data):
    sent = bytearray(frame.header() + bytes(frame.payload))
    at = data.draw(st.integers(0, 8 * len(sent) - 1))
    sent[at // 8] ^= 1 << at % 8
    with pytest.raises(WireError, match="frame: expected"):
        parse_frame(bytes(sent[:FRAME_NBYTES]), bytes(sent[FRAME_NBYTES:]))


@given(st.binary(max_size=130), st.binary(max_size=64))
def test_noise_is_no_frame(header, payload):
    with pytest.raises(WireError, match="frame: expected"):
        parse_frame(header, payload)


def test_another_version_is_named():
    header = bytearray(Frame(kind=1, session=1).header())
    header[4] += 1
    with pytest.raises(WireError, match=r"expected version 1 and wire format .*got 2 and"):
        parse_frame(bytes(header), b"")


@given(st.one_of(st.binary(max_size=40), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rank", "kind", "x"]), inner),
    max_leaves=5,
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_texts_are_checked(data):
    for kind in (Hello, Failure):
        with pytest.raises(WireError):
            kind.parse(data)


def _content() -> str:
    options = PlanOptions(min_nbytes=0, compress_1d=True)
    plan = build_plan([("w", torch.zeros(3, 5))], lambda _: PushPull(up=Identity(), down=Identity()), 2, options)
    return describe(plan.params[0].partitions, ["w"], 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3), ("place", 1), ("place", -1), ("place", True), ("key", 1 << 64), ("dtype", "int8"), ("dtype", []),
        ("offset", -4), ("offset", 1.5), ("numel", 1 << 40), ("numel", None), ("shape", [3, 6]), ("shape", "x"),
        ("shape", [-3, -5]), ("up", "no-such-kind"), ("up", "topk:0.01"), ("down", "sign"), ("up", None),
        ("up", "lowrank:2"), ("feedback", "nonsense"), ("feedback", 7),
    ],
)  # fmt: skip
def test_what_a_content_says_is_checked(field, value):
    described = json.loads(_content())
    described["partitions"][0][field] = value
    with pytest.raises(WireError, match="content: "):
        parse_content(json.dumps(described), 2)


def test_a_content_of_another_world_or_twice_the_same_partition():
    described = json.loads(_content())
    assert parse_content(json.dumps(described), 2).layout.partitions[0].numel == 15
    with pytest.raises(WireError, match="expected 3 workers, got 2"):
        parse_content(json.dumps(described), 3)
    described["partitions"] *= 2
    with pytest.raises(WireError, match="every partition once"):
        parse_content(json.dumps(described), 2)


@pytest.mark.usefixtures("_quiet")
def test_a_worker_whose_bytes_are_damaged_ends_the_run_and_is_named():
    cluster = Cluster(2)
    good = cluster.frame(Kind.PUSH, 1, "content", payload=b"1234")
    cluster.services[0].receive(1, good.header(), b"1235")
    for rank in (0, 1):
        (frame,) = cluster.inbox[0, rank]
        failure = Failure.parse(frame.payload)
        assert (frame.kind, failure.kind) == (Kind.ERROR, "refused")
        assert "server 0 of 1: what worker 1 sent: frame: expected the checksum" in failure.message
    assert cluster.services[0].refused == {"malformed": 1}


@pytest.mark.usefixtures("_quiet")
def test_the_first_difference_between_plans_is_named():
    cluster = Cluster(2)
    service = cluster.services[0]
    for rank in (0, 1):
        cluster.send(0, rank, Frame(kind=Kind.BYE, session=SESSION, sender=rank))
    for rank, plan in ((1, "a\nb: topk"), (0, "a\nb: int8")):
        hello = Hello(rank, 2, 0, 1, plan).pack()
        cluster.send(0, rank, Frame(kind=Kind.HELLO, session=99, sender=rank, payload=hello))
    for rank in (0, 1):
        (frame,) = cluster.inbox[0, rank]
        message = Failure.parse(frame.payload).message
        assert "different plans: worker 1 has `b: topk`, worker 0 has `b: int8`" in message
    assert service.refused == {"plan": 1}


@pytest.mark.usefixtures("_quiet")
def test_another_run_has_to_wait_for_the_end_of_this_one():
    cluster = Cluster(2)
    hello = Frame(kind=Kind.HELLO, session=99, sender=0, payload=Hello(0, 2, 0, 1, "p").pack())
    cluster.send(0, 0, hello)
    (frame,) = cluster.inbox[0, 0]
    assert "another run is under way" in Failure.parse(frame.payload).message
    assert frame.session == 99
    cluster.inbox[0, 0].clear()
    for rank in (0, 1):
        cluster.send(0, rank, Frame(kind=Kind.BYE, session=SESSION, sender=rank))
    cluster.send(0, 0, hello)
    cluster.send(0, 1, Frame(kind=Kind.HELLO, session=99, sender=1, payload=Hello(1, 2, 0, 1, "p").pack()))
    assert [cluster.inbox[0, rank][0].kind for rank in (0, 1)] == [Kind.WELCOME] * 2


def test_the_digest_of_a_content_is_never_zero():
    assert digest_of("") > 0


@pytest.mark.usefixtures("_quiet")
def test_nonsense_has_no_effect():
    service = fuzz(20_000)
    assert set(service.refused) >= {"malformed", "foreign", "late", "out of order"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("_quiet")
def test_a_million_frames_of_nonsense():
    service = fuzz(1_000_000, seed=1, every=10_000)
    assert sum(service.refused.values()) > 900_000
