"""Runs the rungs in order; all ranks come to the same verdicts."""

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from thinwire.aggregators import Aggregator
from thinwire.auto import Auto, read_auto
from thinwire.comm.process_group import all_gather_text, common_group
from thinwire.errors import RecipeError, ThinwireError
from thinwire.integrations.ddp import Recipe
from thinwire.ladder.counted import conservation, sent_bytes
from thinwire.ladder.exact import dense, replicas, resume
from thinwire.ladder.kill import kill
from thinwire.ladder.parity import parity
from thinwire.ladder.report import Report, Rung
from thinwire.ladder.training import Factory, Trial
from thinwire.policy import PlanOptions
from thinwire.schedule import Schedule, parse_schedule

if TYPE_CHECKING:
    from thinwire.integrations.fsdp_build import WeightRecipe

LADDER: Mapping[str, Callable[[Trial], Rung]] = {
    "dense": dense,
    "replicas": replicas,
    "conservation": conservation,
    "bytes": sent_bytes,
    "parity": parity,
    "resume": resume,
    "kill": kill,
}


def selfcheck(
    model_factory: Factory,
    recipe: Recipe,
    *,
    steps: int = 6,
    lr: float = 0.05,
    weights: "WeightRecipe | None" = None,
    options: PlanOptions | None = None,
    ddp: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    rungs: Sequence[str] = tuple(LADDER),
    on_rung: Callable[[str, Rung | None], None] = lambda name, rung: None,
) -> Report:
    """Check a recipe on this launch, with this model: short trainings whose outcome is known. Collective.

    Dense is DDP's arithmetic; replicas stay equal; delivered + owed = all gradients; bytes counted = bytes claimed; the
    loss keeps up with DDP's; a resumed run repeats the uninterrupted one, also where a rank's process was killed: that
    happens to processes of the check's own, which every rank starts. Of a schedule the last phase is checked.

    Args:
        model_factory: returns a new model on the CPU, or (model, loss) with `loss(model, step, rank)` a scalar tensor
            that depends on its arguments and torch's random state alone. Without a loss the parameters are drawn to
            random targets, and `forward` does not run. A `fully_shard` model, over all ranks and with a loss, is
            checked as such; any other is put into `DistributedDataParallel`. For the rung `kill` it must be at the top
            of a module that another process can import.
        recipe: as for `attach`.
        steps: of a training, at least 2; parity takes five times as many, on three seeds.
        lr: of SGD.
        weights: as for `attach`, of a `fully_shard` model.
        options: as for `attach`.
        ddp: arguments of `DistributedDataParallel`; by default bucket_cap_mb=1.
        timeout: seconds that a collective may take.
        rungs: which to climb.
        on_rung: called on every rank with a rung's name as it begins (None), and with its verdict.

    Returns:
        A `Report`, equal on all ranks; `print(report)`, `report.ok`.

    Raises:
        AttachError: there is no process group.
        RecipeError: an unknown recipe, or "auto", whose candidates are to be checked one by one.
        ThinwireError: an argument out of range, or a rank that came to no verdict.
    """
    world = common_group(None)
    unknown = [name for name in rungs if name not in LADDER]
    if steps < 2 or timeout <= 0 or unknown:
        raise ThinwireError(
            f"expected at least 2 steps, a timeout above 0 s and rungs of {', '.join(LADDER)}, got {steps}, {timeout} "
            f"and {unknown or 'these'}"
        )
    recipe = read_auto(recipe)
    if isinstance(recipe, Auto):
        raise RecipeError(
            f"auto: what it sends hangs on seconds, which no two trainings share: check {', '.join(recipe.names)}, its "
            "candidates, one by one"
        )
    if isinstance(recipe, str):
        recipe = parse_schedule(recipe)
    if isinstance(recipe, Schedule):
        recipe = recipe.phases[-1][1]  # type: ignore[assignment]  # a Schedule has flattened its ramps
    said = _named(recipe)
    limit = datetime.timedelta(seconds=timeout)
    group = dist.new_group(backend="gloo", timeout=limit)
    # Where one rank raised, the others wait for it until their time is out, and come here only then.
    control = dist.new_group(backend="gloo", timeout=3 * limit)
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(control, dist.ProcessGroup)
    trial = Trial(
        factory=model_factory,
        recipe=recipe,  # type: ignore[arg-type]
        group=group,
        timeout=limit,
        steps=steps,
        lr=lr,
        weights=weights,
        options=options,
        **({} if ddp is None else {"ddp": ddp}),
    )
    climbed: list[Rung] = []
    for name in rungs:
        on_rung(name, None)
        started = time.perf_counter()
        rung, raised = _attempt(trial, name)
        rung = _agreed(rung, raised, control, time.perf_counter() - started)
        climbed.append(rung)
        on_rung(name, rung)
        if rung.numbers.get("raised"):
            break  # ranks are no longer at the same place
    else:
        dist.destroy_process_group(group)
        dist.destroy_process_group(control)
    return Report(recipe=said, world_size=world.size(), rungs=tuple(climbed))


def _named(recipe: object) -> str:
    """Return what a report calls a recipe: by its name, or by pattern."""
    if isinstance(recipe, Aggregator):
        return recipe.recipe()
    if isinstance(recipe, Mapping):
        return ", ".join(f"{pattern}: {_named(one)}" for pattern, one in recipe.items())
    return recipe if isinstance(recipe, str) else getattr(recipe, "__name__", type(recipe).__name__)


def _attempt(trial: Trial, name: str) -> tuple[Rung, bool]:
    try:
        return LADDER[name](trial), False
    except Exception as error:
        words = str(error).partition("\n\nAt:")[0].split()  # torch appends the stack of a callback
        sentence = f"{type(error).__name__}: {' '.join(words)}"
        return Rung(name=name, verdict="failed", sentence=sentence), True


def _agreed(rung: Rung, raised: bool, control: dist.ProcessGroup, seconds: float) -> Rung:
    """Return one rung for all ranks: rank 0's, unless some failed. Collective.

    Of those that raised, the first to do so is to blame: the others only waited for it.
    """
    ours = json.dumps({**asdict(rung), "raised": raised, "seconds": seconds})
    try:
        everyone: list[dict[str, Any]] = [json.loads(text) for text in all_gather_text(ours, control)]
    except RuntimeError as error:
        raise ThinwireError(
            f"rung {rung.name!r}: a rank came to no verdict: it died, or hangs ({' '.join(str(error).split())[:200]}); "
            f"here: {rung.sentence}"
        ) from error
    failures = [(one["seconds"], rank) for rank, one in enumerate(everyone) if one["raised"]]
    if failures:
        _, rank = min(failures)
        sentence = f"rank {rank}: {everyone[rank]['sentence']}"
        return Rung(name=rung.name, verdict="failed", sentence=sentence, seconds=seconds, numbers={"raised": 1.0})
    first = next((one for one in everyone if one["verdict"] == "failed"), everyone[0])
    return Rung(**{key: value for key, value in first.items() if key != "raised"})
