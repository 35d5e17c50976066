"""Latency, rate and processor time of the collectives that exchanges consist of, of all ranks at once.

They run as drivers run them: blocks over a `Mesh` where all ranks have the compiled module, all-reduces by gloo.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.advisor.fit import Point, fit_line, telling
from thinwire.advisor.profile import CollectiveFit, Operation
from thinwire.comm.mesh import Mesh
from thinwire.comm.process_group import perform
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Transfer

REPEATS, SHORT_REPEATS = 3, 10
SHORT_S = 5e-3
FIRST_NBYTES = 1 << 10
GROWTH = 2
MOST_NBYTES = 32 << 20


def measure_collectives(group: dist.ProcessGroup, mesh: Mesh | None, *, target_s: float) -> tuple[CollectiveFit, ...]:
    """Measure all-reduce, all-to-all and all-gather; the same result on all ranks. Collective.

    Args:
        group: all ranks; its time-out ends every wait.
        mesh: of the same ranks, or None where blocks travel by gloo.
        target_s: messages grow until a collective takes as long.
    """
    return (
        _measure("all_reduce", _all_reduce, group, mesh, target_s),
        _measure("all_to_all", _all_to_all, group, mesh, target_s),
        _measure("all_gather", _all_gather, group, mesh, target_s),
    )


def _measure(
    operation: Operation,
    make: Callable[[int, int], Transfer],
    group: dist.ProcessGroup,
    mesh: Mesh | None,
    target_s: float,
) -> CollectiveFit:
    """Time rounds of growing sizes. The slowest rank counts, and of several times the least."""
    points: list[Point] = []
    cpu: list[Point] = []
    nbytes = FIRST_NBYTES
    while True:
        transfer = make(nbytes, group.size())
        sent = float(max(transfer.round.sent_nbytes_by_rank()))
        perform(transfer, group, mesh)  # touches the memory
        times: list[tuple[float, float]] = []
        while len(times) < (SHORT_REPEATS if times and times[-1][0] < SHORT_S else REPEATS):
            _barrier(group)
            cpu_start, start = time.process_time(), time.perf_counter()
            perform(transfer, group, mesh)
            mine = (time.perf_counter() - start, time.process_time() - cpu_start)
            times.append(_largest(mine, group))
        seconds = min(wall for wall, _ in times)
        points.append((sent, seconds))
        cpu.append((sent, max(min(used for _, used in times), 1e-9)))
        nbytes *= GROWTH
        if (seconds >= target_s and len(points) > 1) or nbytes > MOST_NBYTES:
            break
    alpha_s, beta, residual = fit_line(telling(points))
    (few, little), (many, much) = min(cpu, key=lambda point: point[1]), cpu[-1]
    per_nbyte = max(0.0, (much - little) / (many - few)) if many > few else 0.0
    return CollectiveFit(
        operation=operation,
        alpha_s=alpha_s,
        beta=beta,
        residual=residual,
        cpu_s_per_nbyte=per_nbyte,
        cpu_s=max(0.0, little - few * per_nbyte),
        points=tuple(points),
    )


def _all_reduce(nbytes: int, world_size: int) -> Transfer:
    data = torch.zeros(nbytes // 4)
    return Transfer(AllReduce(data.numel(), data.dtype, world_size), data, data)


def _all_to_all(nbytes: int, world_size: int) -> Transfer:
    block = max(1, nbytes // world_size)
    send, receive = (torch.zeros(world_size * block, dtype=torch.uint8) for _ in range(2))
    return Transfer(AllToAll((block,) * world_size), send, receive)


def _all_gather(nbytes: int, world_size: int) -> Transfer:
    block = max(1, nbytes // world_size)
    send, receive = (torch.zeros(num * block, dtype=torch.uint8) for num in (1, world_size))
    return Transfer(AllGather((block,) * world_size), send, receive)


def _barrier(group: dist.ProcessGroup) -> None:
    group.allreduce([torch.zeros(1)]).wait()


def _largest(values: tuple[float, float], group: dist.ProcessGroup) -> tuple[float, float]:
    found = torch.tensor(values, dtype=torch.float64)
    group.allreduce([found], dist.ReduceOp.MAX).wait()
    return float(found[0]), float(found[1])
