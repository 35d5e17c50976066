"""PyTorch's PowerSGD as saved by its hook, as the state of a link.

PyTorch keeps its errors and factors by bucket: flat, in the order of the bucket's parameters; of the factors only those
of compressed parameters, those of one shape together, each (m, r) row after row. `Slot.FACTOR` is (r, m).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire.aggregators import PowerSGD
from thinwire.errors import StateError
from thinwire.feedback import Slot
from thinwire.integrations.link import Link
from thinwire.kernels.low_rank import matrix_shape
from thinwire.plan import PlannedParam

if TYPE_CHECKING:  # imported by those who have one
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


def bucket_names(model: nn.parallel.DistributedDataParallel) -> list[list[str]]:
    """Return the names of the parameters in each of DDP's buckets, in DDP's order, for `import_power_sgd`.

    Save it with PyTorch's state: after a restart DDP has other buckets.

    Raises:
        StateError: DDP has not said so yet. It rebuilds its buckets after the first step and says so two steps later;
            with `find_unused_parameters` never.
    """
    indices = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if not indices:
        raise StateError(
            "DDP has not said which parameters its buckets hold: expected a model that has trained for three steps or "
            "more, without find_unused_parameters; or write down in a hook of your own which bucket.parameters() "
            "bucket.index() has, and pass their names"
        )
    ignored = getattr(model, "parameters_to_ignore", set[str]())
    trained = [n for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored]
    return [[trained[int(index)] for index in bucket.split()] for bucket in str(indices).split(",")]


def import_power_sgd(
    state: "PowerSGDState", buckets: Sequence[Sequence[str]], link: Link, *, loss_scale: float = 1.0
) -> dict[str, Any]:
    """Return what PyTorch's `powerSGD_hook` keeps on this rank as a state that `link.load_state_dict` takes.

    Errors become residuals, factors Q warm starts, `iter` the step, all to the bit. Of parameters that PyTorch sent
    uncompressed the errors are each rank's difference from the mean, whose mean over ranks is zero: where the link
    sends them without feedback, too, they are dropped and nothing that is owed is lost. P is not needed. Changes
    nothing; call on every rank, with its own state.

    Args:
        state: what `register_comm_hook(state, powerSGD_hook)` got, or was loaded from a checkpoint.
        buckets: names of the parameters in each bucket, as `bucket_names` returned them when the state was saved.
        link: of the same parameters on as many ranks, attached with `powersgd:R`, R being PyTorch's
            `matrix_approximation_rank`; errors alone fit every recipe with error feedback. `powersgd:R:aggregated`
            leaves the errors that PyTorch would.
        loss_scale: the GradScaler's scale of the last step; PyTorch's errors are in units of it.

    Raises:
        StateError: a link with a schedule or `Allocate`, buckets that do not fit the state or the link, another rank or
            matrix, alternating sides, numbers that are not finite, or an error that the link would never deliver.

    Example:
        ```python
        old.register_comm_hook(state, powerSGD_hook)  # and trained
        buckets = thinwire.bucket_names(old)
        model = DistributedDataParallel(old.module)
        link = thinwire.attach(model, "powersgd:2:aggregated")
        link.load_state_dict(thinwire.import_power_sgd(state, buckets, link))
        ```
    """
    if len(link.phases.all_plans) > 1:
        raise StateError(
            "expected a link with one recipe for all steps, as thinwire.attach(model, 'powersgd:2') makes it, got a "
            "schedule or a choice of several"
        )
    saved, params = link.state_dict(), {param.info.name: param for param in link.plan.params}
    _check_names(buckets, params)
    kept = {str(slot): {name: torch.zeros_like(tensor) for name, tensor in saved[slot].items()} for slot in Slot}
    for index, names in enumerate(buckets):
        bucket = [params[name] for name in names]
        for name, error in _errors(state, index, bucket):
            if name in kept[Slot.WORKER]:
                kept[Slot.WORKER][name].copy_(link.state.in_shape(name, error))
            elif _is_compressed(state, params[name]):
                raise StateError(
                    f"{name}: PyTorch owes an error that {params[name].aggregator.recipe()!r} would never deliver; "
                    "expected a recipe with error feedback, as 'powersgd:2', and PlanOptions(min_nbytes=0) if it is "
                    "small"
                )
        for name, factor in _factors(state, index, bucket):
            if name in kept[Slot.FACTOR]:
                kept[Slot.FACTOR][name] = _fitting(params[name], factor)
    return {**saved, "step": int(state.iter), "loss_scale": float(loss_scale), "learning_rates": {}, **kept}


def _check_names(buckets: Sequence[Sequence[str]], params: Mapping[str, PlannedParam]) -> None:
    names = [name for bucket in buckets for name in bucket]
    expected = "expected buckets of the parameters that the link exchanges, each once, got"
    if len(set(names)) < len(names):
        raise StateError(f"{expected} one of them twice")
    if differing := sorted(set(names) ^ set(params)):
        raise StateError(f"{expected} {differing[0]!r} in one of them only")


def _errors(state: "PowerSGDState", index: int, bucket: Sequence[PlannedParam]) -> Iterator[tuple[str, Tensor]]:
    """Yield what PyTorch owes of each parameter, flat."""
    if index not in state.error_dict:  # not begun yet, or without feedback
        return
    sizes = [param.info.numel for param in bucket]
    _check(state.error_dict[index], sum(sizes), index, "errors")
    for param, error in zip(bucket, state.error_dict[index].split(sizes), strict=True):
        yield param.info.name, error


def _factors(state: "PowerSGDState", index: int, bucket: Sequence[PlannedParam]) -> Iterator[tuple[str, Tensor]]:
    """Yield Q of each compressed parameter, (m, r). In PyTorch's names m is the number of columns."""
    if index not in state.q_memory_dict:  # not begun yet, or without warm starts
        return
    compressed = [param for param in bucket if _is_compressed(state, param)]
    by_shape: dict[tuple[int, int], list[PlannedParam]] = {}
    for param in compressed:
        by_shape.setdefault(_torch_shape(param), []).append(param)
    in_order = [param for group in by_shape.values() for param in group]
    shapes = [(m, min(n, m, state.matrix_approximation_rank)) for n, m in map(_torch_shape, in_order)]
    sizes = [m * r for m, r in shapes]
    _check(state.q_memory_dict[index], sum(sizes), index, "factors")
    for param, shape, q in zip(in_order, shapes, state.q_memory_dict[index].split(sizes), strict=True):
        yield param.info.name, q.view(shape)


