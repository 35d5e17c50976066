"""Devices that work beside the host, in streams and with events: what an exchange of their values must know of them.

Kernels and copies of all messages of a link are queued on one stream of its own, first in, first out. So the memory of
the device needs no further care: what was queued earlier is done with it earlier. Two things do need care, and events
are for them: values come from another stream, autograd's, and go back to it; and memory of the host that a copy reads
or writes must be left alone until the copy is done.
"""

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.comm.rounds import Exchange


class Event(Protocol):
    """A moment in a stream."""

    def synchronize(self) -> None:
        """Wait, in the calling thread, until the device has come to it."""
        ...

    def query(self) -> bool:
        """Return whether it has."""
        ...


class Device(Protocol):
    """A device, with the stream that exchanges use on it."""

    def queue(self) -> AbstractContextManager[Any]:
        """Return a context manager: what runs inside is queued on the exchanges' stream."""
        ...

    def mark(self) -> Event:
        """Return an event after all that the exchanges' stream was given so far."""
        ...

    def arrival(self, *values: Tensor) -> Event:
        """Return an event after all that the *caller's* stream was given, of which exchanges will use `values`.

        Their memory is not lent to anybody else before the exchanges' stream is done with it, even if it is freed, as
        after a backward pass that raised.
        """
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8 on the device."""
        ...

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8 of the host, which the device can reach."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the device and pinned memory, which both must be left alone until it is done."""
        ...

    def future(self) -> "torch.futures.Future[Any]":
        """Return a future for values on the device: whoever waits for it has its stream wait for them."""
        ...


class Cuda:
    """A CUDA device. Kernels of exchanges go before those of the backward pass, which are many and long.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._lock = threading.RLock()

    @contextmanager
    def queue(self) -> Generator[None]:
        """See `Device`. One thread at a time: kernels are compiled when first used, which several must not do at once.

        Nothing is lost by it, as the stream would take their work one after another anyhow.
        """
        with self._lock, torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Event:
        """See `Device`."""
        return self._record(self._stream)

    def arrival(self, *values: Tensor) -> Event:
        """See `Device`."""
        for value in values:
            value.record_stream(self._stream)
        return self._record(torch.cuda.current_stream(self._device))

    @staticmethod
    def _record(stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event(blocking=True)  # whoever waits sleeps: spinning would take a core from the program
        event.record(stream)
        return event

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def future(self) -> "torch.futures.Future[Any]":
        """See `Device`. Its events are recorded when it is set, on the stream that is current there: use `queue`."""
        return torch.futures.Future(devices=[self._device])


def staged(exchange: Exchange, device: Device, arrival: Event) -> Exchange:
    """Run an exchange of values on a device as any driver does, which then need not know of the device.

    It begins when the values have arrived: were their event waited for on the stream, all that other messages queue
    behind it would wait, too. A round is yielded once the bytes to send are there, copies included; until then nobody
    touches them, and from then on the device does not. After the last round nothing is waited for: what comes behind on
    the stream, the future of the bucket too, comes after it.
    """
    arrival.synchronize()
    while True:
        with device.queue():
            transfer = next(exchange, None)
            ready = device.mark()
        if transfer is None:
            return
        ready.synchronize()
        yield transfer


class Failure:
    """What a future holds in place of a result: to find tensors, futures of a device pickle all that they are given."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as something without content: errors may hold what cannot be pickled."""
        return object, ()
