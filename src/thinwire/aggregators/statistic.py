"""What kinds with a shared scale need before any rank encodes: one all-reduce of a vector of statistics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.aggregators.base import Partition
from thinwire.aggregators.header import num_flags
from thinwire.aggregators.message import MEAN, Message, Section
from thinwire.comm.rounds import AllReduce, Exchange


def statistic_round(
    partitions: Sequence[Partition], num_names: int, world_size: int
) -> tuple[tuple[AllReduce, ...], tuple[int, ...]]:
    """Return the round of all statistics of a message, flags first, and where each partition's lie; () where none has.

    Partitions of one message have the same `statistic_reduction`.
    """
    op = partitions[0].aggregator.up.statistic_reduction
    if op is None:
        return (), ()
    starts: list[int] = []
    numel = num_flags(num_names, op)
    for partition in partitions:
        starts.append(numel)
        numel += partition.aggregator.up.num_statistics(partition.spec)
    return (AllReduce(numel, torch.float32, world_size, op),), tuple(starts)


def agree(message: Message, section: Section, out: Tensor) -> Exchange:
    """Find the statistics that all ranks encode by, where the message has such a round.

    Afterwards `message.nonfinite` says, equally on all ranks, whether any contribution is not finite, or the statistics
    of all together are not.

    Args:
        message: not encoded yet.
        section: all of its blocks.
        out: where they will be encoded to.
    """
    reduce = message.layout.rounds[0]
    if not message.layout.shared:
        return
    assert isinstance(reduce, AllReduce)
    names, vector = message.layout.names, message.statistics
    flags = vector[: num_flags(len(names), reduce.op)]
    message.write_flags(flags, message.measure(section, out), reduce.op)
    yield from message.all_reduce(reduce, vector)
    message.read_flags(flags, reduce.op)
    if not message.nonfinite and not bool(vector[flags.numel() :].isfinite().all()):
        # All are finite alone, but not together.
        ends = [*message.layout.shared[1:], vector.numel()]
        for partition, start, end in zip(message.layout.partitions, message.layout.shared, ends, strict=True):
            if not bool(vector[start:end].isfinite().all()):
                message.nonfinite.add((MEAN, partition.name))
