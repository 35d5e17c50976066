"""Measures a profile on the ranks of a process group: links, collectives, kernels, computation."""

import dataclasses
import datetime
import json
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from thinwire.advisor import document
from thinwire.advisor.collective_speed import measure_collectives
from thinwire.advisor.kernel_speed import compressors_of, measure_exchange, measure_kernels
from thinwire.advisor.overhead import measure_buckets, measure_messages
from thinwire.advisor.pairs import Points, confirmed_class, measure_pairs
from thinwire.advisor.places import Place, all_places, ranks_by_host
from thinwire.advisor.profile import Cluster, Computation, Kernels, LinkClass, Overhead, Pair, Profile
from thinwire.advisor.served import split_method
from thinwire.advisor.timeline import measure_computation
from thinwire.aggregators import PowerSGD
from thinwire.comm.meeting import check_reachable
from thinwire.comm.mesh import Mesh, agree_on_pieces, choose
from thinwire.comm.process_group import all_gather_text, common_group, own_group, own_store
from thinwire.errors import ProfileError, RankLostError, RecipeError, ThinwireError
from thinwire.plan import Plan, build_plan
from thinwire.policy import PlanOptions
from thinwire.recipes import parse_recipe

RECIPES = ("dense:fp16", "fp16", "int8", "int4", "onebit", "topk:0.01", "powersgd:4", "global:8", "topkc:0.01")
"""Whose kernels are measured, if nothing else is asked for: those that `advise` compares."""

NODE_RECIPES = ("hier/int8", "hier:fp16/int4")
"""As `RECIPES`, where hosts have several ranks."""

APART_RECIPES = ("int8", "e3m0")
"""What local methods are compared with, beside "dense"."""

INSIDE_RANKS = 4  # of one host, between which its inner links are measured

T = TypeVar("T")


