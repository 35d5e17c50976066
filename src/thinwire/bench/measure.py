"""Measurements on one rank: phases of a step, bytes at the interface, the wire's rate, equality of replicas."""

import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.workloads import Workload
from thinwire.comm.tracing import span

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step, and first touches of memory are slow


class Interface:
    """Bytes this rank's host has sent, read at its network interface; None where no network is emulated."""

    def __init__(self) -> None:
        name = os.environ.get("THINWIRE_LAB_INTERFACE")
        self._name = None if name == "lo" else name  # loopback carries every rank's bytes, and other programs'

    def sent_nbytes(self) -> int | None:
        """Bytes sent since the interface came up."""
        if self._name is None:
            return None
        from thinwire.lab.counters import read_interface

        return read_interface(self._name)[0]


def timed_step(
    model: nn.Module,
    workload: Workload,
    optimizer: torch.optim.Optimizer | None,
    *,
    exchange: bool = True,
) -> tuple[float, float, float, float]:
    """Train one step; return (loss, forward, backward, optimizer), the last three in seconds.

    Without exchange the model is DDP's, or bare.
    """
    start = time.perf_counter()
    model.zero_grad(set_to_none=True)
    with model.no_sync() if not exchange and isinstance(model, DistributedDataParallel) else nullcontext():
        with span("forward"):
            loss = workload.loss(model)
        forward_end = time.perf_counter()
        with span("backward"):
            loss.backward()
    backward_end = time.perf_counter()
    if optimizer is not None:
        with span("optimizer"):
            optimizer.step()
    end = time.perf_counter()
    return loss.item(), forward_end - start, backward_end - forward_end, end - backward_end


def whole_periods(steps: range, period: int, under_way: Callable[[int], bool]) -> range:
    """Return the last of these steps that make whole periods, since a part of one has too many exchanges, or too few.

    They begin and end where no exchange is under way, whose bytes would count in part, if that is ever so. One period
    is returned at least, whatever it begins with, if so many steps have been taken.

    >>> whole_periods(range(3, 21), 5, lambda done: False), whole_periods(range(3, 21), 5, lambda done: done % 5 == 1)
    (range(6, 21), range(5, 20))
    """
    ends = range(steps.stop, max(steps.stop - period, period - 1), -1)
    end = next((done for done in ends if not under_way(done)), steps.stop)
    num_periods = max((end - steps.start) // period, min(1, end // period))
    return range(end - num_periods * period, end)


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Mean of each value over all ranks, the same on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def mean(values: Iterable[float]) -> float:
    """Mean; nan for nothing."""
    values = list(values)
    return statistics.fmean(values) if values else float("nan")


def median(values: Iterable[float]) -> float:
    """Median; nan for nothing."""
    values = list(values)
    return statistics.median(values) if values else float("nan")


def compute_phases(
    model: nn.Module, workload: Workload, optimizer: torch.optim.Optimizer | None, steps: int
) -> list[float]:
    """Median seconds of forward, backward and optimizer, all ranks running, nothing exchanged; mean over ranks."""
    phases: list[tuple[float, ...]] = []
    for _ in range(steps):
        dist.barrier()  # ranks that ran ahead would leave the others more of the cores than training does
        phases.append(timed_step(model, workload, optimizer, exchange=False)[1:])
    return mean_over_ranks([median(column) for column in zip(*phases[1:], strict=True)])


def measure_rate(target_s: float = 0.3, max_nbytes: int = 32 << 20) -> float:
    """Payload bytes per second that every rank can send at once, each to the next, over the same gloo as the training.

    A ring, not an all-to-all: it keeps every link busy in both directions, so it shows the wire itself. The best of
    three, since what disturbs a measurement only ever makes it slower. Without limit where there is nobody to send to.
    """
    if dist.get_world_size() == 1:
        return math.inf
    nbytes = 64 << 10
    while (elapsed_s := _ring_s(nbytes)) < target_s and 4 * nbytes <= max_nbytes:
        nbytes *= 4 if elapsed_s < target_s / 4 else 2
    return nbytes / min(_ring_s(nbytes) for _ in range(3))


def _ring_s(nbytes: int) -> float:
    """Seconds until every rank has sent ``nbytes`` to the next one, the same number on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    send, receive = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    work = dist.isend(send, (rank + 1) % world_size)
    dist.recv(receive, (rank - 1) % world_size)
    assert work is not None
    work.wait()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Fingerprint of the tensors' bits."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
