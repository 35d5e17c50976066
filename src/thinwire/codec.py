"""How long a plan's kernels take on one rank, without any exchange."""

import dataclasses
import functools
import time
from collections.abc import Hashable

import torch

from thinwire.aggregators import (
    Block,
    BufferPool,
    Dense,
    Gather,
    Hierarchical,
    Message,
    NodePushPull,
    Partition,
    PowerSGD,
    PushPull,
    ThroughServers,
    TreeReduce,
    TwoShot,
)
from thinwire.comm.local import run_lock_step
from thinwire.compressors import Sign
from thinwire.feedback import Slot
from thinwire.kernels import DecodeJob, EncodeJob, ReduceJob, VoteJob, serving
from thinwire.plan import Plan
from thinwire.random import Key
from thinwire.state import State


def measure_codec(
    plan: Plan, rank: int, *, threads: int = 1, repeats: int = 3, device: torch.device | str = "cpu"
) -> float:
    """Return the least wall seconds, of `repeats`, that one step's kernels take on one rank, run alone.

    That is, in the order of a step, so that memory is as cold: encode every partition up (after its statistic, if it
    has one), then what the exchange does with the bytes, then decode every partition. A two-shot exchange decodes
    `world_size` contributions to the partitions owned and encodes those down; a gathering one decodes or counts
    `world_size` contributions to every partition; a tree merges as many bytes as (n-1)/n of all. With nodes,
    representatives decode what comes from their node and encode the sum, and owners decode one sum a node. With
    parameter servers nothing comes between: what they do is not counted.
    """
    partitions = [p for param in plan.params for p in param.partitions if not isinstance(p.aggregator, Dense)]
    power = [p for p in partitions if isinstance(p.aggregator, PowerSGD)]
    alone_s = _alone(plan, threads, repeats, device) if power else 0.0
    partitions = [p for p in partitions if not isinstance(p.aggregator, PowerSGD)]
    if not partitions:
        return alone_s
    generator = torch.Generator().manual_seed(0)
    blocks = [_Block(p, rank, plan.world_size, threads, generator, device) for p in partitions]
    for block in blocks:  # bytes to decode where another rank would have made them
        block.encode_up()
        block.encode_down()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for block in blocks:
            block.encode_up()
        for block in blocks:
            block.combine()
        for block in blocks:
            block.decode_down()
        _settle(device)
        best = min(best, time.perf_counter() - started)
    return alone_s + best


def _settle(device: torch.device | str) -> None:
    """Wait for what was queued, where that goes on beside the host."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _alone(plan: Plan, threads: int, repeats: int, device: torch.device | str) -> float:
    """Return the seconds of PowerSGD's exchanges by one rank alone, which does what each of several does."""
    generator = torch.Generator().manual_seed(0)
    state = State(plan, {p.info.name: torch.empty((), device=device).expand(p.info.shape) for p in plan.params}, 0)
    together: dict[Hashable, list[Block]] = {}
    for param in plan.params:
        for p in param.partitions:
            if not isinstance(p.aggregator, PowerSGD):
                continue
            value = torch.randn(p.numel, generator=generator, dtype=torch.float32).to(device) * 1e-3
            block = state.block(dataclasses.replace(p, owner=0), value, param.slots)
            together.setdefault(p.aggregator.together(p.dtype), []).append(block)
    pool = BufferPool(functools.partial(torch.empty, dtype=torch.uint8, device=device))
    messages = [
        Message(PowerSGD.lay_out([b.partition for b in blocks], 1), blocks, 0, threads=threads, buffers=pool)
        for blocks in together.values()
    ]
    best = float("inf")
    for step in range(repeats):
        started = time.perf_counter()
        for message in messages:
            message.begin(step)
            run_lock_step([PowerSGD.exchange(message)], message.layout.rounds)
        _settle(device)
        best = min(best, time.perf_counter() - started)
    return best


