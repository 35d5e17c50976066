"""Hooks that remember nothing between steps: the plan is made from each bucket as it comes."""

import contextlib
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.aggregators import Block, BufferPool, Message, Staging, work_memory
from thinwire.comm.device import Cuda, Device, Failure, staged
from thinwire.comm.process_group import DEPTH, Outcome, OverlappedDriver, common_group
from thinwire.comm.tracing import title
from thinwire.integrations.buckets import BucketPlan, plan_bucket
from thinwire.integrations.link import unwrap
from thinwire.integrations.sparse import sum_sparse
from thinwire.plan import build_plan
from thinwire.recipes import parse_recipe

_Memory = tuple[Device | None, BufferPool, Staging | None]  # what values lie on, and what blocks travel from


class StatelessHook:
    """One recipe without feedback, for any model and process group; inf and nan are delivered as nan.

    Random numbers are keyed by a parameter's place in its bucket, since names are not known here, and by the pass.

    Drivers are made on first use, which is collective, as DDP calls hooks on all ranks alike.
    """

    def __init__(self, recipe: str) -> None:
        self._recipe = parse_recipe(recipe)
        assert self._recipe.feedback is None, f"{recipe} needs state"
        self._drivers: weakref.WeakKeyDictionary[dist.ProcessGroup, OverlappedDriver] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
        self._plans: dict[tuple[Any, ...], BucketPlan] = {}
        self._memories: dict[tuple[torch.device, bool], _Memory] = {}

    def run(self, state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange one bucket over `state`, or over the default group."""
        group = common_group(state)
        driver = self._drivers.get(group)
        if driver is None:
            where = bucket.buffer().device
            workers = 1 if where.type == "cpu" else DEPTH
            driver = self._drivers[group] = OverlappedDriver(group, workers=workers, device=where)
        # Every pass draws other numbers. Passes of several models count alike on all ranks, as hooks are called alike.
        self._steps[group] = step = self._steps.get(group, -1) + (bucket.index() == 0)
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return sum_sparse(buffer, group)
        plan = self._plan(bucket, buffer, dist.get_world_size(group))
        device, buffers, staging = self._memory(buffer.device, on_device=driver.on_device)
        if plan.is_dense:
            messages = [Message(plan.layouts[0], [], driver.rank, flat=buffer, buffers=buffers, staging=staging)]
            work = buffer
        else:
            work = buffer if buffer.dtype == torch.float32 else buffer.to(torch.float32)
            messages = [
                Message(
                    layout,
                    [Block(p, work[at : at + p.numel]) for p, at in zip(layout.partitions, starts, strict=True)],
                    driver.rank,
                    step,
                    buffers=buffers,
                    staging=staging,
                )
                for layout, starts in zip(plan.layouts, plan.starts, strict=True)
            ]
        raw: torch.futures.Future[Any] = torch.futures.Future() if device is None else device.future()
        arrival = None if device is None else device.arrival(work, buffer)
        countdown = _Countdown(len(messages), raw, buffer, work, device)
        for i, message in enumerate(messages):
            message.name = title(f"bucket {bucket.index()}.{i}", message.layout.names)
            exchange = type(message.layout.partitions[0].aggregator).exchange(message)
            if device is not None and arrival is not None:
                exchange = staged(exchange, device, arrival)
            driver.submit(exchange, message.layout.rounds, message.name).add_done_callback(countdown)
        return raw.then(unwrap)

    def _memory(self, where: torch.device, *, on_device: bool) -> _Memory:
        if (where, on_device) not in self._memories:
            device = None if where.type == "cpu" else Cuda(where)
            self._memories[where, on_device] = (device, *work_memory(device, pinned=not on_device))
        return self._memories[where, on_device]

    def _plan(self, bucket: dist.GradBucket, buffer: Tensor, world_size: int) -> BucketPlan:
        parameters = bucket.parameters()
        key = (world_size, bucket.index(), *((tuple(p.shape), p.dtype) for p in parameters))
        plan = self._plans.get(key)
        if plan is None:
            named = [(f"{bucket.index()}.{i}", parameter) for i, parameter in enumerate(parameters)]
            names = [name for name, _ in named]
            plan = self._plans[key] = plan_bucket(build_plan(named, self._recipe, world_size), names, buffer)
        return plan


class _Countdown:
    """Resolves a bucket's future when its last message is done."""

    def __init__(
        self, num: int, future: "torch.futures.Future[Any]", buffer: Tensor, work: Tensor, device: Device | None
    ) -> None:
        self._num, self._future, self._buffer, self._work, self._device = num, future, buffer, work, device
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def __call__(self, done: "Future[Outcome]") -> None:
        with self._lock:
            self._num -= 1
            self._error = self._error or done.exception()
            last = self._num == 0
        if last:
            with contextlib.nullcontext() if self._device is None else self._device.queue():
                try:
                    if self._work is not self._buffer and self._error is None:
                        self._buffer.copy_(self._work)
                except BaseException as error:  # the driver's future would swallow it, and backward would wait for ever
                    self._error = error
                self._future.set_result(self._buffer if self._error is None else Failure(self._error))
