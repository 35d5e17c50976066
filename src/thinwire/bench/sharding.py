"""FSDP2 in a benchmark: how a model is sharded, what is sent with each method, and what layers compute with."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import thinwire
from thinwire.bench.methods import Attached
from thinwire.bench.settings import split_weights
from thinwire.bench.workloads import Workload
from thinwire.integrations.fsdp import ShardLink
from thinwire.integrations.fsdp_groups import ShardGroup, shard_groups


def wrap(workload: Workload, seed: int) -> nn.Module:
    """A fresh model: each part sharded by itself and gathered again for backward, the rest gathered once a step."""
    model = workload.model(seed)
    for part in workload.parts(model):
        fully_shard(part, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=False)
    return model


def attach(method: str, model: nn.Module, start_after: int) -> Attached:
    """Set ``method`` up on a sharded model: ``fsdp``, or a recipe with ``:weights=KIND`` or without."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gradients, weights = (shard_groups(model, world_size, weights=which) for which in (False, True))
    dense = sum(_dense_nbytes(group, world_size) for group in gradients)
    dense += sum(_gathers(group, model) * _dense_nbytes(group, world_size) for group in weights)
    if method == "fsdp":
        return Attached(lambda: dense, None, dense_nbytes=dense)
    recipe, kind = split_weights(method)
    link: Any = thinwire.attach(model, recipe, weights=kind, start_after=start_after)
    assert isinstance(link, ShardLink)
    planned = 0
    for group in gradients:
        if group.names in link.plan.groups:
            planned += sum(r.sent_nbytes(rank) for m in link.plan.layouts(group.names) for r in m.rounds)
        else:
            planned += _dense_nbytes(group, world_size)
    for group in weights:
        once = _dense_nbytes(group, world_size)
        if group.names in link.plan.weight_groups:
            once = sum(r.sent_nbytes(rank) for m in link.plan.weight_layouts(group.names) for r in m.rounds)
        planned += _gathers(group, model) * once
    return Attached(lambda: planned, None, link, link.phases.plans[-1][0], dense_nbytes=dense)


def _dense_nbytes(group: ShardGroup, world_size: int) -> int:
    """Bytes that a rank must send of a group to reduce and scatter it, or to gather it: one shard to every other."""
    return (world_size - 1) * group.shard_numel * group.dtype.itemsize


def _gathers(group: ShardGroup, model: nn.Module) -> int:
    """How often a group's weights are gathered in a step."""
    return 1 if group.module is model else 2


def whole(workload: Workload, model: nn.Module, seed: int) -> nn.Module:
    """A copy of the model as it is kept, sharded no more. Collective."""
    copy = workload.model(seed)
    with torch.no_grad():
        for param, shard in zip(copy.parameters(), model.parameters(), strict=True):
            assert isinstance(shard, DTensor)
            param.copy_(shard.full_tensor())
    return copy


def computed_with(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights as layers see them: gathered by the method at work, and equal on all ranks. Collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            # Copies: storage that NumPy has seen cannot be freed, as FSDP2 does it.
            yield from (param.detach().clone() for param in module.parameters() if not isinstance(param, DTensor))
            module.reshard()
