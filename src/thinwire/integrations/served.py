"""What parameter servers owe, as a part of a link's state: every rank saves, and gives back, a share of it."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.aggregators import MEAN, Message, Partition, ThroughServers
from thinwire.errors import StateError
from thinwire.integrations.driver import ServedDriver
from thinwire.phases import Phases
from thinwire.state import State


class OwedByServers:
    """Reads and writes the residuals that servers keep, in the form in which states hold those of owners.

    Args:
        driver: asks the servers.
        phases: which parameters' residuals they keep, in any phase.
        state: whose units and counters go with them.
        rank: the share of this rank is every partition whose place leaves it, modulo the number of ranks.
    """

    def __init__(self, driver: ServedDriver, phases: Phases, state: State, rank: int) -> None:
        self._driver, self._state = driver, state
        every = (param for plan in phases.all_plans for param in plan.params)
        owed = {p.info.name for p in every if isinstance(p.aggregator, ThroughServers) and p.aggregator.kept_by_servers}
        kept = phases.kept
        self._numel = {param.info.name: param.info.numel for param in kept.params if param.info.name in owed}
        partitions = [p for param in kept.params if param.info.name in owed for p in param.partitions]
        self._share: Sequence[Partition] = partitions[rank :: kept.world_size]
        self._speaks = rank == 0

    @property
    def lost(self) -> bool:
        """Whether a server is gone, so that what it owed is, too."""
        return self._driver.error is not None

    def read(self) -> dict[str, Tensor]:
        """Return this rank's share, zero elsewhere, in the shapes of parameters."""
        found = self._ask(self._share, self._state.step)
        whole = {name: self._state.zeros(name, numel) for name, numel in self._numel.items()}
        for p, residual in zip(self._share, found, strict=True):
            whole[p.name][p.offset : p.offset + p.numel] = residual
        return {name: self._state.in_shape(name, flat) for name, flat in whole.items()}

    def take_back(self, messages: Sequence[Message], step: int) -> None:
        """Let servers put back what they counted of means that came to nothing in a step.

        The mean of one server, or what was left of it in 16 bits, was not finite, so that nothing of its message is
        delivered, while the others know of none of that. Asked for what they owed before the step they go back to it.
        All ranks ask, before they push again. Where a rank's own contribution was not finite, no server counted it.
        """
        undelivered = (message for message in messages if any(rank == MEAN for rank, _ in message.nonfinite))
        partitions = [p for message in undelivered for p in message.layout.partitions if p.name in self._numel]
        self._ask(partitions, step)

    def _ask(self, partitions: Sequence[Partition], step: int) -> list[Tensor]:
        state = self._state
        return self._driver.read_residuals(partitions, state.loss_scale, state.learning_rates, step)

    def check(self, saved: Mapping[str, Tensor], *, strict: bool) -> None:
        """Compare names and shapes; a state that was saved after servers were lost has none.

        Raises:
            StateError: a shape differs, or with `strict` a name; else rank 0 logs what is dropped or starts at zero.
        """
        for name in saved.keys() & self._numel.keys():
            if saved[name].numel() != self._numel[name]:
                raise StateError(
                    f"{name}: expected {self._numel[name]} numbers of what its owner keeps, got {saved[name].numel()}"
                )
        differing = sorted(saved.keys() ^ self._numel.keys()) if saved else []
        if differing and strict:
            raise StateError(
                f"expected what owners keep of the parameters that servers keep residuals of, got {differing[0]!r} in "
                "one of both only; strict=False drops it, or starts it at zero"
            )
        if differing and self._speaks:
            logging.getLogger("thinwire").warning(
                "of what owners keep, dropped or started at zero at the servers: %s", ", ".join(differing)
            )

    def write(self, saved: Mapping[str, Tensor]) -> None:
        """Give this rank's share back to the servers; what was not saved starts at zero."""
        values = list[Tensor]()
        for p in self._share:
            flat = torch.zeros(self._numel[p.name], dtype=torch.float32)
            if p.name in saved:
                self._state.in_shape(p.name, flat).copy_(saved[p.name])
            values.append(flat[p.offset : p.offset + p.numel])
        self._driver.write_residuals(self._share, values, self._state.loss_scale, self._state.learning_rates)
