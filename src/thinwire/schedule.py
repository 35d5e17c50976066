"""Schedules: which recipe is valid from which step on.

    schedule = phase *(" then " phase)
    phase    = recipe [" ramp " STEPS] [" until " STEP]         (the last one without "until")

Examples: `dense until 500 then int4`, `topk:0.001@dgc ramp 2000`, `dense until 500 then topk:0.001@dgc ramp 2000`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.aggregators import Aggregator, Gather, TwoShot
from thinwire.compressors import Compose, Compressor
from thinwire.errors import RecipeError
from thinwire.plan import Patterns, Policy
from thinwire.recipes import parse_recipe

Phase = str | Aggregator | Mapping[str, str | Aggregator] | Patterns | Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Ramp:
    r"""Lowers the density in stages, exponentially, until it is that of the recipe.

    In stage i of s = `stages`, each about `steps` / s long, a density d of the recipe is d^{(i+1)/(s+1)}, i from 0;
    then it is d. For d = 0.001 and s = 4: 0.251, 0.0631, 0.0158, 0.00398.

    Args:
        recipe: with a kind that has a density.
        steps: steps before the recipe itself is valid, at least `stages`.
        stages: steps of the stairs, at least 1.

    Raises:
        RecipeError: a field out of range, or a recipe without a density.

    Example:
        >>> [(start, round(a.up.density, 3)) for start, a in Ramp(recipe="topk:0.001", steps=400).phases(100)]
        [(100, 0.251), (200, 0.063), (300, 0.016), (400, 0.004), (500, 0.001)]

    References:
        Yujun Lin, Song Han, Huizi Mao, Yu Wang, William J. Dally, "Deep Gradient Compression: Reducing the
        Communication Bandwidth for Distributed Training", 2018 (warm-up training: sparsities of 75, 93.75, 98.4 and
        99.6 % over four epochs, then 99.9 %).
    """

    recipe: str | Aggregator
    steps: int
    stages: int = 4

    def __post_init__(self) -> None:
        if self.stages < 1 or self.steps < self.stages:
            raise RecipeError(f"Ramp: expected 1 <= stages <= steps, got {self.stages} and {self.steps}")
        self.phases(0)

    def phases(self, start: int) -> list[tuple[int, Aggregator]]:
        """Return (first step, settings) of every stage of a ramp that begins at step `start`, and of what follows."""
        target = parse_recipe(self.recipe) if isinstance(self.recipe, str) else self.recipe
        stages = [
            (start + i * self.steps // self.stages, _at_power(target, (i + 1) / (self.stages + 1)))
            for i in range(self.stages)
        ]
        return [*stages, (start + self.steps, target)]


def _at_power(aggregator: Aggregator, power: float) -> Aggregator:
    if not isinstance(aggregator, (TwoShot, Gather)) or not any(map(_density, (aggregator.up, aggregator.down))):
        raise RecipeError(f"Ramp: expected a recipe with a density, as in 'topk:0.001', got {aggregator.recipe()!r}")

    def raised(compressor: Compressor) -> Compressor:
        density = _density(compressor)
        if isinstance(compressor, Compose):
            return dataclasses.replace(compressor, first=raised(compressor.first))  # type: ignore[arg-type]
        return compressor if density is None else dataclasses.replace(compressor, density=density**power)  # type: ignore[type-var]

    if isinstance(aggregator, Gather):
        return dataclasses.replace(aggregator, up=raised(aggregator.up))
    return dataclasses.replace(aggregator, up=raised(aggregator.up), down=raised(aggregator.down))


def _density(compressor: Compressor) -> float | None:
    return getattr(compressor.first if isinstance(compressor, Compose) else compressor, "density", None)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Recipes by the step from which they are valid; what was not sent is carried over from one to the next.

    Steps count as `Link.state.step` does, skipped ones not at all. Every phase may be whatever `attach` takes for the
    whole of training, or a `Ramp`. All ranks must have the same schedule, and agree again as a phase begins.

    Args:
        phases: (first step, recipe), in ascending order and from step 0 on.

    Raises:
        RecipeError: steps out of order, a ramp that is longer than its phase, or a recipe that is no recipe.

    Example:
        >>> Schedule([(0, "dense"), (500, "int4")]).at(499).recipe()
        'dense'
    """

    phases: Sequence[tuple[int, Phase | Ramp]]

    def __post_init__(self) -> None:
        flat: list[tuple[int, Phase]] = []
        for start, phase in self.phases:
            if (flat and start <= flat[-1][0]) or (not flat and start != 0):
                raise RecipeError(f"Schedule: expected first steps that ascend from 0, got {self._starts()}")
            flat += phase.phases(start) if isinstance(phase, Ramp) else [(start, _settings(phase))]
        if not flat:
            raise RecipeError("Schedule: expected at least one phase, got none")
        object.__setattr__(self, "phases", tuple(flat))

    def _starts(self) -> str:
        return ", ".join(
            str(start) + (f" (ramp of {p.steps})" if isinstance(p, Ramp) else "") for start, p in self.phases
        )

    def at(self, step: int) -> Phase:
        """Return what is valid at a step."""
        return [phase for start, phase in self.phases if start <= step][-1]  # type: ignore[return-value]


def _settings(phase: Phase) -> Phase:
    if isinstance(phase, str):
        return parse_recipe(phase)
    return Patterns(phase) if isinstance(phase, Mapping) else phase


_PHASE = re.compile(r"(?P<recipe>\S+)(?:\s+ramp\s+(?P<ramp>\d+))?(?:\s+until\s+(?P<until>\d+))?")


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that a text stands for; a recipe alone is valid from step 0 on.

    Raises:
        RecipeError: an unknown name or argument, or steps out of order.

    Example:
        >>> [start for start, _ in parse_schedule("dense until 500 then topk:0.001@dgc ramp 2000").phases]
        [0, 500, 1000, 1500, 2000, 2500]
    """
    start, phases = 0, list[tuple[int, Phase | Ramp]]()
    parts = re.split(r"\s+then\s+", text.strip())
    for i, part in enumerate(parts):
        found = _PHASE.fullmatch(part)
        if found is None and not re.search(r"\s", part):
            parse_recipe(part)  # says what is wrong with it
        if found is None or (found["until"] is None) != (i == len(parts) - 1):
            raise RecipeError(
                f"schedule {text!r}: expected 'RECIPE until STEP then RECIPE', with 'ramp STEPS' after a recipe with a "
                f"density, got {part!r}"
            )
        recipe = parse_recipe(found["recipe"])
        phases.append((start, Ramp(recipe=recipe, steps=int(found["ramp"])) if found["ramp"] else recipe))
        start = int(found["until"] or 0)
    return Schedule(phases)
