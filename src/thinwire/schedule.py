"""Schedules: which recipe is valid from which step on.

    schedule = phase *(" then " phase)
    phase    = recipe [" ramp " STEPS] [" until " STEP]         (the last one without "until")

Examples: `dense until 500 then int4`, `topk:0.001@dgc ramp 2000`, `dense until 500 then topk:0.001@dgc ramp 2000`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.aggregators import Aggregator, Gather, Hierarchical, SumOnWire, TwoShot
from thinwire.compressors import Compose, Compressor, Scaled
from thinwire.errors import RecipeError
from thinwire.policy import Patterns, Policy
from thinwire.recipes import parse_recipe

MOST_BITS = 8  # where ramps of bits begin

Phase = str | Aggregator | Mapping[str, str | Aggregator] | Patterns | Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Ramp:
    r"""Lowers the density, or the bits, in stages until they are those of the recipe.

    In stage i of s = `stages`, each about `steps` / s long and i from 0, a density d of the recipe is d^{(i+1)/(s+1)},
    and b < 8 bits are 8 - floor(i (8 - b) / s); then they are d and b. For d = 0.001 and s = 4: 0.251, 0.0631, 0.0158,
    0.00398; for b = 4: 8, 7, 6, 5.

    Args:
        recipe: with a kind that has a density, or bits below 8.
        steps: steps before the recipe itself is valid, at least `stages`.
        stages: steps of the stairs, at least 1.

    Raises:
        RecipeError: a field out of range, or a recipe with neither.

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
            raise RecipeError(
                f"Ramp: expected 1 <= stages <= steps, got {self.stages} and {self.steps}: each stage takes a step at "
                f"least; write 'ramp {max(self.stages, 1)}' or more"
            )
        self.phases(0)

    def phases(self, start: int) -> list[tuple[int, Aggregator]]:
        """Return (first step, settings) of every stage of a ramp that begins at step `start`, and of what follows."""
        target = parse_recipe(self.recipe) if isinstance(self.recipe, str) else self.recipe
        stages = [(start + i * self.steps // self.stages, _milder(target, i, self.stages)) for i in range(self.stages)]
        return [*stages, (start + self.steps, target)]


def _milder(aggregator: Aggregator, stage: int, stages: int) -> Aggregator:
    if isinstance(aggregator, Gather | SumOnWire):
        milder = dataclasses.replace(aggregator, up=_with_more(aggregator.up, stage, stages))
    elif isinstance(aggregator, TwoShot | Hierarchical):
        up, down = (_with_more(compressor, stage, stages) for compressor in (aggregator.up, aggregator.down))
        milder = dataclasses.replace(aggregator, up=up, down=down)
    else:
        milder = aggregator
    if milder == aggregator and stage == 0:
        raise RecipeError(
            f"Ramp: expected a recipe with a density or with fewer than {MOST_BITS} bits, as in 'topk:0.001' or "
            f"'int4', got {aggregator.recipe()!r}"
        )
    return milder


def _with_more(compressor: Compressor, stage: int, stages: int) -> Compressor:
    if isinstance(compressor, Compose):
        return dataclasses.replace(compressor, first=_with_more(compressor.first, stage, stages))  # type: ignore[arg-type]
    if isinstance(compressor, Scaled):
        return dataclasses.replace(compressor, inner=_with_more(compressor.inner, stage, stages))
    density, bits = getattr(compressor, "density", None), getattr(compressor, "bits", None)
    if density is not None:
        return dataclasses.replace(compressor, density=density ** ((stage + 1) / (stages + 1)))  # type: ignore[type-var]
    if bits is not None and bits < MOST_BITS:
        return dataclasses.replace(compressor, bits=MOST_BITS - stage * (MOST_BITS - bits) // stages)  # type: ignore[type-var]
    return compressor


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
                f"density or bits, got {part!r}"
            )
        recipe = parse_recipe(found["recipe"])
        phases.append((start, Ramp(recipe=recipe, steps=int(found["ramp"])) if found["ramp"] else recipe))
        start = int(found["until"] or 0)
    return Schedule(phases)
