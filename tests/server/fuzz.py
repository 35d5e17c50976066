"""A frame fuzzer. A run of two workers goes on while somebody sends all kinds of nonsense.

    python tests/server/fuzz.py 1000000                  a third peer, and replays of the workers
    python tests/server/fuzz.py 100000 --from workers    workers of the run, whose frames are whole but say nonsense

What a stranger sends must be refused with a reason and be without effect: the run's means stay those of an undisturbed
run, to the bit. What a worker sends is either refused without effect, too, or ends the run with an error that names it.
Nobody may raise anything else in a server. What is well-formed is believed: a worker may push any gradient, and set any
residual, or say that the last round came to nothing.
"""

import argparse
import contextlib
import dataclasses
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "aggregators"))

from bodies import body_changed
from in_one_process import SESSION, Cluster, ServedWorld
from world import World, bits

from thinwire import TwoShot, parse_recipe
from thinwire.server.lines import FewLines
from thinwire.server.protocol import AND_PULL, Failure, Kind, Residuals, pack_values
from thinwire.server.service import Service, ServiceOptions
from thinwire.wire import Data, Frame, parse_frame

STRANGER = "a stranger"
NAMES = {STRANGER: "an unknown peer", 0: "worker 0", 1: "worker 1"}
WITHOUT_EFFECT = {"late", "duplicate", "out of order", "busy", "foreign"}
LATER = 1 << 40  # steps committed: more than there are
SHAPES = {"layer.weight": (16, 15), "layer.bias": (7,)}  # three partitions
RECIPES = (
    "topk:0.05", "onebit", "int4@ef", "lowrank:2", "topk:0.05@ef:lr", "randomk:0.1", "natural:3", "topk:0.1~int8",
    "fp16", "identity", "terngrad", "topk:0.05@dgc:0.9", "int8:rotation=32", "minmax:4:bagua", "topk:0.1+int8",
)  # fmt: skip


