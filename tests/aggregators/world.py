"""A model on n ranks in one process: plan, states, and steps in lock step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import Plan, PlanOptions
from thinwire.aggregators import Aggregator, Block, Dense, Message, MessageLayout, Partition
from thinwire.comm.local import run_lock_step
from thinwire.comm.node_round import NodeRound
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Exchange, SendRecv, Transfer
from thinwire.plan import build_plan
from thinwire.state import State

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (5, 70),
    "layer.weight": (16, 33),
    "layer.bias": (7,),
    "gain": (),
    "head.weight": (3, 150),
}

Values = dict[str, Tensor]  # one rank's gradients or means, flat, by name


def gradients(rank: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Values:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator).view(-1) for name, shape in shapes.items()}


@dataclass
class World:
    """Runs steps of `aggregator` on all parameters of a small model, as an integration would."""

    aggregator: Aggregator
    world_size: int
    message_nbytes: int = 1 << 20
    partition_numel: int = 200
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    dtype: torch.dtype = torch.float32
    order: Sequence[str] | None = None  # in which parameters become ready
    step: int = 0
    sent_nbytes: list[int] = field(default_factory=list)  # per rank, of the last step
    messages: list[list[Message]] = field(default_factory=list)  # of the last step: per message, per rank

    def __post_init__(self) -> None:
        options = PlanOptions(
            partition_numel=self.partition_numel, message_nbytes=self.message_nbytes, min_nbytes=0, compress_1d=True
        )
        params = {name: torch.zeros(shape, dtype=self.dtype) for name, shape in self.shapes.items()}
        self.plan: Plan = build_plan(params.items(), lambda _: self.aggregator, self.world_size, options)
        self.states = [State(self.plan, params, rank) for rank in range(self.world_size)]

    def run(
        self,
        grads: Sequence[Values] | None = None,
        *,
        unused: Mapping[int, set[str]] | None = None,
        unit_ratio: float = 1.0,
    ) -> list[Values]:
        """Do one step; return what was delivered, per rank."""
        if grads is None:
            grads = [gradients(rank, self.step, self.shapes) for rank in range(self.world_size)]
        values = [{name: g.clone() for name, g in own.items()} for own in grads]
        self.sent_nbytes, self.messages = [0] * self.world_size, []
        for layout in self.plan.messages(self.order or list(self.shapes)):
            kind = type(layout.partitions[0].aggregator)
            messages = [self.message(layout, rank) for rank in range(self.world_size)]
            for rank, message in enumerate(messages):
                for p in layout.partitions:
                    block = self.block(rank, p, values[rank][p.name])
                    if p.aggregator.feedback is not None:
                        block.unit_ratio = unit_ratio
                        block.residual_scale = p.aggregator.feedback.residual_scale(unit_ratio)
                    block.used = p.name not in (unused or {}).get(rank, ())
                    message.blocks.append(block)
                if kind is Dense:
                    message.flat = torch.cat([block.value for block in message.blocks]).to(self.dtype)
            run_lock_step([self._counted(self.exchange(m), r) for r, m in enumerate(messages)], layout.rounds)
            for message in messages:
                if message.flat is not None:
                    sizes = [block.value.numel() for block in message.blocks]
                    for block, mean in zip(message.blocks, message.flat.split(sizes), strict=True):
                        block.value.copy_(mean)
            self.messages.append(messages)
        self.step += 1
        return values

    def message(self, layout: MessageLayout, rank: int) -> Message:
        """Return a message of one rank, without its blocks."""
        return Message(layout, [], rank, self.step)

    def exchange(self, message: Message) -> Exchange:
        """Return what runs it."""
        return type(message.layout.partitions[0].aggregator).exchange(message)

    def block(self, rank: int, partition: Partition, flat: Tensor) -> Block:
        """Return a partition of one rank, its value a view of the parameter's."""
        value = flat[partition.offset : partition.offset + partition.numel]
        return self.states[rank].block(partition, value, self.plan.by_name[partition.name].slots)

    def _counted(self, exchange: Exchange, rank: int) -> Iterator[Transfer]:
        """Count the bytes of the buffers themselves, whatever the rounds claim."""
        for transfer in exchange:
            match transfer.round:
                case AllToAll(nbytes):
                    assert transfer.receive.numel() == self.world_size * nbytes[rank]
                    self.sent_nbytes[rank] += transfer.send.numel() - nbytes[rank]
                case AllGather(nbytes):
                    assert transfer.receive.numel() == sum(nbytes)
                    self.sent_nbytes[rank] += transfer.send.numel() * (self.world_size - 1)
                case SendRecv() | NodeRound() as moves:
                    assert transfer.receive.numel() == moves.received_nbytes(rank)
                    sent = [transfer.send[start:stop] for source, _, start, stop in moves.moves if source == rank]
                    self.sent_nbytes[rank] += sum(block.numel() for block in sent)
                case AllReduce():
                    ring = transfer.send.numel() * transfer.send.element_size() * (self.world_size - 1)
                    self.sent_nbytes[rank] += round(2 * ring / self.world_size)
            yield transfer

    def owed(self) -> Values:
        """Return what was not delivered yet: mean of the workers' residuals, plus the owners'. In float64."""
        total = {name: torch.zeros(g.numel(), dtype=torch.float64) for name, g in gradients(0, 0, self.shapes).items()}
        for state in self.states:
            for name, residual in state.worker.items():
                total[name] += residual.double() / self.world_size
            for (name, offset), residual in state.owner.items():
                total[name][offset : offset + residual.numel()] += residual
        return total

    def residuals(self) -> dict[tuple[int, str, str, int], bytes]:
        """Return the bits of all that feedback keeps, by rank, slot, parameter and offset."""
        found: dict[tuple[int, str, str, int], bytes] = {}
        for rank, state in enumerate(self.states):
            for partition in (p for param in self.plan.params for p in param.partitions):
                place = (partition.name, partition.offset)
                end = partition.offset + partition.numel
                for slot, whole in state.whole.items():
                    if partition.name in whole:
                        found[rank, slot, *place] = whole[partition.name][partition.offset : end].numpy().tobytes()
                for slot, owned in state.owned.items():
                    if place in owned:
                        found[rank, slot, *place] = owned[place].numpy().tobytes()
        return found


def bits(values: Values) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in values.items()}
