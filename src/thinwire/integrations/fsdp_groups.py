"""What FSDP2 shards, and where it lies in the flat buffers of its collectives; what cannot be served is refused.

All of torch's private names that thinwire needs for FSDP2 are in this file.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

import math
from collections.abc import Sequence
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
    """A parameter, whole.

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

    def shard_shape(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Return the shape of what `rank` keeps."""
        rows = -(-self.shape[0] // world_size)
        return (max(0, min(self.shape[0] - rows * rank, rows)), *self.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """The parameters whose gradients FSDP2 reduces together, or which it gathers together.

    Attributes:
        module: the module that was passed to `fully_shard`.
        inner: torch's own parameter group.
        params: in the order of the flat buffer; without the frozen ones where gradients are reduced.
        dtype: of the gradients, or of the weights, on their way.
        shard_numel: elements of one rank's part of the flat buffer, padding included.
    """

    module: Any
    inner: Any
    params: tuple[ShardedParam, ...]
    dtype: torch.dtype
    shard_numel: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in their order."""
        return tuple(param.name for param in self.params)

    @property
    def reduce_scatter(self) -> Any:
        """FSDP2's present reduce-scatter of these parameters."""
        return self.inner._reduce_scatter_comm

    @property
    def all_gather(self) -> Any:
        """FSDP2's present all-gather of these parameters."""
        return self.inner._all_gather_comm

    @property
    def pass_goes_on(self) -> bool:
        """Whether FSDP2 waits for the end of a backward pass: an inner one, as of a checkpointed layer, may be over."""
        return self.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued

    @property
    def in_backward(self) -> bool:
        """Whether FSDP2 gathers these parameters, or prefetches them, for a backward pass."""
        return self.inner._training_state.name == "PRE_BACKWARD"


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


def shard_groups(model: nn.Module, world_size: int, *, weights: bool = False) -> list[ShardGroup]:
    """Return the groups of a `fully_shard` model that have parameters to train; with `weights` all, as gathered.

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
            if not inner.is_sharded:
                raise AttachError(
                    f"{path or 'the model'} holds whole parameters, as after a forward pass without a backward one: "
                    "attach before, or call reshard() on that module first"
                )
            make = _weights if weights else _gradients
            group = make(path or "the model", module, inner, names, world_size)
            if group.params and all(group.inner is not other.inner for other in groups):
                groups.append(group)
    return groups


def _check_param(name: str, param: DTensor, world_size: int) -> None:
    mesh = param.device_mesh
    if mesh.ndim != 1:
        raise AttachError(
            f"{name} lives on a mesh of {mesh.ndim} dimensions: FSDP2 sends gradients over a replicate dimension "
            "uncompressed before its all-reduce hook runs, and other dimensions are not supported; expected "
            "fully_shard(..., mesh=) with the shard dimension alone, and attach(..., replicate_group=) for replicas"
        )
    if mesh.size() != world_size:
        raise AttachError(f"{name} is sharded over {mesh.size()} ranks, other parameters over {world_size}")
    if tuple(param.placements) != (Shard(0),):
        raise AttachError(f"{name}: expected a parameter sharded along dimension 0, got {param.placements}")
    if mesh.device_type != "cpu" or param.device.type != "cpu":
        raise AttachError(f"{name} lives on {param.device}: this version exchanges gradients of CPU models over gloo")


def _gradients(path: str, module: Any, inner: Any, names: dict[int, str], world_size: int) -> ShardGroup:
    if type(inner._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
        raise AttachError(
            f"{path} has a custom reduce-scatter already ({type(inner._reduce_scatter_comm).__name__}), and FSDP2 "
            "takes only one: attach once, or close the other link first"
        )
    trained = [one for one in inner.fsdp_params if one.sharded_param.requires_grad]
    policy = inner.mp_policy
    dtypes = {policy.reduce_dtype or policy.param_dtype or one.sharded_param.dtype for one in trained}
    if len(dtypes) > 1:
        raise AttachError(f"{path}: expected gradients of one dtype, got {sorted(map(str, dtypes))}")
    return ShardGroup(module, inner, *_flat(trained, names, dtypes, world_size))


def _weights(path: str, module: Any, inner: Any, names: dict[int, str], world_size: int) -> ShardGroup:
    if type(inner._all_gather_comm).__name__ != "DefaultAllGather":
        raise AttachError(
            f"{path} has a custom all-gather already ({type(inner._all_gather_comm).__name__}), and FSDP2 takes only "
            "one: attach once, or close the other link first"
        )
    if inner._use_post_forward_mesh:
        raise AttachError(
            f"{path}: after the forward pass its weights are sharded over fewer ranks, and gathered from those; "
            "expected reshard_after_forward True or False with weights="
        )
    for one in inner.fsdp_params:
        if hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise AttachError(
                f"{names[id(one.sharded_param)]} is a {type(one._sharded_local_tensor).__name__}, which says itself "
                "what is gathered of it (fsdp_pre_all_gather): expected a plain tensor with weights="
            )
    dtypes = {inner.mp_policy.param_dtype or one.sharded_param.dtype for one in inner.fsdp_params}
    if len(dtypes) > 1:
        raise AttachError(f"{path}: expected weights of one dtype, got {sorted(map(str, dtypes))}")
    return ShardGroup(module, inner, *_flat(inner.fsdp_params, names, dtypes, world_size))


def _flat(
    found: Sequence[Any], names: dict[int, str], dtypes: set[torch.dtype], world_size: int
) -> tuple[tuple[ShardedParam, ...], torch.dtype, int]:
    """Return the parameters with their places, their dtype, and the elements of one rank's part."""
    params: list[ShardedParam] = []
    start = 0
    for one in found:
        shape = tuple(one.sharded_param.shape)
        params.append(ShardedParam(names[id(one.sharded_param)], shape, start))
        start += -(-shape[0] // world_size) * math.prod(shape[1:])
    return tuple(params), next(iter(dtypes), torch.float32), start
