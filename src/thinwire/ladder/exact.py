"""Rungs whose answer is in bits: dense = DDP, replicas are equal, a resumed run repeats the uninterrupted one."""

import io
from collections.abc import Callable, Sequence

import torch.distributed as dist

from thinwire.comm.process_group import all_gather_text
from thinwire.integrations.replicas import ReplicaCheck
from thinwire.ladder.report import Rung
from thinwire.ladder.training import Training, Trial, gathered


def dense(trial: Trial) -> Rung:
    """(a) `dense` must be the arithmetic of DDP, or of FSDP2, itself."""

    def plain() -> tuple[list[list[str]], list[str]]:
        with trial.training(None) as training:
            return training.run(range(trial.steps)), training.names

    expected, names = plain()
    with trial.training("dense") as training:
        got, theirs = training.run(range(trial.steps)), training.wrapper
    where = anywhere(first_step_apart(expected, got, names), trial.group)
    if where is None:
        return Rung(name="dense", verdict="ok", sentence=f"'dense' gives {theirs}'s own bits in {trial.steps} steps")
    sentence = f"'dense' differs from {theirs}: {where}"
    return _unless_unsteady(trial, "dense", sentence, expected, lambda: plain()[0], names)


def replicas(trial: Trial) -> Rung:
    """(b) All ranks must hold the same parameters; of a sharded model they must compute with the same."""
    with trial.training(trial.recipe) as training:
        for step in range(trial.steps):
            training.step(step)
        with gathered(training.module) as params:
            difference = ReplicaCheck(params, trial.group).difference()
        hold = "hold" if training.wrapper == "DDP" else "compute with"
    if difference is None:
        sentence = f"all ranks {hold} the same parameters, to the bit, after {trial.steps} compressed steps"
        return Rung(name="replicas", verdict="ok", sentence=sentence)
    sentence = f"ranks {hold} different parameters after {trial.steps} steps: {difference}"
    return Rung(name="replicas", verdict="failed", sentence=sentence)


def resume(trial: Trial) -> Rung:
    """(f) A run that is stopped in the middle, saved and made anew must go on as if it had not been."""
    half = max(1, trial.steps // 2)

    def whole() -> tuple[list[list[str]], list[str]]:
        with trial.training(trial.recipe) as training:
            return training.run(range(trial.steps)), training.names

    with trial.training(trial.recipe) as training:
        if why := cuts_show(training, trial.group):
            return Rung(name="resume", verdict="not applicable", sentence=why)
        training.run(range(half))
        saved = io.BytesIO()
        training.save(saved)
    expected, names = whole()
    saved.seek(0)
    with trial.training(trial.recipe) as training:
        training.load(saved)
        got = training.run(range(half, trial.steps))
    where = anywhere(first_step_apart(expected[half:], got, names, half), trial.group)
    if where is None:
        sentence = f"saved after {half} steps, rebuilt and resumed: the same bits as the run that was not interrupted"
        return Rung(name="resume", verdict="ok", sentence=sentence)
    return _unless_unsteady(
        trial, "resume", f"the resumed run goes other ways: {where}", expected, lambda: whole()[0], names
    )


def cuts_show(training: Training, group: dist.ProcessGroup) -> str:
    """Return why a restart may change bits, or ""."""
    of_buckets = training.wrapper == "DDP" and any(param.aggregator.cuts_show for param in training.planned)
    if dist.get_world_size(group) <= 2 or not of_buckets:
        return ""
    return "three or more numbers are added on the wire in an order that DDP's buckets decide, and a restart moves"


def first_step_apart(
    expected: Sequence[Sequence[str]], got: Sequence[Sequence[str]], names: Sequence[str], first: int = 0
) -> tuple[int, str] | None:
    """Return in which step two runs part, and in what, or None."""
    for step, (ours, theirs) in enumerate(zip(expected, got, strict=True), start=first):
        for name, one, other in zip(names, ours, theirs, strict=True):
            if one != other:
                return step, f"{name}, first in step {step}"
    return None


def anywhere(finding: tuple[int, str] | None, group: dist.ProcessGroup) -> str | None:
    """Return the earliest finding of any rank, with the rank's name, or None. Collective.

    Args:
        finding: this rank's, as (step, text).
        group: a group whose tensors live on the CPU.
    """
    texts = all_gather_text("" if finding is None else f"{finding[0]} {finding[1]}", group)
    findings = [(int(text.split(" ", 1)[0]), rank, text.split(" ", 1)[1]) for rank, text in enumerate(texts) if text]
    if not findings:
        return None
    _, rank, text = min(findings)
    return f"rank {rank}: {text}"


def _unless_unsteady(
    trial: Trial,
    name: str,
    sentence: str,
    expected: Sequence[Sequence[str]],
    again: Callable[[], list[list[str]]],
    names: list[str],
) -> Rung:
    """Fail, unless the run that was compared with does not even repeat itself. Collective."""
    if anywhere(first_step_apart(expected, again(), names), trial.group) is None:
        return Rung(name=name, verdict="failed", sentence=sentence)
    why = "the model's own training gives other bits when run twice: torch.use_deterministic_algorithms(True) may help"
    return Rung(name=name, verdict="not applicable", sentence=why)
