"""What exchanging costs a processor besides kernels and collectives: Python, changes of threads, and DDP's copies."""

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.advisor.profile import CollectiveFit
from thinwire.aggregators import Block, Gather, Message, MessageLayout, Partition, TwoShot
from thinwire.aggregators.base import Aggregator
from thinwire.comm.process_group import OverlappedDriver, own_group
from thinwire.compressors import Cast
from thinwire.errors import ProfileError

NUM_MESSAGES = 24
REPEATS = 5
NUMEL = 64  # of a partition: so few that only the number of messages counts
NUM_PARAMETERS, PARAMETER_NUMEL = 16, 1 << 16
FEW_BUCKETS_MB, MANY_BUCKETS_MB = 64.0, 0.25


def measure_messages(
    group: dist.ProcessGroup, fits: tuple[CollectiveFit, ...], timeout: datetime.timedelta
) -> tuple[float, float]:
    """Return processor seconds per message, and per round of it, on the rank where they are most. Collective.

    Tiny messages of one round and of two go through the driver that training has, many at once. What the collectives
    take by themselves, by `fits`, is left out.

    Args:
        group: all ranks; as for `OverlappedDriver`.
        fits: what was measured of collectives, by their rounds.
        timeout: ends every wait.
    """
    cast = Cast(dtype=torch.float16)
    driver = OverlappedDriver(group, lanes=1, timeout=timeout)
    try:
        one = _message_s(driver, Gather(up=cast), fits, timeout)
        two = _message_s(driver, TwoShot(up=cast, down=cast), fits, timeout)
    finally:
        driver.close()
    round_s = min(max(two - one, 0.0), two / 2)  # of noise neither becomes negative
    return max(one - round_s, 0.0), round_s


def measure_messages_alone() -> tuple[float, float]:
    """Return what `measure_messages` does of a group of this process alone, which it makes: no socket is touched.

    Raises:
        ProfileError: the process is in a process group, whose other ranks know nothing of this.
    """
    if dist.is_initialized():
        raise ProfileError("expected no process group, got one: profile its ranks with thinwire.profile instead")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return measure_messages(dist.group.WORLD, (), datetime.timedelta(minutes=1))
    finally:
        dist.destroy_process_group()


def _message_s(
    driver: OverlappedDriver, aggregator: Aggregator, fits: tuple[CollectiveFit, ...], timeout: datetime.timedelta
) -> float:
    control = driver.control
    world_size = control.size()
    partitions = [
        Partition(name="x", dtype=torch.float32, offset=i * NUMEL, numel=NUMEL, owner=i, aggregator=aggregator)
        for i in range(world_size)
    ]
    layout = type(aggregator).lay_out(partitions, world_size)
    messages = [
        Message(layout, [Block(p, torch.zeros(NUMEL)) for p in partitions], driver.rank) for _ in range(NUM_MESSAGES)
    ]
    used: list[float] = []
    for step in range(1 + REPEATS):
        control.allreduce([torch.zeros(1)]).wait()
        start = time.process_time()
        for message in messages:
            message.begin(step)
        done = [driver.submit(aggregator.exchange(message), layout.rounds) for message in messages]
        for one in done:
            one.result(timeout.total_seconds())
        used.append(time.process_time() - start)
    most = torch.tensor([min(used[1:]) / NUM_MESSAGES])  # the first prepares
    control.allreduce([most], dist.ReduceOp.MAX).wait()
    return max(0.0, float(most) - _collectives_s(layout, fits))


def _collectives_s(layout: MessageLayout, fits: tuple[CollectiveFit, ...]) -> float:
    cpu_s = {fit.operation: fit.cpu_s for fit in fits}
    rounds = ("all_gather",) if len(layout.rounds) == 1 else ("all_to_all", "all_gather")
    return sum(cpu_s.get(operation, 0.0) for operation in rounds)


def measure_buckets(*, as_views: bool) -> tuple[float, float]:
    """Return processor seconds of DDP per bucket, and per byte of gradient that it copies to a bucket and back.

    By a backward pass whose exchange does nothing, in few buckets and in many, beside one without any exchange.

    Args:
        as_views: whether gradients are views of buckets (`gradient_as_bucket_view`), which are not copied back.
    """
    alone = own_group(dist.HashStore(), 0, 1, datetime.timedelta(minutes=1))
    model = _Parameters()
    whole = model.nbytes
    cost: dict[float, float] = {}
    for cap_mb in (FEW_BUCKETS_MB, MANY_BUCKETS_MB):
        made: Any = DistributedDataParallel  # takes fractions of a MB, which its annotation does not say
        ddp = made(model, process_group=alone, bucket_cap_mb=cap_mb, gradient_as_bucket_view=as_views)
        ddp.register_comm_hook(None, _nothing)
        with ddp.no_sync():
            plain = _backward_s(ddp)
        cost[cap_mb] = max(0.0, _backward_s(ddp) - plain)
    few, many = 1, round(whole / (MANY_BUCKETS_MB * 2**20))
    bucket_s = max(0.0, cost[MANY_BUCKETS_MB] - cost[FEW_BUCKETS_MB]) / (many - few)
    return bucket_s, max(0.0, cost[FEW_BUCKETS_MB] - bucket_s) / whole


class _Parameters(nn.Module):
    """Parameters whose gradients are made in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(PARAMETER_NUMEL) for _ in range(NUM_PARAMETERS))

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.all)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum() for p in self.all]).sum()


def _backward_s(model: Any) -> float:
    """Return the least processor seconds of a backward pass; the first ones build buckets."""
    x, used = torch.ones(1), list[float]()
    for _ in range(2 + REPEATS):
        for param in model.parameters():
            param.grad = None
        loss = model(x)
        start = time.process_time()
        loss.backward()
        used.append(time.process_time() - start)
    return min(used[2:])


def _nothing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
