"""What FSDP2 shards, and where it lies in the flat buffers of its reduce-scatters; what cannot be served is refused.

All of torch's private names that thinwire needs for FSDP2 are in this file.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from thinwire.errors import AttachError


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """A parameter that trains, whole.

    Attributes:
        name: qualified name.
        shape: unsharded.
        start: first element of its chunk in every rank's part of the flat buffer.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    def chunk(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the first element of the parameter that `rank` keeps, and how many: a run of whole rows."""
        rows = -(-self.shape[0] // world_size)
        row = math.prod(self.shape[1:])
        first, last = (min(self.shape[0], rows * r) for r in (rank, rank + 1))
        return first * row, (last - first) * row


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """The parameters whose gradients FSDP2 reduces together.

    Attributes:
        module: the module that was passed to `fully_shard`.
        inner: torch's own parameter group.
        params: in the order of the flat buffer, without the frozen ones.
        dtype: of the gradients on their way.
        shard_numel: elements of one rank's part of the flat buffer, padding included.
    """

    module: Any
    inner: Any
    params: tuple[ShardedParam, ...]
    dtype: torch.dtype
    shard_numel: int


def shard_process_group(model: nn.Module) -> dist.ProcessGroup:
    """Return the ranks over which a model is sharded.

    Raises:
        AttachError: no parameter is a DTensor.
    """
    for param in model.parameters():
        if isinstance(param, DTensor):
            return param.device_mesh.get_group(0)
    raise AttachError(
        "expected the sharded parameters of a fully_shard model, got none: attach before the first forward pass or "
        "after model.reshard()"
    )


def shard_groups(model: nn.Module, world_size: int) -> list[ShardGroup]:
    """Return the groups of a `fully_shard` model that have parameters to train.

    Raises:
        AttachError: something that torch or this version cannot do, with what to do instead.
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise AttachError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter, through which gradients are "
            "compressed: expected torch 2.13"
        )
    names = {id(param): name for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            _check_param(name, param, world_size)
    groups: list[ShardGroup] = []
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        found = module._get_fsdp_state()._fsdp_param_groups
        if len(found) > 1:
            raise AttachError(
                f"{path or 'the model'}: its parameters are sharded over {len(found)} meshes, and torch takes one "
                "custom reduce-scatter for all: expected one mesh"
            )
        for inner in found:
            group = _group(path or "the model", module, inner, names, world_size)
            if group.params and all(group.inner is not other.inner for other in groups):
                groups.append(group)
    return groups


def _check_param(name: str, param: DTensor, world_size: int) -> None:
    mesh = param.device_mesh
    if mesh.ndim != 1:
        raise AttachError(
            f"{name} lives on a mesh of {mesh.ndim} dimensions: FSDP2 sends gradients over a replicate dimension "
            "uncompressed before its all-reduce hook runs, and other dimensions are not supported; expected "
            "fully_shard(..., mesh=) with the shard dimension alone"
        )
    if mesh.size() != world_size:
        raise AttachError(f"{name} is sharded over {mesh.size()} ranks, other parameters over {world_size}")
    if tuple(param.placements) != (Shard(0),):
        raise AttachError(f"{name}: expected a parameter sharded along dimension 0, got {param.placements}")
    if mesh.device_type != "cpu" or param.device.type != "cpu":
        raise AttachError(f"{name} lives on {param.device}: this version exchanges gradients of CPU models over gloo")


def _group(path: str, module: Any, inner: Any, names: dict[int, str], world_size: int) -> ShardGroup:
    if type(inner._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
        raise AttachError(
            f"{path} has a custom reduce-scatter already ({type(inner._reduce_scatter_comm).__name__}), and FSDP2 "
            "takes only one: attach once, or close the other link first"
        )
    params: list[ShardedParam] = []
    dtypes: set[torch.dtype] = set()
    start = 0
    for one in inner.fsdp_params:
        param = one.sharded_param
        if not param.requires_grad:
            continue
        shape = tuple(param.shape)
        params.append(ShardedParam(names[id(param)], shape, start))
        dtypes.add(inner.mp_policy.reduce_dtype or inner.mp_policy.param_dtype or param.dtype)
        start += -(-shape[0] // world_size) * math.prod(shape[1:])
    if len(dtypes) > 1:
        raise AttachError(f"{path}: expected gradients of one dtype, got {sorted(map(str, dtypes))}")
    return ShardGroup(module, inner, tuple(params), dtypes.pop() if dtypes else torch.float32, start)
