"""What users call."""

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from thinwire.aggregators import Aggregator
from thinwire.algorithms import CLAN_OPTIONS, LANS, clan_recipe
from thinwire.allocate import Allocate
from thinwire.auto import Auto, read_auto
from thinwire.errors import AttachError
from thinwire.integrations.accumulate import accumulate as accumulate
from thinwire.integrations.ddp import Recipe, make_link
from thinwire.integrations.link import Link, Scaler
from thinwire.integrations.loggers import Logger
from thinwire.integrations.topology import Topology
from thinwire.policy import PlanOptions

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from thinwire.integrations.fsdp import ShardLink
    from thinwire.integrations.fsdp_build import WeightRecipe
    from thinwire.server.client import Servers


@overload
def attach(
    model: "FSDPModule",
    recipe: Recipe,
    *,
    weights: "WeightRecipe | None" = None,
    replicate_group: "dist.ProcessGroup | DeviceMesh | None" = None,
    replicate_recipe: Recipe | None = None,
    scaler: Scaler | None = None,
    start_after: int = 0,
    options: PlanOptions | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    threads: int = 1,
    workers: int | None = None,
    timeout: datetime.timedelta | None = None,
) -> "ShardLink": ...


@overload
def attach(
    model: nn.Module,
    recipe: Recipe,
    *,
    weights: "WeightRecipe | None" = None,
    replicate_group: "dist.ProcessGroup | DeviceMesh | None" = None,
    replicate_recipe: Recipe | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Scaler | None = None,
    start_after: int = 0,
    options: PlanOptions | None = None,
    nodes: Topology | None = None,
    servers: "Sequence[str] | Servers | None" = None,
    keys: str | Path | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    threads: int = 1,
    workers: int | None = None,
    timeout: datetime.timedelta | None = None,
    check_replicas_every: int = 0,
    loggers: Sequence[Logger] = (),
) -> Link: ...


