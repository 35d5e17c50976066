"""How each method is set up on a DDP model: PyTorch's own baselines, and thinwire's recipes through ``attach``."""

import dataclasses as dc
import math
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.arithmetic import ring_nbytes
from thinwire.bench.settings import AUTO, AUTO_START, LocalName, split_local
from thinwire.comm.node_round import NodeRound
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Pull, Push, Round, SendRecv
from thinwire.errors import ScheduleError

POWERSGD_START = 2  # the earliest step at which torch's hook may compress: DDP rebuilds its buckets after the first
FAST_BPS = 500e6  # from here on processor time decides, not the wire
SLOW_BPS = 30e6  # up to here even a few bytes are worth sending early
_KNOWS_NODES = re.compile(r"(?:^|\s)hier[:/]")  # in a recipe or a schedule
_POWERSGD_MIN_COMPRESSION = 2  # torch's default: a matrix that would shrink less than this is sent whole


@dc.dataclass(frozen=True, slots=True)
class Attached:
    """A method at work on one model, as the worker needs it.

    Args:
        planned_nbytes: payload that leaves this rank's host per step, by arithmetic; of what the method now does.
        codec_s: measures seconds of compression and decompression for one step on this rank, without exchange; None
            where the method does not let that be measured.
        link: thinwire's link, or None for a baseline.
        start_step: first step that runs as it will go on.
        period: steps after which costs repeat; of a local method those between exchanges.
        settle: makes replicas equal that the method leaves apart, after the training; None where they are.
        close: ends the exchange, so that further steps are plain ones; None where DDP's ``no_sync`` does.
        under_way: whether an exchange is, between two steps, after so many; of a local method that overlaps them.
        dense_nbytes: what the uncompressed exchange of the same model would send; None for DDP's ring.
    """

    planned_nbytes: Callable[[], float]
    codec_s: Callable[[], float] | None
    link: Any = None
    start_step: int = 0
    _: dc.KW_ONLY
    period: int = 1
    settle: Callable[[], None] | None = None
    close: Callable[[], None] | None = None
    under_way: Callable[[int], bool] = lambda steps: False
    dense_nbytes: int | None = None


def bucket_cap_mb(method: str, chosen: float | None, rate_bps: float | None) -> float:
    """DDP's bucket size for a method: ``chosen``, or with None the size that does best in the lab at this rate.

    Small buckets fill the wire early; each also costs processor time. The slower the wire and the more a method sends,
    the smaller the best ones. PyTorch's PowerSGD hook hangs on gloo as soon as there is a second bucket, because it
    waits for collectives inside another collective's callback: it always gets one bucket.
    """
    if method.startswith("ddp-powersgd"):
        return 1e6
    if chosen is not None:
        return chosen
    fast = rate_bps is None or rate_bps >= FAST_BPS
    if method.startswith("ddp") or (fast and method == AUTO):
        return 4.0
    few_bytes = any(kind in method for kind in ("topk", "randomk", "onebit", "lowrank"))
    if few_bytes:
        slow = rate_bps is not None and rate_bps <= SLOW_BPS
        return 25.0 if fast else 1.0 if slow else 8.0
    return 8.0 if fast else 1.0


