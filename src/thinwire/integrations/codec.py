"""How long a plan's kernels take on one rank, without any exchange."""

import time

import torch

from thinwire.aggregators import Dense, Partition
from thinwire.feedback import Slot
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.plan import Plan
from thinwire.random import Key


def measure_codec(plan: Plan, rank: int, *, threads: int = 1, repeats: int = 3) -> float:
    """Return the least wall seconds, of `repeats`, that one step's kernels take on one rank, run alone.

    That is, in the order of a step, so that memory is as cold: encode every partition up, decode `world_size`
    contributions to the partitions owned and encode those down, decode every partition. With `Gather`, encode every
    partition and decode `world_size` contributions to it.
    """
    partitions = [p for param in plan.params for p in param.partitions if not isinstance(p.aggregator, Dense)]
    if not partitions:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    blocks = [_Block(p, rank, threads, generator) for p in partitions]
    two_rounds, one_round = list[_Block](), list[_Block]()
    for block in blocks:
        rounds = type(block.partition.aggregator).schedule([block.partition], plan.world_size)
        (two_rounds if len(rounds) > 1 else one_round).append(block)
    for block in two_rounds:  # bytes to decode where another rank would have made them
        block.encode_down()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for block in blocks:
            block.encode_up()
        for block in one_round:
            block.sum_up(plan.world_size)
        for block in two_rounds:
            if block.partition.owner == rank:
                block.sum_up(plan.world_size)
                block.encode_down()
        for block in two_rounds:
            block.decode_down()
        best = min(best, time.perf_counter() - started)
    return best


class _Block:
    """One partition with memory of its own."""

    def __init__(self, partition: Partition, rank: int, threads: int, generator: torch.Generator) -> None:
        self.partition = partition
        self._up, self._down = partition.aggregator.up, partition.aggregator.down
        self._specs, self._threads = [partition.spec], threads
        self._key = Key(partition.key, 0, rank, partition.offset)
        self._value = torch.randn(partition.numel, generator=generator, dtype=torch.float32) * 1e-3
        residuals = {Slot.WORKER, Slot.OWNER} & partition.aggregator.slots
        self._residual = torch.zeros_like(self._value) if residuals else None
        self._sent = torch.empty(self._up.nbytes(partition.spec), dtype=torch.uint8)
        self._mean = torch.empty(self._down.nbytes(partition.spec), dtype=torch.uint8)

    def encode_up(self) -> None:
        job = EncodeJob(self._value, self._sent, self._residual, 1.0, self._key)
        self._up.encode_jobs([job], self._specs, threads=self._threads)

    def sum_up(self, world_size: int) -> None:
        for source in range(world_size):
            job = DecodeJob(self._sent, self._value, 1.0 if source else None, self._key)
            self._up.decode_jobs([job], self._specs, threads=self._threads)

    def encode_down(self) -> None:
        job = EncodeJob(self._value, self._mean, self._residual, 1.0, self._key)
        self._down.encode_jobs([job], self._specs, threads=self._threads)

    def decode_down(self) -> None:
        self._down.decode_jobs(
            [DecodeJob(self._mean, self._value, None, self._key)], self._specs, threads=self._threads
        )
