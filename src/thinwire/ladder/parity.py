"""The rung of losses: a short compressed training keeps up with DDP."""

import statistics

import torch
import torch.distributed as dist

from thinwire.compressors import Sign
from thinwire.feedback import MomentumCorrection
from thinwire.ladder.report import Rung
from thinwire.ladder.training import Trial

SEEDS = (0, 1, 2)
FACTOR = 5  # trainings are as many times longer than those of other rungs
ALLOWED = 0.1  # of how far DDP's loss fell, where seeds differ less than that


def parity(trial: Trial) -> Rung:
    """(e) On the same seeds, the loss must end where DDP's does, within what seeds alone make of it.

    Losses are means over ranks and over the first and the last fifth of the steps. Allowed is, in the mean over seeds,
    the larger of twice the standard deviation of DDP's last loss over seeds, and a tenth of DDP's descent.
    """
    steps = FACTOR * trial.steps
    ours, theirs, descents = [], [], []
    for seed in SEEDS:
        with trial.training(trial.recipe, seed) as training:
            aggregators = [param.aggregator for param in training.attached.plan.params]
            if any(isinstance(one.up, Sign) for one in aggregators):
                why = "votes deliver signs: they need a learning rate of their own, not DDP's"
                return Rung(name="parity", verdict="not applicable", sentence=why)
            if any(isinstance(one.feedback, MomentumCorrection) for one in aggregators):
                why = "this recipe applies momentum, and DDP with plain SGD has none"
                return Rung(name="parity", verdict="not applicable", sentence=why)
            ours.append(_ends([training.step(step) for step in range(steps)], trial)[1])
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
    }
    said = (
        f"after {steps} steps on {len(SEEDS)} seeds the loss is {numbers['loss']:.4g}, DDP's {numbers['ddp_loss']:.4g} "
        f"(allowed {allowed:.2g} above; it fell by {descent:.3g})"
    )
    if not descent > 0:
        why = f"{said}: DDP's own loss did not fall, so that nothing can be compared; try another learning rate"
        return Rung(name="parity", verdict="not applicable", sentence=why, numbers=_finite(numbers))
    if excess <= allowed:  # False for nan
        return Rung(name="parity", verdict="ok", sentence=said, numbers=numbers)
    sentence = f"{said}: this recipe learns slower here, at least at first; try more steps, a dense start or more bits"
    return Rung(name="parity", verdict="failed", sentence=sentence, numbers=_finite(numbers))


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
