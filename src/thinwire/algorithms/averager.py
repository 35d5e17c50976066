"""Means of named tensors over ranks, through a plan like any exchange's, while the caller goes on computing."""

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from thinwire.aggregators import BufferPool, Message
from thinwire.comm.process_group import Outcome, OverlappedDriver
from thinwire.comm.tracing import title
from thinwire.integrations.stats import StepStats, Totals
from thinwire.plan import Plan
from thinwire.state import State


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one exchange; equal on all ranks.

    Attributes:
        nonfinite: (rank, `MEAN` or `MANY`, name) of what holds inf or nan; then nothing was delivered at all.
        unused: names that no rank had anything to give for.
    """

    nonfinite: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    unused: set[str] = field(default_factory=set[str])


class Averager:
    """Forms the mean of float32 tensors over ranks, some names at a time.

    `begin` hands what is in `values` to the driver's threads and returns; until `finish` has returned nobody may touch
    those. Both are called in the same order on all ranks.

    Args:
        plan: how each name travels; without all-reduces of its own (`build_plan(..., all_reduce=False)`).
        parts: the names that are exchanged together.
        driver: moves the bytes.
        threads: native threads per kernel call.

    Attributes:
        values: by name, in the shape of the plan, what this rank gives, then the mean.
        state: residuals, and how many exchanges have begun.
        counts: how many of each part, which key its random streams.
        totals: what exchanges cost, each a step.
        failed: the error that ended the exchange for good.
    """

    def __init__(
        self, plan: Plan, parts: Sequence[Sequence[str]], driver: OverlappedDriver, *, threads: int = 1
    ) -> None:
        shapes = {param.info.name: torch.empty(param.info.shape, device="meta") for param in plan.params}
        self.plan, self.state, self.totals = plan, State(plan, shapes, driver.rank), Totals()
        self.values = {name: torch.zeros(shape.shape, dtype=torch.float32) for name, shape in shapes.items()}
        self.failed: BaseException | None = None
        self.buffers = BufferPool()
        self._parts, self._driver = parts, driver
        self._flying: dict[int, list[Future[Outcome]]] = {}
        self.counts = [0] * len(parts)
        self._messages: list[list[Message]] = []
        for names in parts if plan.world_size > 1 else ():
            self._messages.append([])
            for layout in plan.messages(names):
                blocks = [
                    self.state.block(
                        p, self.values[p.name].view(-1)[p.offset : p.offset + p.numel], plan.by_name[p.name].slots
                    )
                    for p in layout.partitions
                ]
                self._messages[-1].append(Message(layout, blocks, driver.rank, threads=threads, buffers=self.buffers))

    def flies(self, part: int) -> bool:
        """Return whether an exchange of these names has begun and not ended."""
        return part in self._flying

    def begin(self, part: int, used: Collection[str] | None = None) -> None:
        """Begin the exchange of one part; `used` are the names this rank has something to give for, by default all."""
        assert part not in self._flying, "begun twice"
        self.state.step += 1
        self.counts[part] += 1
        self._flying[part] = []
        for i, message in enumerate(self._messages[part] if self._messages else ()):
            message.begin(self.counts[part])  # not all exchanges: turns and sides go by a parameter's own
            message.name = title(f"outer {part}.{i}", message.layout.names)
            for block in message.blocks:
                if (feedback := block.partition.aggregator.feedback) is not None:
                    block.residual_scale = feedback.residual_scale(1.0)
                block.used = used is None or block.partition.name in used
            exchange = type(message.layout.partitions[0].aggregator).exchange(message)
            self._flying[part].append(self._driver.submit(exchange, message.layout.rounds, message.name))

    def finish(self, part: int) -> Verdict:
        """Wait until the means of one part are in `values`. Bounded by the time-out of the driver's collectives.

        If anything was not finite on any rank, residuals of the whole part are as before and `values` of no use.
        """
        began, stats = time.perf_counter(), StepStats()
        futures = self._flying.pop(part)
        if not self._messages:  # a rank alone is its own mean
            bad = [(0, name) for name in self._parts[part] if not bool(self.values[name].isfinite().all())]
            self.totals.add(stats)
            return Verdict(bad)
        messages, verdict = self._messages[part], Verdict()
        try:
            outcomes = [future.result() for future in futures]
        except BaseException as error:
            self.failed = self.failed or error
            raise
        stats.exposed_s = time.perf_counter() - began
        verdict.nonfinite.extend(sorted({one for message in messages for one in message.nonfinite}))
        for message, outcome in zip(messages, outcomes, strict=True):
            verdict.unused.update(message.unused)
            if verdict.nonfinite:
                message.restore()
            message.forget()
            stats.add(message, outcome)
        self.totals.add(stats)
        return verdict

    @property
    def planned_nbytes(self) -> int:
        """The payload bytes that this rank sends in one exchange of every part."""
        layouts = (message.layout for part in self._messages for message in part)
        return sum(r.sent_nbytes(self._driver.rank) for layout in layouts for r in layout.rounds)
