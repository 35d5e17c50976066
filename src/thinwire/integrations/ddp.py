"""DistributedDataParallel: validates, agrees, and makes the `Link` whose hook DDP calls."""

import dataclasses
import datetime
import logging
import os
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.aggregators import Dense, Gather, Hierarchical, NodePushPull, ThroughServers
from thinwire.allocate import Allocate
from thinwire.auto import Auto, read_auto
from thinwire.comm.device import Cuda, Device
from thinwire.comm.process_group import DEPTH, SERVED_DEPTH, OverlappedDriver, common_group
from thinwire.errors import AttachError, PlanError, RecipeError
from thinwire.feedback import MomentumCorrection
from thinwire.integrations.agreement import agree
from thinwire.integrations.driver import ServedDriver, Servers
from thinwire.integrations.link import Link, Scaler
from thinwire.integrations.loggers import Logger
from thinwire.integrations.replicas import ReplicaCheck
from thinwire.integrations.sparse import sparse_names
from thinwire.integrations.topology import Topology, node_sizes
from thinwire.integrations.watch import Watch, left_over
from thinwire.kernels import serving_device
from thinwire.phases import Phases, build_phases
from thinwire.plan import Plan
from thinwire.policy import PlanOptions, plain_name
from thinwire.schedule import Phase, Schedule

Recipe = Phase | Schedule | Allocate | Auto

_FIRST_BUCKET_NBYTES = 1 << 20  # DDP's own limit for the bucket that is ready first
_FEW_BUCKETS = 4


