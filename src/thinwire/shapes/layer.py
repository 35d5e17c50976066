"""One layer of a shape table."""

import dataclasses as dc
import math


@dc.dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that get their gradients together, and what computing them costs.

    Args:
        name: prefix of its parameters.
        parameters: (name, shape) pairs in order of registration.
        flops: of one forward pass over one example (multiply and add count as two).
    """

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    flops: float

    @property
    def numel(self) -> int:
        """Number of elements in all its parameters."""
        return sum(math.prod(shape) for _, shape in self.parameters)


def num_parameters(layers: list[Layer]) -> int:
    """Number of elements in all parameters of a model."""
    return sum(layer.numel for layer in layers)


def conv(name: str, inputs: int, outputs: int, kernel: int, size: int, *, bias: bool) -> Layer:
    """A ``kernel`` x ``kernel`` convolution with a square output of ``size`` pixels a side."""
    weight = (f"{name}.weight", (outputs, inputs, kernel, kernel))
    biases = ((f"{name}.bias", (outputs,)),) if bias else ()
    return Layer(name, (weight, *biases), 2.0 * outputs * inputs * kernel**2 * size**2)


def linear(name: str, inputs: int, outputs: int, rows: int = 1) -> Layer:
    """A fully connected layer with bias, applied to ``rows`` vectors of one example."""
    return Layer(
        name, ((f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))), 2.0 * inputs * outputs * rows
    )


def norm(name: str, width: int) -> Layer:
    """A batch or layer norm: weight and bias, arithmetic too little to count."""
    return Layer(name, ((f"{name}.weight", (width,)), (f"{name}.bias", (width,))), 0.0)