def attach(
    method: str,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
    start_after: int,
    ranks_per_node: int = 1,
) -> Attached:
    """Set ``method`` up on ``model``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in parameters)
    if method == "ddp":
        return Attached(lambda: _ring_nbytes(4 * numel), lambda: 0.0)
    if method == "ddp-fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
        return Attached(lambda: _ring_nbytes(2 * numel), lambda: _fp16_codec_s(numel))
    if method.startswith("ddp-powersgd:"):
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        rank = int(method.partition(":")[2])
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWERSGD_START,
            min_compression_rate=_POWERSGD_MIN_COMPRESSION,
            orthogonalization_epsilon=1e-8,  # pyright: ignore[reportArgumentType]  (torch annotates an int); torch's default of 0 turns a layer's all-zero gradient into nan
        )
        model.register_comm_hook(state, powerSGD_hook)
        sent = sum(_powersgd_numel(p, rank) for p in parameters)
        return Attached(lambda: _ring_nbytes(4 * sent), None, start_step=POWERSGD_START)
    if (local := split_local(method)) is not None:
        return _attach_local(local, model, optimizer)
    import thinwire
    from thinwire.bench.servers import end_servers, host_nbytes, split_method, start_servers

    for group in optimizer.param_groups if optimizer is not None else ():
        if "@dgc" in method and isinstance(optimizer, torch.optim.SGD):
            group["momentum"] = 0.0  # the method applies it
        if "@nag" in method and isinstance(optimizer, thinwire.optim.NAG):
            group["worker_momentum"] = True  # likewise, but for that of weight decay
    per_host, recipe = split_method(method)
    servers = None
    if per_host:
        end_servers()  # those of the method before
        servers = start_servers(per_host, dist.get_world_size())
    nodes = ranks_per_node if _KNOWS_NODES.search(recipe) else None
    link = thinwire.attach(model, recipe, servers=servers, optimizer=optimizer, start_after=start_after, nodes=nodes)
    rank = dist.get_rank()

    def planned_nbytes() -> float:
        if per_host:
            return host_nbytes(link.plan, rank, per_host)
        layouts = link.plan.messages([param.info.name for param in reversed(link.plan.params)])
        rounds = [one for layout in layouts for one in layout.rounds]
        return leaving_nbytes(rounds, rank // ranks_per_node, ranks_per_node)

    start = link.phases.plans[-1][0] + (AUTO_START if method == AUTO else 0)
    return Attached(planned_nbytes, link.codec_seconds, link, start)


def _attach_local(name: LocalName, model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None) -> Attached:
    import thinwire

    assert optimizer is not None, "refused before"
    model.require_backward_grad_sync = False  # DDP as a plain module: as inside `no_sync()`
    if name.kind == "streaming":
        outer = thinwire.StreamingDiLoCo(
            model.module,
            optimizer,
            name.recipe,
            sync_every=name.sync_every,
            fragments=name.fragments,
            overlap=name.overlap,
        )
    else:
        kind = thinwire.LocalSGD if name.kind == "localsgd" else thinwire.DiLoCo
        outer = kind(model.module, optimizer, name.recipe, sync_every=name.sync_every)
    return Attached(
        lambda: outer.planned_nbytes() / name.sync_every,
        None,
        outer,
        period=name.sync_every,
        under_way=outer.rhythm.under_way,
        settle=outer.sync,
        close=outer.close,
    )


def leaving_nbytes(rounds: Iterable[Round], node: int, ranks_per_node: int) -> int:
    """Return the payload bytes of rounds that leave a host of so many ranks, in rank order.

    >>> leaving_nbytes([AllToAll((1, 2, 3, 4)), AllGather((1, 2, 3, 4))], 0, 2)
    20
    """
    ours = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    total = 0
    for one in rounds:
        match one:
            case AllToAll(nbytes):
                total += len(ours) * sum(n for rank, n in enumerate(nbytes) if rank not in ours)
            case AllGather(nbytes):
                total += (len(nbytes) - len(ours)) * sum(nbytes[rank] for rank in ours)
            case SendRecv() | NodeRound():
                moves = [move for rank in ours for move in one.sends(rank)]
                total += sum(stop - start for target, start, stop in moves if target not in ours)
            case AllReduce():  # a ring: the last rank of a host sends to the first one of the next
                total += one.sent_nbytes(ours[-1]) if len(ours) < one.world_size else 0
            case Push() | Pull():
                raise ScheduleError("expected rounds between ranks; host_nbytes counts those through servers")
    return total


def _ring_nbytes(nbytes: int) -> int:
    return ring_nbytes(nbytes, dist.get_world_size())


def _powersgd_numel(parameter: nn.Parameter, rank: int) -> int:
    """Elements that torch's PowerSGD hook all-reduces for one parameter: both factors, or all of it."""
    if parameter.dim() < 2:
        return parameter.numel()
    rows = parameter.shape[0]
    columns = math.prod(parameter.shape[1:])
    factors = (rows + columns) * min(rows, columns, rank)
    return factors if factors * _POWERSGD_MIN_COMPRESSION < rows * columns else parameter.numel()


def _fp16_codec_s(numel: int) -> float:
    """Seconds for what torch's fp16 hook does around its all-reduce: cast, divide, copy back."""
    gradient, repeats = torch.randn(numel), 3
    start = time.perf_counter()
    for _ in range(repeats):
        gradient.copy_(gradient.to(torch.float16).div_(2))
    return (time.perf_counter() - start) / repeats
