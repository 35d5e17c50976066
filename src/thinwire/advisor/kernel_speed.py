"""How fast this machine encodes and decodes, by compressor; and what a plan's kernels take where no rule says it."""

from collections.abc import Iterable, Sequence

import torch

from thinwire.advisor.blocks import PARTITION_NUMEL, Blocks, best_s, torch_threads
from thinwire.advisor.profile import KernelOperation, KernelSpeed
from thinwire.aggregators import PowerSGD
from thinwire.codec import measure_codec
from thinwire.compressors import Compressor, Identity
from thinwire.plan import Plan

NBYTES = 16 << 20
REPEATS = 3
SMALL_NUMEL, NUM_SMALL = 256, 2000
OPERATIONS: tuple[KernelOperation, ...] = ("encode", "encode_feedback", "decode", "accumulate")


def compressors_of(plans: Iterable[Plan]) -> list[Compressor]:
    """Return the compressors that plans call, each once."""
    aggregators = {param.aggregator for plan in plans for param in plan.params}
    found = [kind for a in aggregators if not isinstance(a, PowerSGD) for kind in (a.up, a.down, a.inner)]
    found.append(Identity())  # of what rides along uncompressed
    return sorted(dict.fromkeys(found), key=lambda compressor: compressor.recipe())


def measure_kernels(
    compressors: Sequence[Compressor], *, threads: int = 1, nbytes: int = NBYTES, repeats: int = REPEATS
) -> tuple[KernelSpeed, ...]:
    """Time every operation of every compressor on values that the cache does not hold, and on many small partitions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(nbytes // 4, generator=generator) * 1e-2
    small = x[: SMALL_NUMEL * NUM_SMALL]
    speeds: list[KernelSpeed] = []
    for compressor in compressors:
        with torch_threads(threads):
            best = best_s(Blocks(compressor, x, PARTITION_NUMEL, threads).runs(), repeats)
            few = {} if compressor.unit == "matrix" else _small(compressor, small, threads, repeats)
        for operation in OPERATIONS:
            per_nbyte = best[operation] / x.nbytes
            left = few.get(operation, 0.0) - small.nbytes * per_nbyte
            speeds.append(
                KernelSpeed(
                    recipe=compressor.recipe(),
                    operation=operation,
                    threads=threads,
                    s_per_nbyte=per_nbyte,
                    partition_s=max(0.0, left / NUM_SMALL),
                )
            )
    return tuple(speeds)


def _small(compressor: Compressor, x: torch.Tensor, threads: int, repeats: int) -> dict[str, float]:
    return best_s(Blocks(compressor, x, SMALL_NUMEL, threads).runs(), repeats)


def measure_exchange(plan: Plan, *, threads: int = 1) -> KernelSpeed:
    """Time all that one rank's kernels do in a step of a plan, per byte of what the plan compresses.

    For kinds whose work no compressor does, PowerSGD's products and orthogonalisations; the plan compresses something.
    """
    compressed = [param for param in plan.params if not param.reason]
    nbytes = sum(4 * param.info.numel for param in compressed)
    seconds = measure_codec(plan, 0, threads=threads)
    return KernelSpeed(
        recipe=compressed[0].aggregator.recipe(),
        operation="exchange",
        threads=threads,
        s_per_nbyte=seconds / nbytes,
    )
