"""DDP's buckets seen as messages: which partitions a bucket holds, and where."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.aggregators import Dense, MessageLayout, Partition
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
