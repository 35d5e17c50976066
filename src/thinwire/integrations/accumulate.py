"""Gradient accumulation that saves its traffic, whatever wraps the model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import AttachError

if TYPE_CHECKING:  # importing it takes a while
    from torch.distributed.fsdp import FSDPModule


@contextmanager
def accumulate(model: nn.Module, *, sync: bool) -> Iterator[None]:
    """Let gradients add up on this rank until the last micro-batch of a window, and exchange their sum with that.

    Put the forward pass inside, too: DDP decides there whether the backward pass will exchange. All ranks must give
    the same `sync`. What is exchanged is the sum over micro-batches, once; divide the loss by their number for a mean.
    In the end, and after an exception, the model is as it was before.

    Args:
        model: a `DistributedDataParallel` model, or one with FSDP2 modules (`fully_shard`, sharded in one dimension or
            replicated in another), compiled or not. With FSDP2, gradients stay unsharded between micro-batches.
        sync: whether this micro-batch is the last of its window.

    Raises:
        AttachError: another kind of model: nothing would be saved.

    Example:
        ```python
        for i, x in enumerate(micro_batches):
            with thinwire.accumulate(model, sync=i == len(micro_batches) - 1):
                (loss(model(x)) / len(micro_batches)).backward()
        optimizer.step()
        ```
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile wraps
    if isinstance(inner, DistributedDataParallel):
        before = inner.require_backward_grad_sync  # what DDP's own no_sync() sets, which knows only one direction
        inner.require_backward_grad_sync = sync
        try:
            yield
        finally:
            inner.require_backward_grad_sync = before
        return
    sharded = _sharded(inner)
    if not sharded:
        raise AttachError(
            f"expected a DistributedDataParallel model or one with fully_shard modules, got {type(model).__name__}: "
            "accumulating would save no traffic. Pass the wrapped model, not the module inside it"
        )
    flags = [_flags(module) for module in sharded]
    for module in sharded:
        module.set_requires_gradient_sync(sync, recurse=False)
    try:
        yield
    finally:
        for module, (reduce_scatter, all_reduce) in zip(sharded, flags, strict=True):
            module.set_requires_gradient_sync(reduce_scatter, recurse=False)
            module.set_requires_all_reduce(all_reduce, recurse=False)


def _sharded(model: nn.Module) -> "list[FSDPModule]":
    return [
        module  # type: ignore[misc]
        for module in model.modules()
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    ]


def _flags(module: "FSDPModule") -> tuple[bool, bool]:
    """Return whether a module reduce-scatters and all-reduces its gradients: torch has setters, but no getters."""
    state: Any = module._get_fsdp_state()
    groups: Iterable[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return next(((g.reduce_grads, g.all_reduce_grads) for g in groups if g is not None), (True, True))
