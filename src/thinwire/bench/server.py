"""How fast a parameter server is alone: frames in, decoded, added, encoded, frames out, on one core and no network."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.aggregators import Message, PushPull, TwoShot
from thinwire.comm.rounds import Push
from thinwire.errors import ThinwireError
from thinwire.plan import build_plan
from thinwire.policy import PlanOptions
from thinwire.recipes import parse_recipe
from thinwire.server.protocol import AND_PULL, Hello, Kind
from thinwire.server.service import Peer, Service, ServiceOptions
from thinwire.state import State
from thinwire.wire import Data, Frame, digest_of

SESSION = 1


@dataclass(frozen=True, slots=True)
class ServerRow:
    """One measurement.

    Attributes:
        recipe: both ways.
        workers: whose contributions make a round.
        nbytes: of one worker's gradient, float32.
        pushed_nbytes: of what one worker pushes.
        gb_per_s: gradients summed, 10^9 bytes of float32 a second: all that comes in, as it was before it was encoded.
        floor_gb_per_s: the same by `acc += gradient` from memory, in float32, in the same run.
    """

    recipe: str
    workers: int
    nbytes: int
    pushed_nbytes: int
    gb_per_s: float
    floor_gb_per_s: float

    @property
    def floor_ratio(self) -> float:
        """The rate beside a plain accumulate's."""
        return self.gb_per_s / self.floor_gb_per_s

    def as_dict(self) -> dict[str, Any]:
        """Return a row of the JSON document."""
        return {**asdict(self), "floor_ratio": self.floor_ratio}


class _Run:
    """A service in this process, and what its workers push in every round."""

    def __init__(self, recipe: str, workers: int, gradients: Sequence[Tensor]) -> None:
        aggregator = parse_recipe(recipe)
        if not isinstance(aggregator, TwoShot):
            raise ThinwireError(f"--recipes: expected recipes that servers can form the mean of, got {recipe!r}")
        served = PushPull(up=aggregator.up, down=aggregator.down, feedback=aggregator.feedback)
        numel = gradients[0].numel()
        plan = build_plan([("w", torch.empty(numel))], lambda _: served, workers, PlanOptions(min_nbytes=0))
        self.answered = 0
        self.service = Service(ServiceOptions(num_workers=workers), self._send)
        for rank in range(workers):
            self._receive(rank, Kind.HELLO, payload=Hello(rank, workers, 0, 1, "").pack())
        self.contents: list[str] = []
        self.payloads: list[list[bytearray]] = []  # by message, by rank
        states = [State(plan, {"w": torch.empty(numel)}, rank) for rank in range(workers)]
        for layout in plan.messages(["w"]):
            push = layout.rounds[0]
            assert isinstance(push, Push)
            self.contents.append(push.contents[0])
            self._receive(0, Kind.DECLARE, push.contents[0], payload=push.contents[0].encode())
            self.payloads.append([])
            for rank, gradient in enumerate(gradients):
                blocks = [
                    states[rank].block(p, gradient[p.offset : p.offset + p.numel].clone(), plan.params[0].slots)
                    for p in layout.partitions
                ]
                exchange = PushPull.exchange(Message(layout, blocks, rank))
                self.payloads[-1].append(bytearray(next(exchange).send.numpy().tobytes()))
                exchange.close()
        self.round = 0

    def _send(self, peer: Peer, header: bytes, payload: Data) -> None:
        self.answered += 1

    def _receive(self, rank: int, kind: Kind, text: str = "", payload: bytes | bytearray = b"") -> None:
        content = digest_of(text) if text else 0
        frame = Frame(kind=kind, session=SESSION, content=content, sender=rank, payload=payload)
        self.service.receive(rank, frame.header(), payload)

    def seconds(self) -> float:
        """Do a round of all messages; return the server's part of the time."""
        frames: list[tuple[int, bytes, bytearray]] = []
        for text, payloads in zip(self.contents, self.payloads, strict=True):
            content = digest_of(text)
            for rank, payload in enumerate(payloads):
                payload[:4] = self.round.to_bytes(4, "little")  # the step
                frame = Frame(
                    kind=Kind.PUSH,
                    session=SESSION,
                    content=content,
                    round=self.round,
                    sender=rank,
                    flags=AND_PULL,
                    payload=payload,
                )
                frames.append((rank, frame.header(), payload))
        before = self.answered
        started = time.perf_counter()
        for rank, header, data in frames:
            self.service.receive(rank, header, data)
        elapsed = time.perf_counter() - started
        assert self.answered - before == len(frames)
        assert not self.service.refused
        self.round += 1
        return elapsed


def _accumulate(gradients: Sequence[Tensor], total: Tensor) -> float:
    started = time.perf_counter()
    torch.mul(gradients[0], 1.0, out=total)
    for gradient in gradients[1:]:
        total += gradient
    return time.perf_counter() - started


def measure_server(recipes: Sequence[str], workers: int, nbytes: int, *, rounds: int = 7) -> list[ServerRow]:
    """Measure a server and a plain accumulate in turns, on one thread; the best of `rounds` of each counts.

    Args:
        recipes: of the two-shot exchange.
        workers: at least 1.
        nbytes: of one worker's gradient.
        rounds: at least 1.

    Raises:
        ThinwireError: a recipe of another exchange.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(nbytes // 4, generator=generator) for _ in range(workers)]
        total = torch.empty_like(gradients[0])
        rows: list[ServerRow] = []
        for recipe in recipes:
            run = _Run(recipe, workers, gradients)
            run.seconds()
            pairs = [(run.seconds(), _accumulate(gradients, total)) for _ in range(rounds)]
            ours, floor = (min(times) for times in zip(*pairs, strict=True))
            pushed = sum(len(payloads[0]) for payloads in run.payloads)
            summed = workers * nbytes / 1e9
            rows.append(ServerRow(recipe, workers, nbytes, pushed, summed / ours, summed / floor))
        return rows
    finally:
        torch.set_num_threads(threads)