class _Block:
    """One partition with memory of its own."""

    def __init__(
        self,
        partition: Partition,
        rank: int,
        world_size: int,
        threads: int,
        generator: torch.Generator,
        device: torch.device | str,
    ) -> None:
        self.partition = partition
        self._rank, self._world_size = rank, world_size
        self._up, self._down = partition.aggregator.up, partition.aggregator.down
        self._specs, self._threads = [partition.spec], threads
        self._key = Key(partition.key, 0, rank, partition.offset)
        self._value = torch.randn(partition.numel, generator=generator, dtype=torch.float32).to(device) * 1e-3
        residuals = {Slot.WORKER, Slot.OWNER} & partition.aggregator.slots
        self._residual = torch.zeros_like(self._value) if residuals else None
        self._shared = None
        if self._up.statistic_reduction is not None:
            self._shared = self._value.new_zeros(self._up.num_statistics(partition.spec))
        self._sent, self._inside, self._mean = (
            torch.zeros(compressor.nbytes(partition.spec), dtype=torch.uint8, device=device)
            for compressor in (self._up, partition.aggregator.inner, self._down)
        )

    def encode_up(self) -> None:
        aggregator = self.partition.aggregator
        if isinstance(aggregator, Hierarchical | NodePushPull):
            nodes = aggregator.nodes(self._world_size)
            node = nodes.of[self._rank]
            leads = isinstance(aggregator, NodePushPull)
            stands = nodes.firsts[node] if leads else nodes.representative(self.partition.owner, node)
            inside = EncodeJob(self._value, self._inside, self._residual, 1.0, self._key)
            if stands != self._rank:
                aggregator.inner.encode_jobs([inside], self._specs, threads=self._threads)
                return
            for _ in range(nodes.sizes[node] - 1):
                arrived = DecodeJob(self._inside, self._value, 1.0, self._key)
                aggregator.inner.decode_jobs([arrived], self._specs, threads=self._threads)
        job = EncodeJob(self._value, self._sent, self._residual, 1.0, self._key, self._shared)
        if self._shared is not None:
            self._up.statistic_jobs([job], self._specs, threads=self._threads)
        self._up.encode_jobs([job], self._specs, threads=self._threads)

    def combine(self) -> None:
        aggregator = self.partition.aggregator
        if isinstance(aggregator, TwoShot | Hierarchical):
            if self.partition.owner == self._rank:
                self._sum_up()
                self.encode_down()
        elif isinstance(aggregator, TreeReduce):
            if self.partition.owner != self._rank:
                job = ReduceJob(self._sent, self._sent.clone(), self.partition.numel, self._key)
                self._up.reduce_jobs([job], self._specs, threads=self._threads)
        elif isinstance(aggregator, Gather) and isinstance(self._up, Sign):
            jobs = [VoteJob([self._sent] * self._world_size, self._sent, self.partition.numel)]
            serving(jobs).majority_vote(jobs)
        elif isinstance(aggregator, Gather):
            self._sum_up()

    def _sum_up(self) -> None:
        aggregator = self.partition.aggregator
        hierarchical = isinstance(aggregator, Hierarchical)
        num = len(aggregator.nodes(self._world_size).sizes) if hierarchical else self._world_size
        for source in range(num):
            job = DecodeJob(self._sent, self._value, 1.0 if source else None, self._key, self._shared)
            self._up.decode_jobs([job], self._specs, threads=self._threads)

    def encode_down(self) -> None:
        if isinstance(self.partition.aggregator, TwoShot | Hierarchical | ThroughServers):
            job = EncodeJob(self._value, self._mean, self._residual, 1.0, self._key)
            self._down.encode_jobs([job], self._specs, threads=self._threads)

    def decode_down(self) -> None:
        match self.partition.aggregator:
            case TwoShot() | Hierarchical() | PushPull() | NodePushPull():
                job = DecodeJob(self._mean, self._value, None, self._key)
                self._down.decode_jobs([job], self._specs, threads=self._threads)
            case Gather() if not isinstance(self._up, Sign):
                pass  # decoded where it was added up
            case _:
                job = DecodeJob(self._sent, self._value, None, self._key, self._shared)
                self._up.decode_jobs([job], self._specs, threads=self._threads)
