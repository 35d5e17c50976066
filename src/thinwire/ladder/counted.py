"""Rungs of sums: nothing of a gradient is lost, and as many bytes are sent as the plan claims."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.aggregators import SumOnWire
from thinwire.aggregators.checks import typical_contract
from thinwire.compressors import Sign, is_exact
from thinwire.feedback import ErrorFeedback, Slot
from thinwire.integrations.link import Link
from thinwire.ladder.exact import anywhere
from thinwire.ladder.report import Rung
from thinwire.ladder.training import Training, Trial, gathered, whole
from thinwire.plan import PlannedParam

if TYPE_CHECKING:
    from thinwire.integrations.fsdp import ShardLink

TOLERANCE = 2.0**-18  # 64 roundings of float32, of the sum over steps of the gradients' sizes
_INTERFACES = ("THINWIRE_LAB_INTERFACE", "THINWIRE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def conservation(trial: Trial) -> Rung:
    r"""(c) What was delivered and what is still owed must add up to all gradients.

    Per parameter, with steps t, ranks i of n, gradients g, deliveries d and residuals e, in float64:

        max |1/n sum_{t,i} g_{t,i} - sum_t d_t - (1/n sum_i e_i + e_owner)| <= 2^-18 max 1/n sum_{t,i} |g_{t,i}|.

    FSDP2 does not show a rank's own gradients: there sum_i g_{t,i} is what it delivers by itself in a second training,
    and weights stay as they are in both.
    """
    with trial.training(trial.recipe) as training:
        sharded = training.wrapper == "FSDP2"
        lossy = {param.info.name: why for param in training.planned if (why := _loses(param))}
        names = [param.info.name for param in training.planned if param.info.name not in lossy]
        compressed = {param.info.name for param in training.planned if not param.reason}
        if lossy and (not names or compressed <= lossy.keys()):  # what is left is dense: it would prove nothing
            return Rung(name="conservation", verdict="not applicable", sentence=next(iter(lossy.values())))
        worst = {} if sharded else _gaps(trial, training, names)
    if sharded:
        worst = _gaps_of_shards(trial, names)
    name = max(worst, key=lambda name: worst[name])
    numbers = {"worst": worst[name], "tolerance": TOLERANCE, "num_params": float(len(names))}
    left_out = f"; {len(lossy)} others keep no residual" if lossy else ""
    if worst[name] <= TOLERANCE:
        sentence = (
            f"delivered + owed = all gradients of {trial.steps} steps, to {worst[name]:.1e} of their size at most "
            f"(allowed {TOLERANCE:.1e}){left_out}"
        )
        return Rung(name="conservation", verdict="ok", sentence=sentence, numbers=numbers)
    sentence = (
        f"{name!r}: delivered + owed misses the sum of all gradients by {worst[name]:.1e} of their size (allowed "
        f"{TOLERANCE:.1e})"
    )
    return Rung(name="conservation", verdict="failed", sentence=sentence, numbers=numbers)


def _gaps(trial: Trial, training: Training, names: Sequence[str]) -> dict[str, float]:
    """Return what is missing of the gradients of each parameter, relative to their size. Collective."""
    module = training.module
    trained = {name: module.get_parameter(name) for name in names}
    gaps = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in trained.items()}
    sizes = {name: zero.clone() for name, zero in gaps.items()}
    for step in range(trial.steps):
        grads = torch.autograd.grad(training.value(module, step), list(trained.values()), allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                gaps[name] += grad.double()
                sizes[name] += grad.double().abs()
        training.step(step)
        for name, param in trained.items():
            if param.grad is not None:
                gaps[name] -= param.grad.double()
    n = dist.get_world_size(trial.group)
    _take_owed(training, gaps, n)
    return {name: _relative(_mean(gaps[name], trial.group, n), _mean(sizes[name], trial.group, n)) for name in names}


def _gaps_of_shards(trial: Trial, names: Sequence[str]) -> dict[str, float]:
    """Do as `_gaps`, with what FSDP2 delivers by itself for the mean of all gradients. Collective."""
    gaps, sizes = dict[str, Tensor](), dict[str, Tensor]()
    n = dist.get_world_size(trial.group)
    for recipe, sign in ((None, 1), (trial.recipe, -1)):
        with dataclasses.replace(trial, weights=None).training(recipe, lr=0.0) as training:
            for step in range(trial.steps):
                training.step(step)
                for name in names:
                    if (grad := training.module.get_parameter(name).grad) is not None:
                        mean = whole(grad).double()
                        gaps[name] = gaps.get(name, 0) + sign * mean
                        sizes[name] = sizes.get(name, 0) + mean.abs()
            if recipe is not None:
                _take_owed(training, gaps, n)
    return {name: _relative(_mean(gap, trial.group, n), sizes[name]) for name, gap in gaps.items()}


def _take_owed(training: Training, gaps: dict[str, Tensor], n: int) -> None:
    """Take from this rank's gaps what it owes, in units whose mean over ranks is what is owed."""
    state = training.attached.state_dict()
    for name, gap in gaps.items():
        for slot, share in ((Slot.WORKER, 1.0), (Slot.OWNER, float(n))):
            if name in state[slot]:
                gap -= state[slot][name].double() * share


