"""Workers and servers in one process: exchanges in lock step, their frames handed from one to the other."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from world import World, gradients

from thinwire.aggregators import Hierarchical, NodePushPull, PushPull, TwoShot
from thinwire.comm.local import check_round, move
from thinwire.comm.rounds import Exchange, Pull, Push, SendRecv, Transfer
from thinwire.plan import Plan
from thinwire.server.protocol import AND_PULL, Hello, Kind
from thinwire.server.service import Service, ServiceOptions
from thinwire.state import State
from thinwire.wire import Data, Frame, digest_of, parse_frame, split

SESSION = 0x7E57


class Cluster:
    """Some services and what they sent, by (server, worker)."""

    def __init__(self, num_workers: int, num_servers: int = 1, **options) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.inbox: dict[tuple[int, int], list[Frame]] = {
            place: [] for place in itertools.product(range(num_servers), range(num_workers))
        }
        self.services = [
            Service(
                ServiceOptions(num_workers=num_workers, server=server, num_servers=num_servers, **options),
                self._sender(server),
            )
            for server in range(num_servers)
        ]
        self.rounds: dict[tuple[int, int], int] = {}
        for server, rank in self.inbox:
            hello = Hello(rank, num_workers, server, num_servers, "a plan")
            self.send(server, rank, Frame(kind=Kind.HELLO, session=SESSION, sender=rank, payload=hello.pack()))
        assert all([frame.kind for frame in frames] == [Kind.WELCOME] for frames in self.inbox.values())
        for frames in self.inbox.values():
            frames.clear()

    def _sender(self, server: int) -> Callable[[object, bytes, Data], None]:
        def send(peer: object, header: bytes, payload: Data) -> None:
            assert isinstance(peer, int)
            self.inbox[server, peer].append(parse_frame(header, bytes(payload)))

        return send

    def send(self, server: int, rank: int, frame: Frame, *, peer: int | None = None) -> None:
        self.services[server].receive(rank if peer is None else peer, frame.header(), frame.payload)

    def frame(self, kind: Kind, rank: int, content: str, round_: int = 0, payload: bytes = b"") -> Frame:
        return Frame(kind=kind, session=SESSION, content=digest_of(content), round=round_, sender=rank, payload=payload)

    def push(self, transfer: Transfer, rank: int) -> None:
        assert isinstance(transfer.round, Push)
        for server, (block, text) in enumerate(
            zip(split(transfer.send, transfer.round.nbytes), transfer.round.contents, strict=True)
        ):
            if text:
                round_ = self.rounds.get((rank, digest_of(text)), 0)
                self.send(server, rank, self.frame(Kind.DECLARE, rank, text, payload=text.encode()))
                frame = self.frame(Kind.PUSH, rank, text, round_, block.numpy().tobytes())
                self.send(server, rank, dataclasses.replace(frame, flags=AND_PULL * self._asks_at_once(rank)))

    @staticmethod
    def _asks_at_once(rank: int) -> bool:
        """Whether a rank pulls with its push, as workers do; the others ask by themselves."""
        return rank % 2 == 0

    def pull(self, transfer: Transfer, rank: int) -> None:
        """Ask; `collect` takes the answers once all have pushed."""
        assert isinstance(transfer.round, Pull)
        for server, text in enumerate(transfer.round.contents):
            if text and not self._asks_at_once(rank):
                round_ = self.rounds.get((rank, digest_of(text)), 0)
                self.send(server, rank, self.frame(Kind.PULL, rank, text, round_))

    def collect(self, transfer: Transfer, rank: int) -> None:
        assert isinstance(transfer.round, Pull)
        for server, (block, text) in enumerate(
            zip(split(transfer.receive, transfer.round.nbytes), transfer.round.contents, strict=True)
        ):
            if text:
                (frame,) = self.inbox[server, rank]
                self.inbox[server, rank].clear()
                assert (frame.kind, frame.content) == (Kind.MEAN, digest_of(text)), frame
                assert frame.round == self.rounds.get((rank, frame.content), 0)
                self.rounds[rank, frame.content] = frame.round + 1
                block.copy_(torch.frombuffer(bytearray(frame.payload), dtype=torch.uint8))

    def run(self, exchanges: Sequence[Exchange], layout, order: Sequence[int] | None = None) -> None:
        """Run one exchange per rank; contributions arrive in `order`."""
        order = list(order or range(len(exchanges)))
        for position, expected in enumerate(layout.rounds):
            transfers = [next(exchange) for exchange in exchanges]
            for rank in order:
                check_round(transfers[rank].round, expected, position, rank)
            if isinstance(expected, SendRecv):
                move(transfers)
                continue
            for rank in (rank for rank in order if expected.includes(rank)):
                if isinstance(expected, Push):
                    self.push(transfers[rank], rank)
                else:
                    self.pull(transfers[rank], rank)
                    self.collect(transfers[rank], rank)
        for exchange in exchanges:
            assert next(exchange, None) is None


class ServedWorld(World):
    """A `World` whose means are formed by services."""

    def __init__(
        self,
        exchange: TwoShot | Hierarchical,
        world_size: int,
        num_servers: int = 1,
        order=None,
        options=None,
        **kwargs,
    ) -> None:
        self.num_servers, self.arrival = num_servers, order
        self.cluster = Cluster(world_size, num_servers, **(options or {}))
        self.loss_scales: list[float] = []
        kind = PushPull if isinstance(exchange, TwoShot) else NodePushPull
        settings = {field.name: getattr(exchange, field.name) for field in dataclasses.fields(exchange)}
        served = kind(**settings, num_servers=num_servers)
        super().__init__(served, world_size, **kwargs)
        dealt = itertools.cycle(range(num_servers))
        params = tuple(
            dataclasses.replace(
                param, partitions=tuple(dataclasses.replace(p, owner=next(dealt)) for p in param.partitions)
            )
            for param in self.plan.params
        )
        self.plan = Plan(params, world_size, self.plan.options)
        shapes = {name: torch.zeros(shape, dtype=self.dtype) for name, shape in self.shapes.items()}
        self.states = [State(self.plan, shapes, rank) for rank in range(world_size)]

    def run(self, grads=None, *, unused=None, unit_ratio: float = 1.0, loss_scale: float = 1.0):
        if grads is None:
            grads = [gradients(rank, self.step, self.shapes) for rank in range(self.world_size)]
        values = [{name: g.clone() for name, g in own.items()} for own in grads]
        self.messages = []
        for layout in self.plan.messages(self.order or list(self.shapes)):
            messages = [self.message(layout, rank) for rank in range(self.world_size)]
            for rank, message in enumerate(messages):
                message.loss_scale = self.loss_scales[rank] if self.loss_scales else loss_scale
                for p in layout.partitions:
                    block = self.block(rank, p, values[rank][p.name])
                    if p.aggregator.feedback is not None:
                        block.unit_ratio = unit_ratio
                        block.residual_scale = p.aggregator.feedback.residual_scale(unit_ratio)
                    block.used = p.name not in (unused or {}).get(rank, ())
                    message.blocks.append(block)
            self.cluster.run([self.exchange(message) for message in messages], layout, self.arrival)
            self.messages.append(messages)
        self.step += 1
        return values

    def owners(self) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        for service in self.cluster.services:
            for place, kept in service.store.items().items():
                for slot, tensor in kept.tensors.items():
                    yield (slot, *place), tensor
