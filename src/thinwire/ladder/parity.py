"""The rung of losses: a short compressed training keeps up with DDP."""

import statistics
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.compressors import Sign
from thinwire.feedback import EF21, MomentumCorrection, Slot
from thinwire.integrations.link import Link
from thinwire.ladder.report import Rung
from thinwire.ladder.training import Training, Trial, whole

if TYPE_CHECKING:
    from thinwire.integrations.fsdp import ShardLink

SEEDS = (0, 1, 2)
FACTOR = 5  # trainings are as many times longer than those of other rungs
ALLOWED = 0.1  # of how far DDP's loss fell, where seeds differ less than that
LATE = 0.25  # a recipe that still owes more than this share of all gradients has not been tried yet


def parity(trial: Trial) -> Rung:
    """(e) On the same seeds, the loss must end where DDP's, or FSDP2's, does, within what seeds alone make of it.

    Losses are means over ranks and over the first and the last fifth of the steps. Allowed is, in the mean over seeds,
    the larger of twice the standard deviation of DDP's last loss over seeds, and a tenth of DDP's descent. A recipe
    that does not keep up is excused while much of what it took is on its way: with d all that was delivered of the
    compressed parameters and e all that is owed, ||e|| / ||d + e|| > 1/4.
    """
    steps = FACTOR * trial.steps
    ours, theirs, descents, owed, estimates, base = [], [], [], [], False, ""
    for seed in SEEDS:
        with trial.training(trial.recipe, seed) as training:
            aggregators = [param.aggregator for param in training.planned]
            base = training.wrapper
            if any(isinstance(one.up, Sign) for one in aggregators):
                why = f"votes deliver signs: they need a learning rate of their own, not {base}'s"
                return Rung(name="parity", verdict="not applicable", sentence=why)
            if any(isinstance(one.feedback, MomentumCorrection) for one in aggregators):
                why = f"this recipe applies momentum, and {base} with plain SGD has none"
                return Rung(name="parity", verdict="not applicable", sentence=why)
            estimates = any(isinstance(one.feedback, EF21) for one in aggregators)
            losses, delivered = _train(training, steps)
            ours.append(_ends(losses, trial)[1])
            owed.append(_share_owed(training.attached, delivered, trial.group))
        with trial.training(None, seed) as training:
            first, last = _ends([training.step(step) for step in range(steps)], trial)
        theirs.append(last)
        descents.append(first - last)
    descent, noise = statistics.fmean(descents), statistics.stdev(theirs)
    excess = statistics.fmean(ours) - statistics.fmean(theirs)
    allowed = max(2 * noise, ALLOWED * descent)
    numbers = {
        "loss": statistics.fmean(ours),
        "ddp_loss": statistics.fmean(theirs),
        "ddp_descent": descent,
        "seed_noise": noise,
        "allowed": allowed,
        "share_owed": max(owed),
    }
    said = (
        f"after {steps} steps on {len(SEEDS)} seeds the loss is {numbers['loss']:.4g}, {base}'s "
        f"{numbers['ddp_loss']:.4g} "
        f"(allowed {allowed:.2g} above; it fell by {descent:.3g})"
    )
    if not descent > 0:
        why = f"{said}: {base}'s own loss did not fall, so that nothing can be compared; try another learning rate"
        return Rung(name="parity", verdict="not applicable", sentence=why, numbers=_finite(numbers))
    if excess <= allowed:  # False for nan
        return Rung(name="parity", verdict="ok", sentence=said, numbers=numbers)
    why = ""
    if max(owed) > LATE:
        why = f"{max(owed):.0%} of all gradients are still owed, so that it is too early to tell"
    elif estimates and excess < float("inf"):
        why = "its estimates start at zero and take many steps to catch up"
    if why:
        sentence = f"{said}, but {why}; try more steps"
        return Rung(name="parity", verdict="not applicable", sentence=sentence, numbers=_finite(numbers))
    sentence = f"{said}: this recipe learns slower here, at least at first; try more steps, a dense start or more bits"
    return Rung(name="parity", verdict="failed", sentence=sentence, numbers=_finite(numbers))


def _train(training: Training, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return this rank's losses, and the sums of what was delivered, float64 by parameter."""
    params = dict(training.module.named_parameters())
    names = [param.info.name for param in training.planned if not param.info.dtype.is_complex]
    delivered = {name: torch.zeros(params[name].shape, dtype=torch.float64) for name in names}
    losses = list[float]()
    for step in range(steps):
        losses.append(training.step(step))
        for name, total in delivered.items():
            if (grad := params[name].grad) is not None:
                total += whole(grad)
    return losses, delivered


def _share_owed(link: "Link | ShardLink", delivered: dict[str, Tensor], group: dist.ProcessGroup) -> float:
    """Return ||e|| / ||d + e||, over the parameters of which something is owed; 0 if there are none. Collective."""
    state, num = link.state_dict(), dist.get_world_size(group)
    owed, everything = 0.0, 0.0
    for name, total in delivered.items():
        kept = [(state[slot][name], share) for slot, share in ((Slot.WORKER, 1 / num), (Slot.OWNER, 1.0))
                if name in state[slot]]  # fmt: skip
        if kept:
            rest = torch.stack([residual.double() * share for residual, share in kept]).sum(dim=0)
            dist.all_reduce(rest, group=group)
            owed += float(rest.square().sum())
            everything += float((total + rest).square().sum())
    return (owed / everything) ** 0.5 if everything > 0 else 0.0


def _ends(losses: list[float], trial: Trial) -> tuple[float, float]:
    """Return the mean loss of the first and of the last fifth of the steps, over ranks. Collective."""
    share = max(1, len(losses) // 5)
    ends = torch.tensor([statistics.fmean(losses[:share]), statistics.fmean(losses[-share:])], dtype=torch.float64)
    dist.all_reduce(ends, group=trial.group)
    first, last = (ends / dist.get_world_size(trial.group)).tolist()
    return first, last


def _finite(numbers: dict[str, float]) -> dict[str, float]:
    """Leave out what JSON has no number for."""
    return {name: value for name, value in numbers.items() if abs(value) < float("inf")}
