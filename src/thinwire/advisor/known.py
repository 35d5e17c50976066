"""The computation of well-known models, from tables: shapes that are exact, times that are assumed and say so."""

import json
import math
from pathlib import Path
from typing import Any

from thinwire.advisor import document
from thinwire.advisor.profile import Computation, TimedParameter
from thinwire.errors import ProfileError
from thinwire.shapes import BACKWARD_SHARE, MODELS, TIMELINES, deadlines, model_layers

FORWARD_OVER_BACKWARD = (1 - BACKWARD_SHARE) / BACKWARD_SHARE


def known_computation(
    name: str, *, backward_s: float | None = None, forward_s: float | None = None, optimizer_s: float = 0.0
) -> tuple[Computation, list[str]]:
    """Return the computation of a model of a table, ``NAME`` or ``NAME/SCALE``, and what was assumed.

    Gradients become ready along the backward pass by the FLOPs of their layers.

    Args:
        name: ``resnet50``, ``vgg16``, ``bert-base`` or ``bert-large``; every width divided by ``SCALE``.
        backward_s: seconds of the backward pass; None for a V100's.
        forward_s: seconds of the forward pass; None for half of it.
        optimizer_s: seconds.

    Raises:
        ProfileError: no such model.

    >>> computation, assumptions = known_computation("resnet50", backward_s=0.12)
    >>> round(computation.forward_s, 6), assumptions
    (0.06, ['forward takes half as long as backward', 'the optimizer takes no time'])
    """
    model, _, scale = name.partition("/")
    if model not in MODELS or (scale and not scale.isdecimal()):
        raise ProfileError(f"expected a model of {', '.join(MODELS)}, /SCALE after it, or a file, got {name!r}")
    assumptions: list[str] = []
    try:
        layers = model_layers(model, int(scale or 1))
    except ValueError as error:
        raise ProfileError(f"{name}: {error}") from error
    if backward_s is None:
        timeline = TIMELINES[model]
        whole, scaled = (sum(layer.flops for layer in some) for some in (model_layers(model), layers))
        backward_s = timeline.compute_s * BACKWARD_SHARE * scaled / whole
        assumptions.append(f"computation was not measured: {timeline.source}")
    elif forward_s is None:
        assumptions.append("forward takes half as long as backward")
    forward_s = backward_s * FORWARD_OVER_BACKWARD if forward_s is None else forward_s
    if not optimizer_s:
        assumptions.append("the optimizer takes no time")
    parameters = tuple(
        TimedParameter(name=parameter, shape=shape, ready_s=min(due, backward_s))
        for layer, due in zip(layers, deadlines(layers, backward_s), strict=True)
        for parameter, shape in layer.parameters
    )
    computation = Computation(
        forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s, parameters=parameters
    )
    return computation, assumptions


def listed_computation(
    path: Path, *, backward_s: float | None, forward_s: float | None = None, optimizer_s: float = 0.0
) -> tuple[Computation, list[str]]:
    """Return the computation of a model whose parameters a file lists, in order of registration, and what was assumed.

    The file holds ``{"NAME": [SIZES]}``: ``json.dump({n: list(p.shape) for n, p in model.named_parameters()}, file)``.
    Gradients become ready evenly by elements, from the last parameter to the first.

    Raises:
        ProfileError: no such file, something else in it, or no time of the backward pass, which no table knows.
    """
    shapes = _shapes(document.read(path), path)
    if backward_s is None:
        raise ProfileError(f"{path}: expected --backward TIME with a list of parameters, whose time no table knows")
    assumptions = ["gradients become ready evenly, by elements, from the last parameter to the first"]
    if forward_s is None:
        forward_s = backward_s * FORWARD_OVER_BACKWARD
        assumptions.append("forward takes half as long as backward")
    if not optimizer_s:
        assumptions.append("the optimizer takes no time")
    total, done = sum(math.prod(shape) for shape in shapes.values()), 0
    parameters: list[TimedParameter] = []
    for name, shape in reversed(shapes.items()):
        done += math.prod(shape)
        parameters.append(TimedParameter(name=name, shape=shape, ready_s=backward_s * done / max(total, 1)))
    computation = Computation(
        forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s, parameters=tuple(reversed(parameters))
    )
    return computation, assumptions


def _shapes(values: dict[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    for name, shape in values.items():
        if not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)):
            raise ProfileError(f"{path}: {name}: expected a list of sizes, such as [512, 256], got {json.dumps(shape)}")
    if not values:
        raise ProfileError(f"{path}: expected at least one parameter, got none")
    return {name: tuple(shape) for name, shape in values.items()}