def profile(
    model: nn.Module,
    step: Callable[[], object],
    *,
    recipes: Sequence[str] = RECIPES,
    steps: int = 5,
    threads: int = 1,
    timeout: float = 60.0,
    target: float = 0.1,
    group: dist.ProcessGroup | None = None,
    name: str = "",
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Profile:
    """Measure links, kernels and the computation of a model on this launch. Collective; the same result on all ranks.

    `step` trains: the parameters move on by a few steps, on every rank by its own gradients, since nothing is
    exchanged. Profile before training begins, or load a checkpoint afterwards.

    Args:
        model: whose gradients are to be exchanged; bare or in `DistributedDataParallel`.
        step: does one step of training: clears gradients, forward, backward, optimizer.
        recipes: whose kernels to measure.
        steps: of training that are timed, after two that are not.
        threads: native threads per kernel call, as for `attach`.
        timeout: seconds that any wait for another rank may take; measuring kernels must fit in.
        target: seconds up to which messages grow.
        group: the ranks that take part; the default group where None. On accelerators it may be of any backend: links
            are measured over connections of their own.
        name: of the model, for messages.
        on_stage: called on every rank with what is measured next.

    Returns:
        A `Profile`; `thinwire.advisor.profile.write_profile` writes it for `thinwire advise --profile`.

    Raises:
        AttachError: there is no process group, or a rank cannot be reached.
        RankLostError: a rank did not answer in time.
        ProfileError: hosts with different numbers of ranks, or `step` has no backward pass.
        RecipeError: an unknown recipe.

        All ranks raise, those that were waiting for another once their time is out.
    """
    group = common_group(group)
    if timeout <= 0 or target <= 0:
        raise ProfileError(f"expected a timeout and a target above 0 s, got {timeout:g} and {target:g}")
    with _open(group, timeout) as (store, own, mesh):
        on_stage("links")
        places = all_places(store, own)
        cluster, assumptions = _measure_cluster(places, own, mesh, target, on_stage)
        on_stage("computation")
        computation = _measure_computation(model, step, steps, own)
        on_stage("kernels")
        kernels = _measure_kernels(computation, cluster, recipes, threads, own)
        on_stage("fixed costs")
        on_cpu = next(model.parameters()).device.type == "cpu"  # where accelerators copy, it is in no time
        as_views = bool(getattr(model, "gradient_as_bucket_view", False))
        overhead = _measure_overhead(cluster, group, own, timeout, as_views=as_views if on_cpu else None)
    return Profile(
        cluster=cluster,
        computation=computation,
        kernels=kernels,
        overhead=overhead,
        model=name,
        assumptions=tuple(assumptions),
    )


def probe_cluster(
    computation: Computation,
    *,
    recipes: Sequence[str] = RECIPES,
    threads: int = 1,
    timeout: float = 60.0,
    target: float = 0.1,
    name: str = "",
    assumptions: Sequence[str] = (),
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Profile:
    """As `profile`, with a computation that is known: of a table, say."""
    group = common_group(None)
    with _open(group, timeout) as (store, own, mesh):
        on_stage("links")
        cluster, found = _measure_cluster(all_places(store, own), own, mesh, target, on_stage)
        on_stage("kernels")
        kernels = _measure_kernels(computation, cluster, recipes, threads, own)
        on_stage("fixed costs")
        overhead = _measure_overhead(cluster, group, own, timeout, as_views=None)
    return Profile(
        cluster=cluster,
        computation=computation,
        kernels=kernels,
        overhead=overhead,
        model=name,
        assumptions=(*assumptions, *found),
    )


def default_recipes(ranks_per_host: int) -> tuple[str, ...]:
    """Return the recipes to compare if nothing else is asked for."""
    return (*RECIPES, *NODE_RECIPES) if ranks_per_host > 1 else RECIPES


@contextmanager
def _open(group: dist.ProcessGroup, timeout: float) -> Iterator[tuple[dist.Store, dist.ProcessGroup, Mesh | None]]:
    """Give a store, a gloo group and a mesh of our own, in which every wait ends after `timeout`."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    limit = datetime.timedelta(seconds=timeout)
    store = own_store(ranks, rank)
    check_reachable(store, ranks, rank, timeout)
    with_mesh = choose(store, ranks, rank)
    mesh = None
    try:
        mesh = Mesh(dist.PrefixStore("mesh", store), ranks, rank, limit, "probe") if with_mesh else None
        own = own_group(dist.PrefixStore("gloo", store), rank, len(ranks), limit)
        if mesh is not None and len(ranks) > 1:
            agree_on_pieces([mesh], store)
        yield store, own, mesh
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, ThinwireError):
            raise
        raise RankLostError(
            f"rank {ranks[rank]} waited for another for {timeout:g} s at most, and it did not answer: look at the "
            f"output of the others first ({' '.join(str(error).split())[:200]})"
        ) from error
    finally:
        if mesh is not None:
            mesh.close()


def _measure_cluster(
    places: list[Place],
    group: dist.ProcessGroup,
    mesh: Mesh | None,
    target: float,
    on_stage: Callable[[str], None],
) -> tuple[Cluster, list[str]]:
    hosts = ranks_by_host(places)
    assumptions: list[str] = []
    inside = between = None
    exceptions: tuple[Pair, ...] = ()
    if len(hosts[0]) > 1:
        inside, _ = _class_of(hosts[0][:INSIDE_RANKS], group, target)
    if len(hosts) > 1:
        between, exceptions = _class_of([ranks[0] for ranks in hosts], group, target)
    if between is None:
        # Of one host only: what another would be like is anyone's guess.
        between = inside or LinkClass(alpha_s=0.0, beta=1e12)
        assumptions.append("there is one host only: links between hosts are taken to be as those inside it")
    on_stage("collectives")
    collectives = measure_collectives(group, mesh, target_s=target) if len(places) > 1 else ()
    cluster = Cluster(
        hosts=len(hosts),
        ranks_per_host=len(hosts[0]),
        between=between,
        inside=inside,
        collectives=collectives,
        exceptions=exceptions,
        interface=places[0].interface,
    )
    return cluster, assumptions


def _class_of(ranks: Sequence[int], group: dist.ProcessGroup, target: float) -> tuple[LinkClass, tuple[Pair, ...]]:
    """Measure between these ranks, while the others wait."""

    def measure(only: Collection[tuple[int, int]] | None) -> Points:
        mine = measure_pairs(ranks, group, target_s=target, only=only) if group.rank() in ranks else {}
        text = json.dumps([[*pair, points] for pair, points in mine.items()])
        told = (item for other in all_gather_text(text, group) for item in json.loads(other))
        return {(source, target): points for source, target, points in told}

    return confirmed_class(measure)


def _measure_computation(
    model: nn.Module, step: Callable[[], object], steps: int, group: dist.ProcessGroup
) -> Computation:
    """Measure on all ranks at once; return the mean over ranks of what each has measured."""

    def together() -> None:
        """Wait for all to begin a step, or hear that one has failed."""
        if error := _first_error(_gather(None, group)):
            raise _ElsewhereError(error)

    computations = _from_all(
        group, Computation, lambda: measure_computation(model, step, steps=steps, before_step=together)
    )
    first = computations[0]
    for rank, other in enumerate(computations):
        if [(p.name, p.shape) for p in other.parameters] != [(p.name, p.shape) for p in first.parameters]:
            raise ProfileError(f"expected the same model on all ranks, got other parameters on rank {rank}")

    def mean(number: Callable[[Computation], float]) -> float:
        return statistics.fmean(map(number, computations))

    return dataclasses.replace(
        first,
        forward_s=mean(lambda c: c.forward_s),
        backward_s=mean(lambda c: c.backward_s),
        optimizer_s=mean(lambda c: c.optimizer_s),
        busy_cores=mean(lambda c: c.busy_cores),
        parameters=tuple(
            dataclasses.replace(p, ready_s=mean(lambda c, i=i: c.parameters[i].ready_s))
            for i, p in enumerate(first.parameters)
        ),
    )


def _measure_kernels(
    computation: Computation, cluster: Cluster, recipes: Sequence[str], threads: int, group: dist.ProcessGroup
) -> Kernels:
    """Measure on rank 0, alone: others would take its cores where they share them."""
    recipes = (*default_recipes(cluster.ranks_per_host), *APART_RECIPES) if recipes == RECIPES else recipes
    plans = [plan for recipe in recipes if (plan := plan_for(computation, cluster, recipe)) is not None]

    def measure() -> Kernels:
        speeds = list(measure_kernels(compressors_of(plans), threads=threads))
        for plan in plans:
            if any(isinstance(param.aggregator, PowerSGD) and not param.reason for param in plan.params):
                speeds.append(measure_exchange(plan, threads=threads))
        emulated = "THINWIRE_LAB_INTERFACE" in os.environ
        return Kernels(
            cores=os.cpu_count() or 1,
            ranks_per_machine=cluster.world_size if emulated else cluster.ranks_per_host,
            speeds=tuple(speeds),
        )

    return _from_all(group, Kernels, measure if group.rank() == 0 else None)[0]


def _measure_overhead(
    cluster: Cluster, group: dist.ProcessGroup, own: dist.ProcessGroup, timeout: float, *, as_views: bool | None
) -> Overhead:
    """Measure messages on all ranks, then DDP's buckets on rank 0, if gradients lie on the CPU (`as_views` or not)."""
    message_s, round_s = measure_messages(group, cluster.collectives, datetime.timedelta(seconds=timeout))

    def measure() -> Overhead:
        bucket_s, copy_s = (0.0, 0.0) if as_views is None else measure_buckets(as_views=as_views)
        return Overhead(message_s=message_s, round_s=round_s, bucket_s=bucket_s, copy_s_per_nbyte=copy_s)

    return _from_all(own, Overhead, measure if own.rank() == 0 else None)[0]


def plan_for(computation: Computation, cluster: Cluster, recipe: str) -> Plan | None:
    """Return the plan of a recipe for a model on a cluster; None where this number of ranks is too large for it.

    After "servers:N/" through parameter servers, N on every host.
    """
    servers, recipe = split_method(recipe)
    aggregator = parse_recipe(recipe)
    options = PlanOptions(node_sizes=cluster.ranks_per_host, num_servers=servers * cluster.hosts)
    try:
        return build_plan(computation.named_tensors(), aggregator, cluster.world_size, options)
    except RecipeError:  # no room for so many summands
        return None


def _from_all(group: dist.ProcessGroup, kind: type[T], measure: Callable[[], T] | None) -> list[T]:
    """Return what the ranks with something to measure have measured; all raise where one does."""
    mine: Any = None
    try:
        mine = None if measure is None else document.as_dict(measure())
    except _ElsewhereError:
        raise  # all know
    except ThinwireError as error:
        mine = str(error)
    found = _gather(mine, group)
    if error := _first_error(found):
        raise ProfileError(error)
    return [document.parse(kind, one, f"rank {rank}") for rank, one in enumerate(found) if one is not None]


class _ElsewhereError(ProfileError):
    """Another rank could not measure, and has told all."""


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value. A text is an error."""
    return [json.loads(text) for text in all_gather_text(json.dumps(value), group)]


def _first_error(values: Sequence[Any]) -> str:
    return next((f"rank {rank}: {value}" for rank, value in enumerate(values) if isinstance(value, str)), "")
