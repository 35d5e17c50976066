"""One step of a link: what its messages come to while a backward pass runs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.aggregators import Message
from thinwire.integrations.allocation import Errors
from thinwire.integrations.stats import StepStats
from thinwire.plan import Plan


@dataclass(slots=True)
class Step:
    """What is under way between the first bucket of a backward pass and its last message."""

    number: int
    plan: Plan
    loss_scale: float = 1.0
    learning_rates: dict[str, float] = field(default_factory=dict)
    stats: StepStats = field(default_factory=StepStats)
    messages: list[Message] = field(default_factory=list)
    pending: int = 0
    closed: bool = False  # no further bucket comes
    began_s: float = 0.0
    last_submitted_s: float = 0.0
    squared_norm: float = 0.0  # of the mean gradient, in steps in which it is measured
    local_norm: float = 0.0  # of this rank's gradient, likewise: the largest of any bucket
    delivered: bool = False  # whether the mean has an element other than 0, likewise
    nonfinite: set[tuple[int, str]] = field(default_factory=lambda: set())  # outside of messages
    errors: Errors = field(default_factory=dict)  # of the gradients under all candidates, in steps that measure them
    error: BaseException | None = None

    def may_hold_back(self) -> bool:
        """Whether sparse kinds may have sent zeros only, and keep the rest."""
        partitions = (p for message in self.messages for p in message.layout.partitions)
        return any(p.aggregator.up.holds_back(p.spec) for p in partitions)


def values_of(message: Message) -> list[Tensor]:
    """Return what a message has delivered."""
    return [block.value for block in message.blocks] if message.flat is None else [message.flat]


def squared_norm_of(message: Message) -> float:
    """Return the squared norm of that."""
    return sum(float(torch.linalg.vector_norm(value)) ** 2 for value in values_of(message))
