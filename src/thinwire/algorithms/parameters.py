"""Groups of parameters as optimizers take them, and what is refused in them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from thinwire.errors import OptimizerError


def no_decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float = 0.01
) -> list[dict[str, Any]]:
    """Return two groups of parameters: matrices with weight decay; biases and norms, which have one dimension, without.

    Args:
        named_parameters: of a model; those that need no gradient are left out.
        weight_decay: of the first group.

    Example:
        >>> decay, without = no_decay_groups(torch.nn.Linear(2, 3).named_parameters())
        >>> [name for name, _ in decay["params"]], [name for name, _ in without["params"]], without["weight_decay"]
        (['weight'], ['bias'], 0.0)
    """
    trained = [(name, param) for name, param in named_parameters if param.requires_grad]
    groups = [
        {"params": [(name, param) for name, param in trained if param.dim() > 1], "weight_decay": weight_decay},
        {"params": [(name, param) for name, param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def check_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Raise `OptimizerError` for settings out of range, and for parameters that are no plain float32 or float64."""
    kind = type(optimizer).__name__
    below_1 = {f"betas[{i}]": beta for i, beta in enumerate(group.get("betas", ()))}
    below_1 |= {"momentum": group["momentum"]} if "momentum" in group else {}
    for name, value in below_1.items():
        if not 0.0 <= value < 1.0:
            raise OptimizerError(f"{kind}: expected {name} in [0, 1), got {value}")
    for name in ("lr", "weight_decay"):
        if not group[name] >= 0.0:
            raise OptimizerError(f"{kind}: expected {name} of at least 0, got {group[name]}")
    for name in ("eps", "max_grad_norm"):
        if group.get(name) is not None and not group[name] > 0.0:
            raise OptimizerError(f"{kind}: expected {name} above 0, got {group[name]}")
    for place, param in enumerate(group["params"]):
        if param.dtype not in (torch.float32, torch.float64):
            raise OptimizerError(
                f"{kind}: expected float32 or float64 parameters, got {param.dtype} for {_name(group, place)}; keep "
                "float32 parameters and compute under torch.autocast"
            )
        if hasattr(param, "to_local"):
            raise OptimizerError(
                f"{kind}: expected whole parameters, got a {type(param).__name__} for {_name(group, place)}: norms are "
                "over whole parameters, not over shards; use it with DistributedDataParallel"
            )


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptimizerError` where a gradient is sparse."""
    for group in optimizer.param_groups:
        for place, param in enumerate(group["params"]):
            if param.grad is not None and param.grad.is_sparse:
                raise OptimizerError(
                    f"{type(optimizer).__name__}: expected dense gradients, got a sparse one for "
                    f"{_name(group, place)}; use torch.nn.Embedding(sparse=False)"
                )


def _name(group: dict[str, Any], place: int) -> str:
    shape = tuple(group["params"][place].shape)
    return f"{group['param_names'][place]!r}" if "param_names" in group else f"parameter {place}, of shape {shape}"