def make_link(
    model: nn.Module,
    recipe: Recipe,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Scaler | None = None,
    start_after: int = 0,
    options: PlanOptions | None = None,
    nodes: Topology | None = None,
    servers: Servers | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    threads: int = 1,
    workers: int | None = None,
    timeout: datetime.timedelta | None = None,
    check_replicas_every: int = 0,
    loggers: Sequence[Logger] = (),
) -> Link:
    """Plan a DDP model on all ranks and make its link; the hook is not registered yet. Collective.

    See `thinwire.attach` for arguments and errors.
    """
    recipe = read_auto(recipe)
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    group = common_group(group)
    if scaler is not None and not getattr(scaler, "is_enabled", lambda: True)():
        scaler = None  # a GradScaler(enabled=False) skips nothing
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    params = model.parameters() if isinstance(model, DistributedDataParallel) else ()
    where = next((param.device for param in params if param.requires_grad), None)
    if workers is None:
        # Beside a device a worker mostly waits, first of all for gradients; others must not wait for it.
        depth = DEPTH if servers is None else SERVED_DEPTH
        workers = depth if where is not None and where.type == "cuda" else min(4, torch.get_num_threads())
    # What is wrong with the arguments is said below, on all ranks; until then the driver must come up.
    served = None if servers is None else servers.connect(group, max(1, workers), timeout)
    driver = served or OverlappedDriver(group, workers=max(1, workers), timeout=timeout, device=where)

    def build() -> Phases:
        _check(model, optimizer, start_after, on_nonfinite)
        if check_replicas_every < 0:
            raise AttachError(f"expected check_replicas_every >= 0 steps, got {check_replicas_every}")
        if threads < 1 or workers < 1:
            raise AttachError(f"expected at least one thread and one worker, got {threads} and {workers}")
        if servers is not None and isinstance(recipe, Allocate | Auto):
            raise AttachError(
                f"{type(recipe).__name__}: not supported with servers; expected one recipe, patterns, or a schedule"
            )
        if servers is not None and os.environ.get("THINWIRE_TRANSPORT") == "nccl":
            raise AttachError(
                "THINWIRE_TRANSPORT=nccl: what goes to servers leaves from memory of the host; unset it, or attach "
                "without servers"
            )
        if isinstance(recipe, Allocate | Auto) and not all(param.is_cpu for param in model.parameters()):
            raise AttachError(
                f"{type(recipe).__name__}: expected a model on the CPU; on GPUs take a recipe, patterns, or a schedule"
            )
        known = options or PlanOptions()
        if nodes is not None:
            known = dataclasses.replace(known, node_sizes=node_sizes(nodes, group))
        known = dataclasses.replace(known, num_servers=0 if servers is None else servers.num_servers)
        phases = build_phases(_trained(model), recipe, world_size, known, start_after=start_after)
        if servers is None and (pushed := _pushed(phases)):
            raise AttachError(
                f"{pushed[0]}: its exchange needs parameter servers: attach(..., servers=['tcp://HOST:PORT'])"
            )
        if nodes is not None and not any(
            isinstance(param.aggregator, Hierarchical | NodePushPull)
            for plan in phases.all_plans
            for param in plan.params
        ):
            raise AttachError("nodes: expected a recipe that knows of nodes, as 'hier/int8' does; drop the argument")
        if scaler is not None and (voting := _voting(phases)):
            raise AttachError(
                f"{voting[0]}: 'sign' delivers +1 and -1 whatever the loss scale, and a GradScaler would divide them "
                "by it; drop the scaler, or use 'onebit'"
            )
        if optimizer is None and any(
            param.aggregator.feedback is not None and param.aggregator.feedback.needs_learning_rate
            for plan in phases.all_plans
            for param in plan.params
        ):
            raise RecipeError("ErrorFeedback(lr_correction=True) needs attach(..., optimizer=optimizer)")
        if optimizer is not None:
            _check_momentum(optimizer, _momentum(phases.final))
        return phases

    try:
        # Ranks that differ in these would issue other collectives, or keep other residuals.
        settings = [
            f"start_after={start_after}",
            f"scaler={'none' if scaler is None else f'of scale {scaler.get_scale():g}'}",
            f"on_nonfinite={on_nonfinite!r}",
            f"check_replicas_every={check_replicas_every}",
            f"sparse gradients={sorted(_sparse(model)) if isinstance(model, DistributedDataParallel) else None}",
        ]
        phases = agree(build, driver.control, settings)
        if served is not None:
            agree(lambda: _open(served, phases, _need_all(model, phases, check_replicas_every)), driver.control)
    except BaseException:
        driver.close()
        raise
    assert isinstance(model, DistributedDataParallel)
    link = Link(
        phases,
        dict(_trained(model)),
        driver,
        rank=rank,
        optimizer=optimizer,
        scaler=scaler,
        on_nonfinite=on_nonfinite,
        track_unused=bool(model.find_unused_parameters or model.static_graph),
        threads=threads,
        replicas=ReplicaCheck(dict(_kept_equal(model)), driver.control),
        check_replicas_every=check_replicas_every,
        loggers=loggers,
        watch=Watch(model, _frozen(model), speaks=rank == 0),
        sparse=_sparse(model),
        group=group,
        left_over=left_over(model) if world_size > 1 else {},
        device=_device(model),
        served=served,
    )
    if rank == 0:
        _advise(model, phases.final)
        _say_left_over(model, phases.final)
        if _momentum(phases.final) is not None and optimizer is None:
            logging.getLogger("thinwire").warning(
                "momentum is applied before sending: the optimizer must have none; "
                "attach(..., optimizer=optimizer) checks that"
            )
    return link


def _open(served: ServedDriver, phases: Phases, need_all: Sequence[str]) -> Phases:
    aggregators = (param.aggregator for plan in phases.all_plans for param in plan.params)
    sizes = {one.node_sizes for one in aggregators if isinstance(one, NodePushPull)}
    if len(sizes) > 1:
        raise PlanError(f"expected the same nodes in all phases, got {', '.join(map(str, sizes))}")
    found = next(iter(sizes), None)
    assert not isinstance(found, int)  # the plan has filled in the size of each
    served.open(phases.lines(), found)
    if served.goes_on and need_all:
        raise AttachError(
            f"{need_all[0]} and would wait for one that is lost, without which these servers go on: expected servers "
            "with --on-worker-loss fail, the default"
        )
    return phases