class Log(logging.Handler):
    """What the library says of refusals; anything worse is an error here, whoever caught it there."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()
        if record.exc_info or record.levelno >= logging.ERROR:
            raise AssertionError(f"a server got into trouble: {self.last}") from (record.exc_info or [None] * 2)[1]


@contextlib.contextmanager
def listening() -> Iterator[Log]:
    """Take all that the library logs, and would log if lines were not few."""
    logger, log = logging.getLogger("thinwire"), Log()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(log)
    try:
        with mock.patch.object(FewLines, "admit", return_value=0):
            yield log
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
        logger.propagate = propagate


# --- strangers, and replays -------------------------------------------------------------------------------------------


class Recorder(Cluster):
    """Remembers frames, for replays; strangers get nothing but errors."""

    def __init__(self, *args, **kwargs) -> None:
        self.first: list[tuple[int, Frame]] = []
        self.seen: list[tuple[int, Frame]] = []
        super().__init__(*args, **kwargs)

    def send(self, server: int, rank: int, frame: Frame, *, peer: int | None = None) -> None:
        self.seen.append((rank, frame))
        if len(self.first) < 20:  # greetings and declarations, which do not come again
            self.first.append((rank, frame))
        del self.seen[:-200]
        super().send(server, rank, frame, peer=peer)

    def _sender(self, server: int):
        to_worker = super()._sender(server)

        def send(peer: object, header: bytes, payload: Data) -> None:
            if peer != STRANGER:
                to_worker(peer, header, payload)
            else:
                assert parse_frame(header, bytes(payload)).kind == Kind.ERROR

        return send


def nonsense(rng: random.Random, cluster: Recorder, contents: list[int]) -> tuple[str | int, bytes, Data]:
    """Return a peer, a header and a payload that must not be taken."""
    rank, frame = rng.choice(rng.choice((cluster.first, cluster.seen)))
    header, payload = frame.header(), bytes(frame.payload)
    match rng.randrange(9):
        case 0:  # noise
            return STRANGER, rng.randbytes(rng.choice((0, 1, 63, 64, 65, 200))), rng.randbytes(rng.randrange(64))
        case 1:  # bits flipped in the header
            at = rng.randrange(len(header))
            flipped = header[:at] + bytes([header[at] ^ 1 << rng.randrange(8)]) + header[at + 1 :]
            return STRANGER, flipped, payload
        case 2:  # cut short, or too long
            cut = rng.randrange(len(payload) + 1)
            return STRANGER, header, payload[:cut] if cut < len(payload) else payload + b"x"
        case 3:  # whole, but from a peer that nobody knows
            return STRANGER, header, payload
        case 4:  # replayed by the worker itself: late, or a duplicate
            return rank, header, payload
        case 5:  # of another run, or in another worker's name
            kind = rng.choice((Kind.PUSH, Kind.PULL, Kind.DECLARE, Kind.BYE, Kind.HEARTBEAT))
            session, sender = rng.choice(((SESSION + 1, 0), (SESSION, 1), (SESSION, 77), (0, 0)))
            frame = Frame(kind=kind, session=session, sender=sender, content=rng.choice(contents), payload=payload)
            return 0, frame.header(), payload
        case 6:  # a round to come
            kind, round_ = rng.choice((Kind.PUSH, Kind.PULL)), rng.randrange(1 << 40, 1 << 63)
            content, flags = rng.choice(contents), rng.choice((0, AND_PULL)) if kind == Kind.PUSH else 0
            payload = payload if kind == Kind.PUSH else b""
            frame = Frame(
                kind=kind, session=SESSION, sender=0, content=content, round=round_, flags=flags, payload=payload
            )
            return 0, frame.header(), payload
        case _:  # whole, with another body, in anybody's name
            frames = [one for _, one in rng.sample(cluster.first, 4)]
            frame = body_changed(rng, rng.choice((frame, *_more(SESSION))), frames)
            session, sender = rng.choice(((SESSION, rank), (SESSION, rank), (SESSION, 77), (SESSION + 1, rank)))
            frame = dataclasses.replace(frame, session=session, sender=sender)
            return STRANGER, frame.header(), frame.payload


def fuzz(count: int, *, seed: int = 0, every: int = 1000) -> Counter[str]:
    """Send `count` nonsense frames, and do a step of the run after every so many; return the refusals."""
    rng = random.Random(seed)
    two_shot = parse_recipe("topk:0.05")
    assert isinstance(two_shot, TwoShot)
    plain, served = World(two_shot, 2), ServedWorld(two_shot, 2)
    cluster = Recorder(2)
    served.cluster = cluster
    (service,) = cluster.services
    sent = 0
    with listening() as log:
        while sent < count:
            assert [bits(v) for v in served.run()] == [bits(v) for v in plain.run()]
            contents = list(service._served)
            for _ in range(min(every, count - sent)):
                peer, header, payload = nonsense(rng, cluster, contents)
                before = sum(service.refused.values())
                service.receive(peer, header, payload)
                sent += 1
                # A worker may declare a content again; everything else is refused, and whose it was is named.
                if peer == STRANGER or header[6] != Kind.DECLARE:
                    assert sum(service.refused.values()) == before + 1
                    assert log.last.startswith(f"refused a frame of {NAMES[peer]}: ")
            assert not any(cluster.inbox.values())
        assert [bits(v) for v in served.run()] == [bits(v) for v in plain.run()]
    return service.refused


# --- workers ----------------------------------------------------------------------------------------------------------


def _more(session: int) -> list[Frame]:
    """Return frames that steps do not send: questions about residuals, signs of life, goodbyes."""
    about = Residuals(["layer.bias", "nobody"], [0, 0], [7, 2], [0.1, 0.0], 2.0, LATER)
    bodies = {
        Kind.GET: about.pack(),
        Kind.PUT: pack_values(dataclasses.replace(about, names=["no", "body"]), bytes(36)),
        Kind.HEARTBEAT: b"",
        Kind.BYE: Failure("worker", "ValueError: no").pack(),
    }
    return [Frame(kind=kind, session=session, round=7, payload=payload) for kind, payload in bodies.items()]


@dataclass
class Tape:
    """All frames that the workers of a run send, in order, and the means that they get."""

    frames: list[tuple[int, Frame]] = field(default_factory=list)
    means: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # by worker, content and round

    @staticmethod
    def of(recipe: str, num_steps: int = 3) -> "Tape":
        two_shot = parse_recipe(recipe)
        assert isinstance(two_shot, TwoShot)
        tape, served = Tape(), ServedWorld(two_shot, 2, shapes=SHAPES)
        served.cluster = tape.cluster()
        for _ in range(num_steps):
            served.run()
        tape.frames += [(rank, Frame(kind=Kind.BYE, session=SESSION, sender=rank)) for rank in (0, 1)]
        return tape

    def cluster(self) -> Cluster:
        """Return one that records on this tape."""
        tape = self

        class Recording(Cluster):
            def send(self, server: int, rank: int, frame: Frame, *, peer: int | None = None) -> None:
                tape.frames.append((rank, frame))
                super().send(server, rank, frame, peer=peer)

            def collect(self, transfer, rank: int) -> None:
                for frame in self.inbox[0, rank]:
                    tape.means[rank, frame.content, frame.round] = bytes(frame.payload)
                super().collect(transfer, rank)

        return Recording(2)


@dataclass
class Run:
    """One run from a tape, through a service that has served others before."""

    service: Service
    tape: Tape
    session: int
    inbox: dict[int, list[Frame]]
    log: Log
    believed: bool = False  # a worker said what may be, though it is not what the tape says
    culprits: set[int] = field(default_factory=set)  # who has said what ends a run

    def send(self, rank: int, frame: Frame) -> None:
        self.service.receive(rank, frame.header(), frame.payload)

    def means(self) -> dict[tuple[int, int, int], bytes]:
        return {
            (rank, frame.content, frame.round): bytes(frame.payload)
            for rank, frames in self.inbox.items()
            for frame in frames
            if frame.kind == Kind.MEAN
        }

    def nonsense(self, rng: random.Random, rank: int, said: list[Frame]) -> Frame:
        """Return what a worker says wrongly."""
        alternates = [one for one in self.service._served.values() if (rank, one.digest, 0) not in self.tape.means]
        if alternates and rng.random() < 0.3:  # a content that it alone has declared, from a round that came to nothing
            one = rng.choice(alternates)
            payload = bytes(next((frame.payload for frame in said if frame.kind == Kind.PUSH), b""))
            payload = payload[: one.content.push_nbytes].ljust(one.content.push_nbytes, b"\0")
            payload = payload[:4] + bytes([rng.choice((0, 1, 1))]) + payload[5:]
            return Frame(kind=Kind.PUSH, session=self.session, content=one.digest, sender=rank, payload=payload)
        frame = body_changed(rng, rng.choice((*said, *_more(self.session))), said)
        return dataclasses.replace(frame, session=self.session, sender=rank)

    def disturb(self, rank: int, frame: Frame) -> str:
        """Send what a worker says wrongly; return why it was refused, or that it was taken."""
        refused, answers = Counter(self.service.refused), len(self.inbox[rank])
        rounds = self.service.counts["rounds"]
        self.send(rank, frame)
        reasons = self.service.refused - refused
        assert reasons.total() <= 1, reasons
        failure = self.service._failure
        if failure is not None:
            self.culprits.add(rank)
            self.check_named(failure)
            return f"ended the run: {next(iter(reasons), 'as a goodbye or a push does')}"
        if not reasons:
            values = frame.kind in (Kind.PUSH, Kind.PUT) and frame.content not in self.alternates()
            again = frame.kind == Kind.GET and Residuals.parse(frame.payload).step < LATER  # the last round was nothing
            self.believed |= values or again or self.service.counts["rounds"] > rounds
            if self.believed or frame.kind in (Kind.BYE, Kind.PUSH):
                self.culprits.add(rank)
            return "taken"
        (reason,) = reasons
        present = any(worker.rank == rank for worker in self.service._present())
        assert reason in WITHOUT_EFFECT or not present, reasons
        assert self.log.last.startswith(f"refused a frame of worker {rank}: ")
        assert all(answer.kind == Kind.ERROR for answer in self.inbox[rank][answers:])
        return f"refused: {reason}"

    def check_named(self, failure: Failure) -> None:
        assert any(f"worker {rank}" in failure.message for rank in self.culprits), failure

    def alternates(self) -> set[int]:
        known = {content for _, content, _ in self.tape.means}
        return self.service._served.keys() - known


def fuzz_workers(count: int, *, seed: int = 0) -> Counter[str]:
    """Let workers of many runs send `count` nonsense frames; return what became of them."""
    rng, outcomes = random.Random(seed), Counter[str]()
    tapes = [Tape.of(recipe) for recipe in RECIPES]
    inbox: dict[int, list[Frame]] = {0: [], 1: []}
    service = Service(
        ServiceOptions(num_workers=2), lambda peer, header, payload: inbox[peer].append(parse_frame(header, payload))
    )
    with listening() as log:
        while outcomes.total() < count:
            tape = rng.choice(tapes)
            run = Run(service, tape, rng.randrange(1, 1 << 63), inbox, log)
            outcomes += _play(rng, run, count - outcomes.total())
            for frames in inbox.values():
                frames.clear()
    return outcomes


def _play(rng: random.Random, run: Run, most: int) -> Counter[str]:
    """Run to the end of the tape, or until nonsense ends it; check that means and errors are what they must be."""
    outcomes, service = Counter[str](), run.service
    said: dict[int, list[Frame]] = {0: [], 1: []}
    quiet = rng.randrange(20)  # from here on; else the first frames of a run would be disturbed most
    for place, (rank, frame) in enumerate(run.tape.frames):
        own = dataclasses.replace(frame, session=run.session)
        said[rank].append(own)
        run.send(rank, own)
        if frame.kind == Kind.BYE:
            run.culprits.add(rank)  # of what others should still wish for
        while all(said.values()) and place >= quiet and outcomes.total() < most and rng.random() < 0.5:
            who = rng.randrange(2)
            if service.is_over:
                break
            outcomes[run.disturb(who, run.nonsense(rng, who, said[who]))] += 1
        if service._failure is not None:
            break
    means = run.means()
    if service._failure is not None:
        run.check_named(service._failure)
        for other in {0, 1} - service._lost - {w.rank for w in service._workers.values() if w.left}:
            assert any(f.kind == Kind.ERROR and f.session == run.session for f in run.inbox[other])
    else:
        assert service.is_over
        assert run.believed or run.culprits or means == run.tape.means
    if not run.believed:
        assert means.items() <= run.tape.means.items()
    assert all(means.get((1 - rank, *which), mean) == mean for (rank, *which), mean in means.items())
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="frames")
    parser.add_argument("--from", dest="whose", choices=("strangers", "workers"), default="strangers")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    started = time.monotonic()
    if wanted.whose == "strangers":
        found = fuzz(wanted.count, seed=wanted.seed, every=10_000)
    else:
        found = fuzz_workers(wanted.count, seed=wanted.seed)
    print(f"{wanted.count} frames of {wanted.whose} in {time.monotonic() - started:.0f} s: {dict(found.most_common())}")


if __name__ == "__main__":
    main()
