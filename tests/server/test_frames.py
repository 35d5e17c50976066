"""Frames: what is damaged is refused with a reason, and never does anything."""

import dataclasses
import json
import logging

import pytest
import torch
from fuzz import fuzz, fuzz_workers
from hypothesis import given
from hypothesis import strategies as st
from in_one_process import SESSION, Cluster

from thinwire import Identity, PlanOptions
from thinwire.aggregators import PushPull
from thinwire.aggregators.push_pull import describe
from thinwire.errors import WireError
from thinwire.plan import build_plan
from thinwire.server.content import parse_content
from thinwire.server.protocol import AND_PULL, Failure, Hello, Kind, Residuals, pack_values
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
    with pytest.raises(WireError, match=r"expected version 2 and wire format .*got 3 and"):
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
        ("feedback", 0), ("feedback", False), ("feedback", []), ("feedback", {}), ("shape", [1 << 70]),
    ],
)  # fmt: skip
def test_what_a_content_says_is_checked(field, value):
    described = json.loads(_content())
    described["partitions"][0][field] = value
    with pytest.raises(WireError, match="content: "):
        parse_content(json.dumps(described), 2)


def test_a_shape_is_as_large_as_it_says():
    """Whatever its product is in 64 bits."""
    described = json.loads(_content())
    for numel, shape in ((0, [1 << 32, 1 << 32]), (4, [1 << 62, 5])):
        described["partitions"][0].update(numel=numel, shape=shape)
        with pytest.raises(WireError, match=f"expected a shape of {numel} elements"):
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


@pytest.mark.usefixtures("_quiet")
def test_once_all_have_said_hello_a_stranger_ends_no_run():
    cluster = Cluster(2)
    for rank, world_size in ((77, 2), (2, 3), (-1, 2)):
        hello = Hello(rank, world_size, 0, 1, "another plan").pack()
        frame = Frame(kind=Kind.HELLO, session=SESSION, sender=max(rank, 0), payload=hello)
        cluster.services[0].receive("a stranger", frame.header(), frame.payload)
    assert cluster.services[0].refused == {"foreign": 3}
    assert not any(cluster.inbox.values())
    assert not cluster.services[0].is_over


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(
    ("kind", "flags", "payload", "match"),
    [
        (Kind.PULL, 0, b"x", "pull: expected no payload, got 1 bytes"),
        (Kind.HEARTBEAT, 0, b"x", "heartbeat: expected no payload, got 1 bytes"),
        (Kind.PULL, AND_PULL, b"", "expected flags of a frame of kind 5, at most 0, got 1"),
        (Kind.PUSH, 6, b"", "expected flags of a frame of kind 4, at most 1, got 6"),
        (13, 0, b"", "expected a frame that workers send, got kind 13"),
    ],
)
def test_a_request_has_the_flags_and_the_payload_of_its_kind(kind, flags, payload, match):
    cluster = Cluster(2)
    cluster.send(0, 1, Frame(kind=kind, session=SESSION, sender=1, flags=flags, payload=payload))
    for rank in (0, 1):
        (frame,) = cluster.inbox[0, rank]
        assert f"what worker 1 sent: {match}" in Failure.parse(frame.payload).message


RESIDUALS = Residuals(["w", "v"], [0, 0], [3, 1], [0.1, 0.0], 2.0, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"names": ["w"]}, {"names": ["w", "w"]}, {"offsets": [0, -1]}, {"numels": [3, -1]}, {"loss_scale": 0.0},
        {"loss_scale": float("nan")}, {"loss_scale": float("inf")}, {"rates": [0.1, float("nan")]},
        {"rates": [-0.1, 0.0]}, {"rates": [0.1, float("inf")]}, {"numels": [10**4299] * 2}, {"numels": [1 << 28, 1]},
    ],
)  # fmt: skip
def test_what_a_question_about_residuals_says_is_checked(changes):
    for found in (RESIDUALS, Residuals([], [], [], [], 1.0, 0)):
        found.check()
    with pytest.raises(WireError, match="Residuals: expected"):
        dataclasses.replace(RESIDUALS, **changes).check()


@pytest.mark.usefixtures("_quiet")
def test_residuals_that_no_server_can_have_kept_end_the_run():
    for text, values, match in (
        (RESIDUALS, [1.0, 2.0, 3.0], "expected 4 values, got 12 bytes"),
        (RESIDUALS, [1.0, 2.0, float("nan"), 3.0], "expected residuals that are finite"),
        (dataclasses.replace(RESIDUALS, numels=[10**4299] * 2), [1.0], "Residuals: expected offsets, and sizes"),
    ):
        cluster = Cluster(2)
        payload = pack_values(text, torch.tensor(values).numpy().tobytes())
        cluster.send(0, 1, Frame(kind=Kind.PUT, session=SESSION, sender=1, payload=payload))
        (frame,) = cluster.inbox[0, 0]
        assert f"what worker 1 sent: {match}" in Failure.parse(frame.payload).message


@pytest.mark.parametrize("depth", [10, 300, 980, 990, 2000, 100_000])
def test_a_text_may_be_as_deep_as_it_likes(depth):
    nested = b"[" * depth + b"]" * depth
    for data in (nested, b'{"kind": "x", "message": ' + nested + b"}"):
        with pytest.raises(WireError, match="Failure: expected"):
            Failure.parse(data)


def test_the_digest_of_a_content_is_never_zero():
    assert digest_of("") > 0


def test_nonsense_has_no_effect():
    assert set(fuzz(10_000)) >= {"malformed", "foreign", "late", "out of order", "duplicate"}


def test_nonsense_of_workers_ends_the_run_in_their_names_or_has_no_effect():
    outcomes = fuzz_workers(1000)
    assert set(outcomes) >= {"ended the run: malformed", "ended the run: content", "refused: late", "taken"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_frames_of_nonsense():
    assert fuzz(1_000_000, seed=1, every=10_000).total() > 900_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_frames_of_nonsense_of_workers():
    assert fuzz_workers(30_000, seed=1).total() == 30_000