def _need_all(model: nn.Module, phases: Phases, check_replicas_every: int) -> list[str]:
    """Return what servers have no part in, so that it takes all ranks, in words."""
    dense = (param.info for plan in phases.all_plans for param in plan.params if isinstance(param.aggregator, Dense))
    return [
        *(["check_replicas_every asks all ranks"] if check_replicas_every else []),
        *(f"{info.name} is of {info.dtype}, which ranks sum among themselves," for info in dense),
        *(f"{name} has sparse gradients, which ranks sum among themselves," for name in _sparse(model)),
    ]


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters with dense gradients that DDP reduces, under their names inside the wrapped module."""
    sparse = {id(param) for param in _sparse(model).values()}
    return [(name, param) for name, param in _kept_equal(model) if param.requires_grad and id(param) not in sparse]


def _sparse(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters with sparse gradients that DDP reduces."""
    assert isinstance(model, DistributedDataParallel)
    names = {plain_name(name) for name in sparse_names(model.module)}
    return {name: param for name, param in _kept_equal(model) if param.requires_grad and name in names}


def _kept_equal(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters that DDP keeps equal on all ranks: all that it was not told to ignore."""
    assert isinstance(model, DistributedDataParallel)
    ignored: set[str] = getattr(model, "parameters_to_ignore", set())
    return [(plain_name(name), param) for name, param in model.module.named_parameters() if name not in ignored]


def _frozen(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP does not reduce as they do not train, by name."""
    return {name: param for name, param in _kept_equal(model) if not param.requires_grad}


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None, start_after: int, on_nonfinite: str) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(
            f"expected a model wrapped in DistributedDataParallel, got {type(model).__name__}: attach after "
            "model = DistributedDataParallel(model), or after fully_shard(model), on the outermost module too"
        )
    if getattr(model, "_comm_hooks", None):
        raise AttachError(
            "the model already has a communication hook, and DDP takes only one: attach once, after wrapping"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise AttachError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    if start_after < 0:
        raise AttachError(f"expected start_after >= 0 steps, got {start_after}")
    if on_nonfinite not in ("raise", "warn"):
        raise AttachError(f"expected on_nonfinite 'raise' or 'warn', got {on_nonfinite!r}")
    if getattr(model, "_use_python_reducer", False):
        raise AttachError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', with which DDP hands over no buckets: set it to "
            "True or False before DistributedDataParallel is made"
        )
    if _sparse(model) and not _trained(model):
        raise AttachError("all gradients are sparse, which DDP sums uncompressed: there is nothing to compress")
    places: dict[torch.device, tuple[str, Tensor]] = {}
    for name, param in (*_trained(model), *_sparse(model).items()):
        places.setdefault(param.device, (name, param))
    if len(places) > 1:
        got = " and ".join(f"{name} on {where}" for where, (name, _) in places.items())
        raise AttachError(f"expected all parameters on one device, got {got}: give every rank one GPU")
    for where, (name, param) in places.items():
        if where.type not in ("cpu", "cuda"):
            raise AttachError(f"expected parameters on the CPU or a CUDA device, got {name} on {where}")
        serving_device(param)  # raises where the kernels for it are missing


def _device(model: DistributedDataParallel) -> Device | None:
    """Return what exchanges must know of the model's device; None if that is the host."""
    where = next(param for _, param in _trained(model)).device
    return None if where.type == "cpu" else Cuda(where)


def _voting(phases: Phases) -> list[str]:
    """Return the parameters that ranks vote on, in any phase."""
    settings = ((param.info.name, param.aggregator) for plan in phases.all_plans for param in plan.params)
    return [name for name, aggregator in settings if isinstance(aggregator, Gather) and aggregator.votes]


def _momentum(plan: Plan) -> MomentumCorrection | None:
    """Return the momentum that is applied before sending; `build_plan` sees to it that there is one at most."""
    feedback = (param.aggregator.feedback for param in plan.params)
    return next((one for one in feedback if isinstance(one, MomentumCorrection)), None)


