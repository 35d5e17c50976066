"""Which tensors of a model outer steps keep equal, and how they are cut into fragments."""

import fnmatch
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import AttachError
from thinwire.spec import COMPRESSIBLE_DTYPES

Fragments = int | Sequence[str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Tracked:
    """A parameter that an optimizer changes, or a buffer of floats.

    Attributes:
        name: qualified name in the bare module.
        get: returns it.
        trained: whether it is a parameter, which the outer optimizer updates; of buffers the mean is taken.
    """

    name: str
    get: Callable[[], Tensor]
    trained: bool

    def local(self) -> Tensor:
        """Return what lies on this rank: of a sharded parameter its shard. Shares its memory."""
        return local(self.get())


def local(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, and of a DTensor the part on this rank; the memory is shared."""
    tensor = tensor.detach()
    shard: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # importing DTensor to ask takes a while
    return tensor if shard is None else shard()


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside `DistributedDataParallel` and `torch.compile`."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def trained_ids(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """Return the ids of all parameters that the optimizers' groups hold and that take gradients."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(param) for group in groups for param in group["params"] if param.requires_grad}


def track(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, buffers: bool) -> list[Tracked]:
    """Return what is kept equal, in the order of modules: their parameters, then their buffers, each tensor once.

    Raises:
        AttachError: a parameter of an optimizer that the model does not have, of another dtype, or not on the CPU.
    """
    wanted, seen, found = trained_ids(optimizers), set[int](), list[Tracked]()
    for prefix, module in bare(model).named_modules():
        for name, param in module.named_parameters(prefix, recurse=False):
            if id(param) in wanted - seen:
                seen.add(id(param))
                _check(name, param)
                found.append(Tracked(name, functools.partial(_same, param), trained=True))
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if buffers and buffer.dtype in COMPRESSIBLE_DTYPES and id(buffer) not in seen:
                seen.add(id(buffer))
                # Modules may put another tensor in its place.
                found.append(Tracked(name, functools.partial(getattr, module, name.rpartition(".")[2]), trained=False))
    if missing := len(wanted - seen):
        raise AttachError(
            f"optimizer: {missing} of its parameters are not the model's: expected the optimizer of this very model, "
            "made after wrapping or sharding it"
        )
    if not wanted:
        raise AttachError("optimizer: expected parameters that require gradients, got none")
    return found


def _same(param: Tensor) -> Tensor:
    return param


def _check(name: str, param: Tensor) -> None:
    if param.dtype not in COMPRESSIBLE_DTYPES:
        raise AttachError(f"{name}: expected float32, float16 or bfloat16, got {param.dtype}")
    if param.device.type != "cpu":
        raise AttachError(f"{name} lives on {param.device}: this version exchanges CPU models over gloo only")


def check_groups(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise `AttachError` where ranks of `group` already share gradients, or hold different shards.

    Outer steps go between replicas: with DDP inside each host from every host one rank, or all ranks with a recipe
    that knows of nodes; with FSDP2 the ranks that hold the same shard.
    """
    ranks = set(dist.get_process_group_ranks(group))
    if len(ranks) < 2:
        return
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel) and ranks <= set(dist.get_process_group_ranks(inner.process_group)):
        raise AttachError(
            f"DistributedDataParallel averages gradients over ranks {sorted(ranks)} in every step, so that outer steps "
            "between them do nothing: expected DistributedDataParallel(..., process_group=) over the ranks of one "
            "host, or the model without it"
        )
    for name, param in bare(model).named_parameters():
        mesh: Any = getattr(param, "device_mesh", None)
        if mesh is not None and len(shared := ranks & set(mesh.mesh.flatten().tolist())) > 1:
            raise AttachError(
                f"process_group: ranks {sorted(shared)} of it hold different shards of {name}: expected the ranks that "
                "hold the same one, as the process group of the mesh's dimension between hosts"
            )


def cut(found: Sequence[Tracked], fragments: Fragments) -> list[list[Tracked]]:
    """Return the fragments: runs of about equal bytes in the order of modules, or what patterns choose.

    Args:
        found: what is kept equal.
        fragments: their number; or for each one a shell-style pattern on names, or several. Every parameter goes to
            the first that matches; buffers go with the last parameter before them.

    Raises:
        AttachError: fragments without a parameter, or parameters without a fragment.
    """
    if isinstance(fragments, int):
        return _runs(found, fragments)
    if isinstance(fragments, str):
        raise AttachError(f"fragments: expected a number, or patterns for each fragment, got {fragments!r}")
    patterns = [[one] if isinstance(one, str) else list(one) for one in fragments]
    cuts: list[list[Tracked]] = [[] for _ in patterns]
    place = 0
    for one in found:
        if one.trained:
            matching = [p for p, any_of in enumerate(patterns) if any(fnmatch.fnmatchcase(one.name, w) for w in any_of)]
            if not matching:
                raise AttachError(f"fragments: no pattern matches {one.name!r}: expected every parameter in one")
            place = matching[0]
        cuts[place].append(one)
    for any_of, chosen in zip(patterns, cuts, strict=True):
        if not any(one.trained for one in chosen):
            raise AttachError(f"fragments: {any_of} chooses no parameter that those before it leave")
    return cuts


def _runs(found: Sequence[Tracked], num: int) -> list[list[Tracked]]:
    """Cut where the bytes so far, to the middle of a tensor, pass a multiple of their share."""
    params = [one for one in found if one.trained]
    if not 1 <= num <= len(params):
        raise AttachError(f"fragments: expected 1 to {len(params)}, as many as there are parameters, got {num}")
    total = sum(one.local().numel() for one in params) or 1
    cuts: list[list[Tracked]] = [[] for _ in range(num)]
    before, place, left = 0, 0, len(params)
    for one in found:
        if one.trained:
            numel = one.local().numel()
            share = int(num * (before + numel / 2) / total)
            # At most one on, none left empty, and enough parameters for those to come.
            if cuts[place] and (share > place or left <= num - 1 - place):
                place = min(place + 1, num - 1)
            before, left = before + numel, left - 1
        cuts[place].append(one)
    return cuts