def _check(kept: Tensor, expected: int, index: int, what: str) -> None:
    if kept.numel() != expected:
        raise StateError(
            f"bucket {index}: expected {expected} numbers of {what} for its parameters, got {kept.numel()}: the "
            "buckets are not those that the state was left with"
        )
    if not bool(kept.isfinite().all()):
        raise StateError(f"bucket {index}: expected finite {what}, got inf or nan: PyTorch's training has diverged")


def _torch_shape(param: PlannedParam) -> tuple[int, int]:
    """Return the matrix that PyTorch sees: the first dimension, even of size 1, by all others."""
    rows = param.info.shape[0] if param.info.shape else 1
    return rows, param.info.numel // max(rows, 1)


def _is_compressed(state: "PowerSGDState", param: PlannedParam) -> bool:
    n, m = _torch_shape(param)
    return (n + m) * min(n, m, state.matrix_approximation_rank) * state.min_compression_rate < n * m


def _fitting(param: PlannedParam, q: Tensor) -> Tensor:
    """Return PyTorch's Q as the link keeps it."""
    settings, (partition,) = param.aggregator, param.partitions
    assert isinstance(settings, PowerSGD)
    ours, (n, m), rank = matrix_shape(partition.spec.shape), _torch_shape(param), q.shape[1]
    if settings.alternating or ours != (n, m) or param.factor_numel != q.numel():
        raise StateError(
            f"{param.info.name}: PyTorch keeps {m} x {rank} numbers of warm start for a matrix of {n} x {m}, "
            f"{settings.recipe()!r} keeps {param.factor_numel} for one of {ours[0]} x {ours[1]}; expected both sides "
            "in every step, the same rank and the same matrix"
        )
    return q.mT.to(torch.float32).reshape(-1)