def _pushed(phases: Phases) -> list[str]:
    """Return the parameters whose mean servers are to form, in any phase."""
    settings = ((param.info.name, param.aggregator) for plan in phases.all_plans for param in plan.params)
    return [name for name, aggregator in settings if isinstance(aggregator, ThroughServers)]


def _check_momentum(optimizer: torch.optim.Optimizer, sent: MomentumCorrection | None) -> None:
    """Raise `AttachError` where momentum would be applied twice, or, by an optimizer that counts on it, not at all."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        momentum = group.get("momentum") or next(iter(group.get("betas", ())), 0.0)
        if group.get("worker_momentum"):
            got = None if sent is None else f"{sent.recipe()!r}"
            if sent is None or not sent.nesterov or sent.momentum != momentum:
                raise AttachError(
                    f"{kind}(worker_momentum=True) counts on Nesterov's momentum in gradients: expected a recipe with "
                    f"'@nag:{momentum}', got {got or 'one without momentum, or all parameters dense'}"
                )
        elif momentum and sent is not None:
            raise AttachError(
                f"expected an optimizer without momentum, since MomentumCorrection applies it before sending, got "
                f"{kind} with momentum {momentum}: it would be applied twice; use torch.optim.SGD(..., momentum=0), or "
                "thinwire.optim.NAG(..., worker_momentum=True) after '@nag'"
            )


def _say_left_over(model: DistributedDataParallel, plan: Plan) -> None:
    """Say what else DDP will send, which no recipe makes fewer."""
    log = logging.getLogger("thinwire")
    if sparse := sorted(_sparse(model)):
        log.info("sparse gradients are summed by DDP itself, uncompressed: %s", ", ".join(sparse))
    found = left_over(model)
    if plan.world_size == 1 or not found:
        return
    what = ", ".join(f"{nbytes:,} bytes for {name}" for name, nbytes in found.items())
    # Beside a tenth of the gradients' bytes it is worth a thought.
    level = logging.WARNING if 10 * sum(found.values()) > plan.busiest_nbytes else logging.INFO
    newer = hasattr(model, "forward_sync_buffers")  # from torch 2.13 on, which warns of the other
    buffers = "forward_sync_buffers=False" if newer else "broadcast_buffers=False"
    hints = {"buffers": buffers, "unused parameters": "find_unused_parameters=False"}
    log.log(
        level,
        "besides gradients DDP sends, uncompressed and once a step: %s; DistributedDataParallel(..., %s) sends none, "
        "where the model allows it",
        what,
        ", ".join(hints[name] for name in found),
    )


def _advise(model: DistributedDataParallel, plan: Plan) -> None:
    """Say when training cannot gain: one rank, nothing compressed, or so few buckets that nothing overlaps."""
    log = logging.getLogger("thinwire")
    if plan.world_size == 1:
        log.warning("world size 1: there is no communication to compress")
        return
    rest = [param.info for param in plan.params if param.reason == "no pattern matches"]
    if rest:
        log.warning(
            "no pattern matches %s and %d more parameters, %d bytes in all, which stay dense: add '*': RECIPE for "
            "them, or '*': 'dense' if that is meant",
            rest[0].name,
            len(rest) - 1,
            sum(info.nbytes for info in rest),
        )
    reasons = {param.reason for param in plan.params}
    if "" not in reasons and reasons - {"asked for", "policy"}:
        log.warning("nothing is compressed: every parameter stays dense; print(link.plan) says why")
        return
    cap = int(getattr(model, "bucket_bytes_cap", 25 << 20))
    rest = max(0, plan.raw_nbytes - _FIRST_BUCKET_NBYTES)
    num_buckets = 1 + -(-rest // max(cap, 1))
    if num_buckets < _FEW_BUCKETS and plan.raw_nbytes > _FEW_BUCKETS * _FIRST_BUCKET_NBYTES:
        better = max(1, plan.raw_nbytes // (16 << 20))
        log.warning(
            "DDP will use about %d buckets, too few to overlap with backward on a slow network: "
            "DistributedDataParallel(..., bucket_cap_mb=%d) would make about %d",
            num_buckets,
            better,
            1 + -(-rest // (better << 20)),
        )
