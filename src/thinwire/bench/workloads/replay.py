"""Gradient exchange of a large model without its computation: real shapes, made-up gradients, slept compute time.

A replayed model is a chain of autograd functions, one per layer. Forward sleeps; backward hands out each layer's
gradients at the moment an accelerator would have had them. Real DDP with real hooks runs on top.

Note: time. Layers have absolute deadlines, counted from the start of backward, as kernels queued on an accelerator do:
processor work in a communication hook overlaps them and does not push them back. Where this machine's own cores cannot
keep up, backward overruns its timeline, and the measured backward time without exchange says by how much.

Note: memory. Parameters are never read or written, so their pages are never touched and cost nothing. Gradients live in
DDP's buckets alone. bert-large on four ranks takes about 14 GB with plain DDP; ``/SCALE`` divides every width.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.bench.workloads.base import Workload
from thinwire.shapes import BACKWARD_SHARE, TIMELINES, Layer, deadlines, model_layers, num_parameters

_PERIOD = 1_048_573  # elements before the pool repeats: prime, so that no power-of-two block sees the same values twice


class GradientSource:
    """Heavy-tailed gradients, fresh in every step, of another size in every layer.

    Values follow Student's t with 3 degrees of freedom. A step's gradient is a stretch of a fixed pool from a random
    place, times a scale: drawing billions of numbers a step would cost more than what is to be measured.
    """

    def __init__(self, layers: list[Layer], rank: int):
        longest = max(layer.numel for layer in layers)
        draw = np.random.default_rng(rank).standard_t(3, size=_PERIOD).astype(np.float32)
        repeats = longest // _PERIOD + 2
        self._pool = torch.from_numpy(np.tile(draw, repeats))
        self._scratch = torch.empty(longest)
        # The same on every rank: a layer's size belongs to the layer.
        self._scales = 10.0 ** np.random.default_rng(0).uniform(-4, -1, size=len(layers))
        self._random = np.random.default_rng(rank)

    def restart(self, seed: int, rank: int) -> None:
        """Go back to the first step of ``seed``."""
        self._random = np.random.default_rng((seed, rank))

    def gradients(self, index: int, layer: Layer) -> list[torch.Tensor]:
        """Gradients of one layer, valid until the next call (DDP has copied them into its bucket by then)."""
        start = int(self._random.integers(_PERIOD))
        scale = float(self._scales[index] * self._random.uniform(0.5, 1.5))
        flat = self._scratch[: layer.numel]
        torch.mul(self._pool[start : start + layer.numel], scale, out=flat)
        shapes = [shape for _, shape in layer.parameters]
        pieces = flat.split([int(np.prod(shape)) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class _ReplayLayer(torch.autograd.Function):
    """One layer: nothing happens forward; backward waits for the layer's deadline and hands out its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: "ReplayModel", index: int, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.model, ctx.index = model, index
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0], None, None, *ctx.model.backward_layer(ctx.index)


class ReplayModel(nn.Module):
    """Holds parameters of the given shapes and plays their gradients along a timeline.

    Args:
        layers: in forward order.
        source: of gradients.
        forward_s: seconds that a forward pass takes.
        backward_s: seconds that a backward pass takes, shared out by the layers' FLOPs.
    """

    def __init__(self, layers: list[Layer], source: GradientSource, forward_s: float, backward_s: float):
        super().__init__()
        self.layers, self.source, self.forward_s = layers, source, forward_s
        self.deadlines_s = deadlines(layers, backward_s)
        self._backward_start = 0.0
        for layer in layers:
            for name, shape in layer.parameters:
                # np.zeros leaves the pages untouched (torch.zeros writes them): see "Note: memory".
                data = torch.from_numpy(np.zeros(shape, dtype=np.float32))
                self.register_parameter(name.replace(".", "_"), nn.Parameter(data))

    def forward(self) -> torch.Tensor:
        """Sleep a forward pass and return a scalar to call ``backward`` on."""
        time.sleep(self.forward_s)
        x = torch.zeros((), requires_grad=True)
        parameters = iter(self.parameters())
        for index, layer in enumerate(self.layers):
            x = _ReplayLayer.apply(x, self, index, *(next(parameters) for _ in layer.parameters))
        return x

    def backward_layer(self, index: int) -> list[torch.Tensor]:
        """Wait until layer ``index`` is due, then return its gradients."""
        now = time.perf_counter()
        if index == len(self.layers) - 1:
            self._backward_start = now
        gradients = self.source.gradients(index, self.layers[index])
        wait = self._backward_start + self.deadlines_s[index] - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        return gradients


class ReplayWorkload(Workload):
    """Exchange the gradients of ``name`` with every width divided by ``scale``.

    Args:
        name: ``resnet50``, ``resnet101``, ``vgg16``, ``bert-base`` or ``bert-large``.
        rank: of this process; ranks draw different gradients.
        scale: divides every width.
        compute_s: of forward plus backward; None takes the model's default from ``TIMELINES``, divided with the FLOPs.
    """

    gradient_as_bucket_view = True
    init_sync = False  # a broadcast would write, and so allocate, every parameter

    def __init__(self, name: str, rank: int, *, scale: int = 1, compute_s: float | None = None):
        self.name, self.rank, self.scale = name, rank, scale
        self.layers = model_layers(name, scale)
        timeline = TIMELINES[name]
        if compute_s is None:
            whole = sum(layer.flops for layer in model_layers(name))
            compute_s = timeline.compute_s * sum(layer.flops for layer in self.layers) / whole
            self.time_source = timeline.source
        else:
            self.time_source = "set on the command line"
        self.compute_s = compute_s
        self.source = GradientSource(self.layers, rank)

    def model(self, seed: int) -> nn.Module:
        """A fresh ``ReplayModel``."""
        return ReplayModel(
            self.layers, self.source, self.compute_s * (1 - BACKWARD_SHARE), self.compute_s * BACKWARD_SHARE
        )

    def start(self, seed: int) -> None:
        """Go back to the first step's gradients."""
        self.source.restart(seed, self.rank)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Sleep a forward pass."""
        return model()

    def evaluate(self, model: nn.Module) -> None:
        """Nothing is learnt."""
        return None

    def facts(self) -> Mapping[str, object]:
        """Parameters, emulated compute time, and its source."""
        return {
            "model": f"replay of {self.name}" + (f", widths divided by {self.scale}" if self.scale > 1 else ""),
            "data": "heavy-tailed random gradients of the model's shapes, fresh in each step",
            "num_parameters": num_parameters(self.layers),
            "emulated_forward_s": self.compute_s * (1 - BACKWARD_SHARE),
            "emulated_backward_s": self.compute_s * BACKWARD_SHARE,
            "emulated_compute_source": self.time_source,
        }
