"""What a link needs of drivers, and of parameter servers: they are modules beside these, or below."""

import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from thinwire.aggregators import Partition
from thinwire.comm.process_group import Outcome
from thinwire.comm.rounds import Exchange, Round


class Driver(Protocol):
    """Performs rounds: between ranks, or through parameter servers."""

    @property
    def on_device(self) -> bool:
        """Whether blocks travel from and to memory of the values' device; else of the host."""
        ...

    @property
    def control(self) -> dist.ProcessGroup:
        """A group of the same ranks, with CPU tensors, for agreeing before the first exchange."""
        ...

    def submit(self, exchange: Exchange, schedule: tuple[Round, ...], name: str = "") -> Future[Outcome]:
        """Queue an exchange; call in the same order on every rank."""
        ...

    def fail(self, error: BaseException) -> None:
        """Fail every exchange, present or future."""
        ...

    def close(self) -> None:
        """Stop, once all submitted exchanges are done."""
        ...


class ServedDriver(Driver, Protocol):
    """Performs rounds through parameter servers, which keep what owners keep."""

    @property
    def goes_on(self) -> bool:
        """Whether servers go on without ranks that are lost: whoever asks all ranks may wait for one that is gone."""
        ...

    @property
    def error(self) -> BaseException | None:
        """What ended the run, if something has."""
        ...

    def open(self, plan: Sequence[str], node_sizes: tuple[int, ...] | None = None) -> None:
        """Connect, also to a node's ranks, and let servers compare the plans of all workers. Raises what they find."""
        ...

    def read_residuals(
        self, partitions: Sequence[Partition], loss_scale: float, rates: Mapping[str, float], step: int
    ) -> list[Tensor]:
        """Return what servers owe of these partitions before the step of that number, which they undo."""
        ...

    def write_residuals(
        self, partitions: Sequence[Partition], values: Sequence[Tensor], loss_scale: float, rates: Mapping[str, float]
    ) -> None:
        """Set what servers owe of these partitions."""
        ...


class Servers(Protocol):
    """Where parameter servers are."""

    @property
    def num_servers(self) -> int:
        """How many there are."""
        ...

    def connect(self, group: dist.ProcessGroup, workers: int, timeout: datetime.timedelta | None) -> ServedDriver:
        """Make a driver. Collective."""
        ...