def attach(
    model: "nn.Module | FSDPModule",
    recipe: Recipe,
    *,
    weights: "WeightRecipe | None" = None,
    replicate_group: "dist.ProcessGroup | DeviceMesh | None" = None,
    replicate_recipe: Recipe | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Scaler | None = None,
    start_after: int = 0,
    options: PlanOptions | None = None,
    nodes: Topology | None = None,
    servers: "Sequence[str] | Servers | None" = None,
    keys: str | Path | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    threads: int = 1,
    workers: int | None = None,
    timeout: datetime.timedelta | None = None,
    check_replicas_every: int = 0,
    loggers: Sequence[Logger] = (),
) -> "Link | ShardLink":
    """Make a DDP model exchange compressed gradients from its next backward pass on.

    Call once, on every rank, after wrapping the model. Gradients that `backward` leaves in `param.grad` are then the
    mean over ranks as the recipe delivers it, equal on all ranks to the bit.

    Args:
        model: a `DistributedDataParallel` model on the CPU or one GPU a rank; or a `fully_shard` one on the CPU, whose
            reduce-scatters are compressed, and with `weights` their all-gathers, without `optimizer`, `nodes`,
            `servers`, `check_replicas_every` and `loggers`.
        recipe: a recipe string ("int8", "topk:0.01", ...; see `thinwire.recipes`), an `Aggregator`, a mapping from
            shell-style patterns on parameter names to either, or a function of `ParamInfo` that returns
            either, or None to leave the parameter dense; or a `Schedule` of these, or its text ("dense until 500 then
            int4"); or `Allocate`, which chooses among recipes for every parameter, anew every so many steps; or "auto",
            or `Auto`, which tries recipes and keeps the fastest.
        weights: of a `fully_shard` model only: a compressor, or its recipe without feedback ("int8", "fp16",
            "int4:rotation=32"), by which shards of weights travel to all ranks; or a mapping from patterns to either,
            or a function of `ParamInfo`, as for `recipe`. Forward and backward passes then compute with what is
            decoded; the shards themselves stay exact. None leaves the all-gathers to FSDP2.
        replicate_group: of a model that is sharded over one dimension of a mesh: the ranks that keep the same shards in
            every replica, as `mesh["replicate"]`. Gradients are then averaged over replicas, too.
        replicate_recipe: for that; `recipe` if None.
        optimizer: needed by `ErrorFeedback(lr_correction=True)`, which reads learning rates from it. With
            `MomentumCorrection` it is checked to have no momentum of its own.
        scaler: the GradScaler in use. A step that is not finite on any rank is then delivered as nan to all, so that
            all skip it, and leaves residuals and counters as they were.
        start_after: dense steps before compression begins.
        options: how parameters are cut into partitions and messages, what stays dense, and the seed.
        nodes: which ranks share a node, for recipes as "hier/int8": ranks per node; the sizes of all nodes, in rank
            order; a 2-D `DeviceMesh`, whose first dimension is between nodes; or "auto", the launcher's
            LOCAL_WORLD_SIZE, where it is the same on all nodes.
        servers: addresses of parameter servers, as ["tcp://10.0.0.1:5555", ...], in the order of their --server-index,
            which then form the mean, for recipes of the two-shot exchange, and with `nodes` for "hier/int8" and the
            like; or "env", those that `thinwire launch` has started; or `Servers`, with time-outs. They need no GPU,
            whatever device the model is on. See `thinwire server`.
        keys: the folder that `thinwire keys` made for workers; needed where a server is on another machine.
        on_nonfinite: without a scaler, whether `backward` raises on inf or nan, or delivers nan with a log line.
        threads: native threads per kernel call.
        workers: threads that encode and decode different messages; by default as many as `torch.get_num_threads()`, at
            most 4; beside a GPU, for which they mostly wait, 6, or 16 with servers.
        timeout: of each collective; torch's default for gloo if None.
        check_replicas_every: steps between checks that all ranks hold the same parameters, to the bit, frozen ones too;
            0 never checks. A check hashes all parameters before the first bucket of a backward pass and gathers 64
            bytes a rank; other steps cost nothing. Buffers are not compared: DDP lets those of BatchNorm differ. Nor
            are ranks that have joined (`DistributedDataParallel.join`).
        loggers: objects with `write(step, values)`, called on rank 0; see `LogLine`, `CSV`, `TensorBoard`.

    Returns:
        A `Link`, or a `ShardLink` for a sharded model: `plan` (printable), `stats()`, `state_dict()`,
        `load_state_dict()`.

    Raises:
        AttachError: no process group, another kind of model or device, a model that has a hook, an optimizer that would
            apply momentum a second time.
        ServerError: a parameter server does not answer, or `keys` are missing.
        RecipeError: an unknown recipe or a setting out of range.
        PlanError: a pattern that matches nothing, phases that do not go together, or ranks whose plans differ; the
            first difference is named. All ranks raise.

        Later, `backward` raises on all ranks: `ReplicaError`, if a check finds parameters that differ.

    Example:
        ```python
        model = DistributedDataParallel(model, bucket_cap_mb=1)
        link = thinwire.attach(model, "topk:0.01")
        print(link.plan)
        ```
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps, and calls hooks of what it wraps
    # A model cannot be sharded unless torch.distributed.fsdp is imported, which takes a while: not before.
    if any(base.__name__ == "FSDPModule" for base in type(model).__mro__):
        from thinwire.integrations.fsdp import make_shard_link

        given = {
            "optimizer": optimizer,
            "nodes": nodes,
            "servers": servers,
            "keys": keys,
            "check_replicas_every": check_replicas_every,
            "loggers": loggers,
        }
        if wrong := [name for name, value in given.items() if value]:
            raise AttachError(f"{', '.join(wrong)}: not supported with fully_shard; expected attach without")
        for one in map(read_auto, (recipe, replicate_recipe)):
            if isinstance(one, Allocate | Auto):
                kind = type(one).__name__
                raise AttachError(
                    f"{kind}: not supported with fully_shard; expected one recipe, patterns, or a schedule"
                )
        return make_shard_link(
            model,  # type: ignore[arg-type]
            recipe,  # type: ignore[arg-type]
            weights=weights,
            replicate_group=replicate_group,
            replicate_recipe=replicate_recipe,  # type: ignore[arg-type]
            scaler=scaler,
            start_after=start_after,
            options=options,
            on_nonfinite=on_nonfinite,
            threads=threads,
            workers=workers,
            timeout=timeout,
        )
    assert isinstance(model, nn.Module)
    if weights is not None:
        raise AttachError(
            f"weights={weights!r}: only a fully_shard model sends its weights, expected attach without, got a "
            f"{type(model).__name__}"
        )
    if replicate_group is not None or replicate_recipe is not None:
        raise AttachError(
            f"replicate_group and replicate_recipe are for fully_shard models; expected attach without, got a "
            f"{type(model).__name__}"
        )
    link = make_link(
        model,
        recipe,  # type: ignore[arg-type]
        optimizer=optimizer,
        scaler=scaler,
        start_after=start_after,
        options=options,
        nodes=nodes,
        servers=_servers(servers, keys),
        on_nonfinite=on_nonfinite,
        threads=threads,
        workers=workers,
        timeout=timeout,
        check_replicas_every=check_replicas_every,
        loggers=loggers,
    )
    model.register_comm_hook(None, link.hook)  # type: ignore[operator]  # make_link has checked that it is DDP
    return link


def clan(
    model: nn.Module,
    recipe: str | Aggregator | Mapping[str, str | Aggregator] = "topk",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    options: PlanOptions = CLAN_OPTIONS,
    **others: Any,
) -> Link:
    r"""Let a DDP model train by CLAN: LANS on gradients that are compressed on their way up and back.

    With worker i's gradient g_i, n workers, and the mean p that `LANS` takes for the gradient, for each partition:

        unbiased kinds:     p = C( (1/n) sum_i C(g_i) )                              (algorithm 3: no memory)
        contractive kinds:  p = C( (1/n) sum_i C(g_i + e_i) + e' ), where e_i and e' are what C lost of its argument
                            on the worker and on the partition's owner in the step before, 0 at first (algorithm 4)

    The moments of LANS are those of p on all workers, from the first step on: there is no dense warm-up, and nothing is
    frozen.

    Args:
        model: a `DistributedDataParallel` model.
        recipe: a setting of the paper by name, "onebit", "topk", "randomk", "linear5", "linear7", "natural" or "fp16";
            or another recipe without a feedback of its own; or settings, as `TwoShot` or `PushPull`; or a mapping from
            patterns on parameter names to any of these, or to "dense".
        optimizer: the `thinwire.optim.LANS` in use, to be checked. The paper's runs have `normalize_grad=False`.
        options: cuts, and what stays dense: by default all below 1,024,000 bytes, as in the paper. Small models need a
            lower `min_nbytes`, or nothing is compressed, which the log says.
        others: as for `attach`.

    Returns:
        The link, as from `attach`.

    Raises:
        AttachError: what `attach` raises, or another optimizer.
        RecipeError: an unknown recipe, another exchange, or feedback that is not CLAN's.
        PlanError: what `attach` raises.

    Example:
        ```python
        optimizer = thinwire.optim.LANS(thinwire.optim.no_decay_groups(model.named_parameters()), normalize_grad=False)
        model = DistributedDataParallel(model, bucket_cap_mb=1)
        link = thinwire.clan(model, "onebit", optimizer=optimizer)
        ```

    References:
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021. Differs from the paper: owners are the workers themselves, unless `servers` are given
        as to `attach`; partitions have 65,536 values where its system has 1,024,000, so that top-k, scales and signs
        are chosen for less at a time; top-k sends 16-bit indices and float16 values.
    """
    if optimizer is not None and not isinstance(optimizer, LANS):
        raise AttachError(
            f"CLAN trains with LANS: expected a thinwire.optim.LANS, got {type(optimizer).__name__}; for other "
            "optimizers use thinwire.attach(model, recipe, options=thinwire.CLAN_OPTIONS)"
        )
    settings = (
        {pattern: one if one == "dense" else clan_recipe(one) for pattern, one in recipe.items()}
        if isinstance(recipe, Mapping)
        else clan_recipe(recipe)
    )
    return attach(model, settings, optimizer=optimizer, options=options, **others)


def _servers(servers: "Sequence[str] | Servers | None", keys: str | Path | None) -> "Servers | None":
    """Return settings; those that are none are refused here, before anything that ranks do together."""
    if servers is None:
        if keys is not None:
            raise AttachError("keys: expected servers=['tcp://HOST:PORT'] beside them")
        return None
    from thinwire.server.client import Servers
    from thinwire.server.launch import ADDRESSES, KEYS

    if isinstance(servers, Servers):
        if keys is not None:
            raise AttachError("keys: expected them in Servers(keys=...), since servers is such settings")
        return servers
    if servers == "env":
        if ADDRESSES not in os.environ:
            raise AttachError(f"servers='env': expected {ADDRESSES} in the environment; start with  thinwire launch")
        return Servers(addresses=tuple(os.environ[ADDRESSES].split(",")), keys=keys or os.environ.get(KEYS))
    addresses = (servers,) if isinstance(servers, str) else tuple(servers)
    return Servers(addresses=addresses, keys=keys)
