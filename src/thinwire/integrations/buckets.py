"""DDP's buckets seen as messages: which partitions a bucket holds, and where; and what is kept of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.aggregators import Block, Dense, Message, MessageLayout, Partition
from thinwire.integrations.clipping import clipped_blocks
from thinwire.plan import Plan


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """How a bucket is exchanged by a plan.

    Attributes:
        layouts: its messages.
        starts: per message and partition, the first element in the bucket.
    """

    layouts: tuple[MessageLayout, ...]
    starts: tuple[tuple[int, ...], ...]

    @property
    def is_dense(self) -> bool:
        """Whether the plan sends the whole bucket by one all-reduce. A bucket has one dtype: all or nothing."""
        return isinstance(self.layouts[0].partitions[0].aggregator, Dense)


def plan_bucket(plan: Plan, names: Sequence[str], buffer: Tensor) -> BucketPlan:
    """Find where every partition lies: parameters follow one another in the bucket, in the order of `names`."""
    layouts = plan.messages(names)
    settings = layouts[0].partitions[0].aggregator
    if isinstance(settings, Dense):
        whole = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return BucketPlan((_whole(plan, whole, buffer, settings),), ((0,),))
    first: dict[str, int] = {}
    start = 0
    for name in names:
        first[name] = start
        start += plan.by_name[name].info.numel
    assert start == buffer.numel(), f"bucket of {buffer.numel()} elements for parameters of {start}"
    starts = tuple(tuple(first[p.name] + p.offset for p in layout.partitions) for layout in layouts)
    return BucketPlan(tuple(layouts), starts)


def _whole(plan: Plan, name: str, buffer: Tensor, settings: Dense) -> MessageLayout:
    """Lay out the buffer itself: a complex parameter's bucket is its real view, of twice the length."""
    whole = Partition(name=name, dtype=buffer.dtype, offset=0, numel=buffer.numel(), owner=0, aggregator=settings)
    return Dense.lay_out([whole], plan.world_size)


@dataclass(slots=True)
class Bucket:
    """One of DDP's buckets, as long as DDP keeps it: after the first step DDP makes others."""

    names: tuple[str, ...]
    buffer: Tensor
    source: Plan  # what the plan was made from
    plan: BucketPlan
    work: Tensor  # float32, what messages work on: the buffer itself, or a copy where it is of another dtype
    messages: list[Message]
    clipped: list[tuple[Block, float]]  # blocks whose gradients are clipped, in the order of parameters, and the norms
    narrow: Tensor | None = None  # what is summed where DDP's own all-reduce carries another dtype
    waiter: "Waiter | None" = None  # of the last step


@dataclass(slots=True)
class Waiter:
    """The messages of one bucket in one step."""

    bucket: Bucket
    future: "torch.futures.Future[Any]"
    pending: int


class Buckets:
    """What is kept of DDP's buckets from step to step, as long as DDP keeps them.

    Args:
        names: of parameters, by `id`.
        messages: makes the messages of a bucket, by a plan, on float32 values.

    Attributes:
        kept: by DDP's number of the bucket.
    """

    def __init__(self, names: Mapping[int, str], messages: Callable[[Plan, BucketPlan, Tensor], list[Message]]) -> None:
        self._names, self._messages = names, messages
        self.kept: dict[int, Bucket] = {}

    def find(self, bucket: dist.GradBucket, source: Plan) -> Bucket:
        """Return what is kept of a bucket, made anew where DDP has other ones, or the last step is still under way."""
        index, buffer = bucket.index(), bucket.buffer()
        names = tuple(self._names[id(param)] for param in bucket.parameters())
        ours = self.kept.get(index)
        if (
            ours is None
            or ours.source is not source
            or ours.names != names
            or ours.buffer.data_ptr() != buffer.data_ptr()  # ours is kept, so that no other can lie at its address
            or (ours.waiter is not None and ours.waiter.pending > 0)
        ):
            plan = plan_bucket(source, names, buffer)
            copied = not plan.is_dense and buffer.dtype != torch.float32
            work = torch.empty_like(buffer, dtype=torch.float32) if copied else buffer
            messages = [] if plan.is_dense else self._messages(source, plan, work)
            ours = self.kept[index] = Bucket(names, buffer, source, plan, work, messages, clipped_blocks(messages))
        if bucket.is_last():
            self.kept = {i: kept for i, kept in self.kept.items() if i <= index}
        return ours

    def layouts(self) -> Iterator[MessageLayout]:
        """Yield those of all messages of the last step."""
        return (layout for bucket in self.kept.values() for layout in bucket.plan.layouts)

    @property
    def copies_nbytes(self) -> int:
        """Memory of copies in another dtype."""
        kept = list(self.kept.values())
        copies = sum(bucket.work.nbytes for bucket in kept if bucket.work is not bucket.buffer)
        return copies + sum(bucket.narrow.nbytes for bucket in kept if bucket.narrow is not None)