def _loses(param: PlannedParam) -> str:
    """Return why a parameter's gradients are not conserved, or ""."""
    aggregator, feedback = param.aggregator, param.aggregator.feedback
    recipe = aggregator.recipe()
    if isinstance(aggregator.up, Sign):
        return f"{recipe}: votes deliver signs, of which gradients are no sum"
    if param.info.dtype != torch.float32:
        return f"{param.info.name!r} is {param.info.dtype}: what is delivered is rounded to that"
    if isinstance(aggregator, SumOnWire) and getattr(aggregator.up, "value_dtype", torch.float32) != torch.float32:
        return f"{recipe}: sums of 16-bit values are rounded on the wire, and nobody keeps that"
    if isinstance(feedback, ErrorFeedback):
        faded = feedback.decay < 1 or feedback.lr_correction
        return f"{recipe}: residuals are rescaled from step to step" if faded else ""
    if feedback is not None:
        return f"{recipe}: this feedback keeps no sum of what was not sent"
    if all(is_exact(typical_contract(compressor)) for compressor in (aggregator.up, aggregator.down)):
        return ""
    return f"{recipe} has no feedback: what an encoding loses is not kept, but small or zero in the mean"


def _mean(tensor: Tensor, group: dist.ProcessGroup, world_size: int) -> Tensor:
    total = tensor / world_size
    dist.all_reduce(total, group=group)
    return total


def _relative(gap: Tensor, size: Tensor) -> float:
    if not gap.numel():
        return 0.0
    largest, worst = float(size.max()), float(gap.abs().max())
    return worst / largest if largest > 0 else float(worst > 0)


def sent_bytes(trial: Trial) -> Rung:
    """(d) The driver must count the bytes that the plan claims."""
    with trial.training(trial.recipe) as training:
        training.step(0)
        training.step(1)  # from the second step on DDP's buckets stay
        link, before = training.attached, _interface_nbytes()
        if isinstance(link, Link):
            link.stats(reset=True)
        for step in range(2, 2 + trial.steps):
            training.step(step)
        counted, after = link.stats()["wire_nbytes"], _interface_nbytes()
        one_bucket = link.plan.sent_nbytes(training.rank)
        claimed = link.planned_nbytes() if isinstance(link, Link) else one_bucket
        numbers = {"claimed_nbytes": float(claimed), "counted_nbytes": counted, "one_bucket_nbytes": float(one_bucket)}
        of_weights = None if isinstance(link, Link) else _weights(training, link, numbers)
    finding = of_weights if counted == claimed else _differs(counted, claimed, "a step")
    where = anywhere(finding, trial.group)
    seen = ""
    if before and after:
        numbers["interface_nbytes"] = (after[1] - before[1]) / trial.steps
        seen = f"; {after[0]} sent {numbers['interface_nbytes']:,.0f} a step, of all programs and with headers"
    if where is not None:
        return Rung(name="bytes", verdict="failed", sentence=where, numbers=numbers)
    if "weight_nbytes" in numbers:
        seen = f", and {numbers['weight_nbytes']:,.0f} each time weights are gathered{seen}"
    sentence = f"every rank sent what its plan claims (rank 0: {claimed:,} bytes a step{seen})"
    return Rung(name="bytes", verdict="ok", sentence=sentence, numbers=numbers)


def _weights(training: Training, link: "ShardLink", numbers: dict[str, float]) -> tuple[int, str] | None:
    """Gather all weights once, and return where the count differs from the plan. Collective."""
    if not (claimed := link.plan.sent_weight_nbytes(training.rank)):
        return None
    before = link.stats()["weight_wire_nbytes"]
    with gathered(training.module):
        counted = link.stats()["weight_wire_nbytes"] - before
    numbers["weight_nbytes"] = float(counted)
    return None if counted == claimed else _differs(counted, claimed, "of weights")


def _differs(counted: float, claimed: float, what: str) -> tuple[int, str]:
    return 0, f"counted {counted:,.1f} bytes {what} where its plan claims {claimed:,}"


def _interface_nbytes() -> tuple[str, int] | None:
    """Return the interface that the environment names, and what it has sent, where the system says."""
    name = next((os.environ[key] for key in _INTERFACES if os.environ.get(key)), None)
    path = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return (name, int(path.read_text())) if name and path.exists() else None
