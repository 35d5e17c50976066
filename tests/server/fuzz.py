"""A frame fuzzer: a run of two workers goes on while a third peer, and a worker itself, send all kinds of nonsense.

    python tests/server/fuzz.py 1000000

Every nonsense frame must be refused with a reason and be without effect: the run's means stay those of an undisturbed
run, to the bit. Frames of known workers that are damaged end a run by design, so damaged ones come from the stranger.
"""

import logging
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "aggregators"))

from in_one_process import SESSION, Cluster, ServedWorld
from world import World, bits

from thinwire import TwoShot, parse_recipe
from thinwire.server.protocol import AND_PULL, Kind
from thinwire.server.service import Service
from thinwire.wire import Frame

STRANGER = "a stranger"


class Recorder(Cluster):
    """Remembers frames, for replays."""

    def __init__(self, *args, **kwargs) -> None:
        self.seen: list[tuple[int, bytes, bytes]] = []
        super().__init__(*args, **kwargs)

    def send(self, server: int, rank: int, frame: Frame, *, peer: int | None = None) -> None:
        self.seen.append((rank, frame.header(), bytes(frame.payload)))
        del self.seen[:-200]
        super().send(server, rank, frame, peer=peer)


def nonsense(
    rng: random.Random, seen: list[tuple[int, bytes, bytes]], contents: list[int]
) -> tuple[object, bytes, bytes]:
    """Return a peer, a header and a payload that must not be taken."""
    rank, header, payload = rng.choice(seen)
    flags = rng.choice((0, AND_PULL))
    match rng.randrange(7):
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
            frame = Frame(
                kind=kind, session=session, sender=sender, content=rng.choice(contents), flags=flags, payload=payload
            )
            return 0, frame.header(), payload
        case _:  # a round to come
            frame = Frame(
                kind=rng.choice((Kind.PUSH, Kind.PULL)),
                session=SESSION,
                sender=0,
                content=rng.choice(contents),
                round=rng.randrange(1 << 40, 1 << 63),
                flags=flags,
                payload=payload,
            )
            return 0, frame.header(), payload


def fuzz(count: int, *, seed: int = 0, every: int = 1000) -> Service:
    """Send `count` nonsense frames, and do a step of the run after every so many; return the service."""
    rng = random.Random(seed)
    two_shot = parse_recipe("topk:0.05")
    assert isinstance(two_shot, TwoShot)
    plain, served = World(two_shot, 2), ServedWorld(two_shot, 2)
    cluster = Recorder(2)
    served.cluster = cluster
    (service,) = cluster.services
    sent = 0
    while sent < count:
        assert [bits(v) for v in served.run()] == [bits(v) for v in plain.run()]
        contents = list(service._served)
        for _ in range(min(every, count - sent)):
            peer, header, payload = nonsense(rng, cluster.seen, contents)
            before = sum(service.refused.values())
            service.receive(peer, header, payload)
            sent += 1
            # A worker may declare a content again; everything else is refused.
            assert sum(service.refused.values()) == before + 1 or (peer in (0, 1) and header[6] == Kind.DECLARE)
        assert not any(cluster.inbox.values())
    assert [bits(v) for v in served.run()] == [bits(v) for v in plain.run()]
    return service


if __name__ == "__main__":
    logging.getLogger("thinwire").setLevel(logging.CRITICAL)
    started = time.monotonic()
    found = fuzz(int(sys.argv[1]), every=10_000)
    print(f"{sys.argv[1]} frames in {time.monotonic() - started:.0f} s; refused: {dict(found.refused)}")
