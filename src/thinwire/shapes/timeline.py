"""Compute time of well-known models, and when each layer's gradients are due: shared out by FLOPs."""

import dataclasses as dc
from itertools import accumulate

from thinwire.shapes.layer import Layer

BACKWARD_SHARE = 2 / 3
"""Backward computes two products for each one of forward, so it takes two thirds of the time."""


@dc.dataclass(frozen=True, slots=True)
class Timeline:
    """Default compute time of one step on one V100, and where it comes from."""

    compute_s: float
    source: str


# VGG16's figure implies this many FLOPs a second (forward and backward are three times the forward FLOPs).
VGG16_S, _VGG16_BATCH, _VGG16_FORWARD_FLOPS = 0.165, 32, 30.9e9
V100_FLOPS_PER_S = 3 * _VGG16_BATCH * _VGG16_FORWARD_FLOPS / VGG16_S


def deadlines(layers: list[Layer], backward_s: float) -> list[float]:
    """Seconds from the start of backward until each layer's gradients are due; ``backward_s`` for the first layer.

    >>> deadlines([Layer("a", (), 1.0), Layer("b", (), 3.0)], 2.0)
    [2.0, 1.5]
    """
    # Backward runs from the last layer to the first.
    done = list(accumulate(layer.flops for layer in reversed(layers)))
    return [flops / done[-1] * backward_s for flops in reversed(done)]
