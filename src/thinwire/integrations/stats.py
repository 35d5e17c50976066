"""Counters of what an exchange did, per step and as means."""

from dataclasses import dataclass, fields

from thinwire.aggregators import Message
from thinwire.comm.process_group import Outcome


@dataclass(slots=True)
class StepStats:
    """One step on one rank. Sizes in bytes, times in wall seconds.

    Attributes:
        raw_nbytes: bytes of the gradients, uncompressed.
        wire_nbytes: payload bytes this rank sent.
        num_collectives: collectives issued.
        encode_s, decode_s: inside kernels; transport_s: inside collectives. They overlap each other and backward.
        exposed_s: from the last message's submission to the last result: what training waited for.
        residual_ratio: norm of this rank's residuals over the norm of the mean gradient; of the last step measured.
    """

    raw_nbytes: float = 0.0
    wire_nbytes: float = 0.0
    num_collectives: float = 0.0
    encode_s: float = 0.0
    transport_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0
    residual_ratio: float = 0.0

    def add(self, message: Message, outcome: Outcome) -> None:
        """Count one finished message."""
        if message.flat is not None:
            self.raw_nbytes += message.flat.numel() * message.flat.element_size()
        self.raw_nbytes += sum(block.partition.spec.raw_nbytes for block in message.blocks)
        self.wire_nbytes += outcome.sent_nbytes
        self.num_collectives += outcome.num_collectives
        self.encode_s += message.encode_s
        self.transport_s += outcome.transport_s
        self.decode_s += message.decode_s

    def as_dict(self) -> dict[str, float]:
        """Return the fields as plain numbers."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


class Totals:
    """Means over the steps since the last reset; `last` is the step before the first."""

    def __init__(self, last: StepStats | None = None) -> None:
        self.num_steps = 0
        self.last = last or StepStats()
        self._sums = StepStats()

    def add(self, step: StepStats) -> None:
        """Count one finished step."""
        self.num_steps += 1
        self.last = step
        for field in fields(step):
            setattr(self._sums, field.name, getattr(self._sums, field.name) + getattr(step, field.name))

    def means(self) -> dict[str, float]:
        """Return per-step means; `residual_ratio` is the last one measured."""
        num = max(self.num_steps, 1)
        means = {name: value / num for name, value in self._sums.as_dict().items()}
        return {**means, "residual_ratio": self.last.residual_ratio}
