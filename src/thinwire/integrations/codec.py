"""How long a plan's kernels take on one rank, without any exchange."""

import time

import torch
from torch import Tensor

from thinwire.aggregators import Dense, Partition
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.plan import Plan
from thinwire.random import Key


def measure_codec(plan: Plan, rank: int, *, threads: int = 1, repeats: int = 3) -> float:
    """Return the least wall seconds, of `repeats`, that one step's kernels take on one rank, run alone.

    That is: encode every partition up, decode `world_size` contributions to the partitions owned, encode those down,
    decode every partition. With `Gather`, decode `world_size` contributions to every partition.
    """
    generator = torch.Generator().manual_seed(0)
    partitions = [p for param in plan.params for p in param.partitions if not isinstance(p.aggregator, Dense)]
    best = float("inf")
    values = {p: torch.randn(p.numel, generator=generator, dtype=torch.float32) * 1e-3 for p in partitions}
    residuals = {p: torch.zeros(p.numel, dtype=torch.float32) for p in partitions if p.aggregator.feedback is not None}
    for _ in range(repeats if partitions else 0):
        total = 0.0
        for partition in partitions:
            total += _codec_once(plan, rank, partition, values[partition], residuals.get(partition), threads)
        best = min(best, total)
    return best if partitions else 0.0


def _codec_once(
    plan: Plan, rank: int, partition: Partition, value: Tensor, residual: Tensor | None, threads: int
) -> float:
    aggregator, spec = partition.aggregator, partition.spec
    one_round = len(type(aggregator).schedule([partition], plan.world_size)) == 1
    up = torch.empty(aggregator.up.nbytes(spec), dtype=torch.uint8)
    down = torch.empty(aggregator.down.nbytes(spec), dtype=torch.uint8)
    mean = torch.empty(partition.numel, dtype=torch.float32)
    key = Key(partition.key, 0, rank, partition.offset)
    if not one_round and partition.owner != rank:
        aggregator.down.encode_jobs([EncodeJob(value, down, None, 1.0, key)], [spec])  # bytes to decode; not timed
    started = time.perf_counter()
    aggregator.up.encode_jobs([EncodeJob(value, up, residual, 1.0, key)], [spec], threads=threads)
    if one_round or partition.owner == rank:
        for source in range(plan.world_size):
            job = DecodeJob(up, mean, 1.0 if source else None, key)
            aggregator.up.decode_jobs([job], [spec], threads=threads)
        if not one_round:
            aggregator.down.encode_jobs([EncodeJob(mean, down, residual, 1.0, key)], [spec], threads=threads)
    if not one_round:
        aggregator.down.decode_jobs([DecodeJob(down, mean, None, key)], [spec], threads=threads)
    return time.perf_counter() - started
