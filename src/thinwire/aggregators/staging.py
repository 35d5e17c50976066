"""Between a device, where values lie and kernels work, and the pinned memory that blocks travel from and to."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from thinwire.aggregators.buffers import BufferPool, PinnedPool
from thinwire.comm.device import Device


class Staging:
    """Memory on both sides, kept between messages, and the copies between them, which nothing here waits for.

    Blocks are encoded on the device, and only their bytes cross; so do those that come back, which are decoded there.
    A message takes a pinned buffer when it begins to fill it and gives it back when all that reads it is queued;
    `PinnedPool` sees to it that nobody gets it before that is done. Memory on the device is only used in the order of
    the exchanges' stream, so that whoever has queued the last use may give it back.

    Attributes:
        pinned: where blocks travel from and to.
        near: work memory beside the values.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pinned = PinnedPool(device)
        self.near = BufferPool(device.allocate)

    def fetch(self, data: Tensor) -> Tensor:
        """Return a copy of pinned bytes on the device, to be given back to `near`."""
        near = self.near.take(data.numel())
        self.device.copy(near, data)
        return near

    def send(self, near: Tensor, out: Tensor, spans: Iterable[tuple[int, int]]) -> None:
        """Copy some spans of bytes to the same places of a pinned buffer, and leave all others as they are."""
        for start, stop in spans:
            self.device.copy(out[start:stop], near[start:stop])


def work_memory(device: Device | None, *, pinned: bool = True) -> tuple[BufferPool, Staging | None]:
    """Return where messages take buffers from, and the copies they need if that is not where their values lie.

    Args:
        device: of the values; None is the host.
        pinned: whether blocks travel from pinned memory, not from the device's own.
    """
    if device is None:
        return BufferPool(), None
    if not pinned:
        return BufferPool(device.allocate), None
    staging = Staging(device)
    return staging.pinned, staging


def joined(spans: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the same bytes as few spans: a copy costs more to queue than a few bytes more take.

    Example:
        >>> joined([(8, 12), (0, 4), (4, 8), (20, 24)])
        [(0, 12), (20, 24)]
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
