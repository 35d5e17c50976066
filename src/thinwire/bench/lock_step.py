"""A plan at work on all ranks in one process: what each recipe delivers for given gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.aggregators import BufferPool, Dense, Message
from thinwire.comm.local import run_lock_step
from thinwire.plan import Plan
from thinwire.state import State


class LockStep:
    """Runs the exchanges of a plan step by step, with every rank's residuals, as the ranks of a training would.

    Args:
        plan: for as many ranks as gradients will be given for.
        shapes: of every parameter.
        threads: native threads per kernel call.
    """

    def __init__(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]], threads: int = 1) -> None:
        params = {name: torch.empty(shape) for name, shape in shapes.items()}
        states = [State(plan, params, rank) for rank in range(plan.world_size)]
        self._values = [{name: torch.zeros(p.numel()) for name, p in params.items()} for _ in states]
        self._messages: list[list[Message]] = []  # per message, per rank
        self._step = 0
        buffers = BufferPool()
        for layout in plan.messages(list(shapes)[::-1]):
            ranks: list[Message] = []
            for rank, (state, values) in enumerate(zip(states, self._values, strict=True)):
                message = Message(layout, [], rank, threads=threads, buffers=buffers)
                for p in layout.partitions:
                    value = values[p.name][p.offset : p.offset + p.numel]
                    block = state.block(p, value, plan.by_name[p.name].slots)
                    if p.aggregator.feedback is not None:
                        block.residual_scale = p.aggregator.feedback.residual_scale(1.0)
                    message.blocks.append(block)
                ranks.append(message)
            self._messages.append(ranks)

    def run(self, gradients: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Do one step with every rank's gradients; return what is delivered to all, flat, valid until the next step."""
        for values, given in zip(self._values, gradients, strict=True):
            for name, value in values.items():
                value.copy_(given[name].reshape(-1))
        for messages in self._messages:
            kind, rounds = type(messages[0].layout.partitions[0].aggregator), messages[0].layout.rounds
            for message in messages:
                message.begin(self._step)
                if kind is Dense:
                    message.flat = torch.cat([block.value for block in message.blocks])
            run_lock_step([kind.exchange(message) for message in messages], rounds)
            for message in messages:
                if message.flat is not None:
                    sizes = [block.value.numel() for block in message.blocks]
                    for block, mean in zip(message.blocks, message.flat.split(sizes), strict=True):
                        block.value.copy_(mean)
        self._step += 1
        return self._values[0]
