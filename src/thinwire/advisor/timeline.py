"""The computation of a step: how long forward, backward and optimizer take, and when each gradient is ready.

Nothing is exchanged meanwhile. On an accelerator times are those of its own clock, by events in the order of its
queue, so that nothing waits for it but the end of a step.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thinwire.advisor.profile import Computation, TimedParameter
from thinwire.errors import ProfileError
from thinwire.policy import plain_name

WARM_UP_STEPS = 2  # the first allocate


def measure_computation(
    model: nn.Module, step: Callable[[], object], *, steps: int = 5, before_step: Callable[[], object] = lambda: None
) -> Computation:
    """Run `step` some times and return the medians.

    Of a step with several backward passes, the last counts, in which gradients are exchanged: all before is forward.

    Args:
        model: whose parameters get gradients; if it is a `DistributedDataParallel` one nothing is exchanged.
        step: does one step of training: clears gradients, forward, backward, optimizer.
        steps: that count, after two that do not.
        before_step: called before each, so that ranks begin together.

    Raises:
        ProfileError: no backward pass, no parameter that got a gradient, or outputs through which none goes.
    """
    params = {
        plain_name(name): param
        for name, param in getattr(model, "module", model).named_parameters()
        if param.requires_grad
    }
    if not params:
        raise ProfileError("expected a model with parameters that require gradients, got none")
    if steps < 1:
        raise ProfileError(f"expected at least one step, got {steps}")
    marks = _Marks(model, params)
    try:
        measured: list[dict[str, float]] = []
        for _ in range(WARM_UP_STEPS + steps):
            before_step()
            measured.append(marks.time(step))
    finally:
        marks.remove()
    kept = measured[WARM_UP_STEPS:]
    middle = {name: statistics.median(one[name] for one in kept) for name in kept[0]}
    backward_s = max(middle["backward"], *(middle[f"ready {name}"] for name in params))
    return Computation(
        forward_s=middle["forward"],
        backward_s=backward_s,
        optimizer_s=middle["optimizer"],
        parameters=tuple(
            TimedParameter(
                name=name,
                shape=tuple(param.shape),
                ready_s=middle[f"ready {name}"],
                dtype=str(param.dtype).removeprefix("torch."),
            )
            for name, param in params.items()
        ),
        busy_cores=middle["cpu"] / backward_s if backward_s and marks.on_cpu else 0.0,
    )


class _Marks:
    """Hooks that note when things happen in a step."""

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self._model, self._params = model, params
        self._device = next((p.device for p in params.values() if p.device.type != "cpu"), None)
        self._ready: dict[str, Any] = {}
        self._backward: Any = None
        self._cpu = [0.0, 0.0]
        self._armed = False
        self._handles: list[Any] = [model.register_forward_hook(self._forward_ends)]
        for name, param in params.items():
            self._handles.append(param.register_post_accumulate_grad_hook(self._hook(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def on_cpu(self) -> bool:
        """Whether processors compute."""
        return self._device is None

    def time(self, step: Callable[[], object]) -> dict[str, float]:
        """Run one step; return seconds by what they were spent on."""
        self._ready, self._backward = {}, None
        no_sync: Callable[[], AbstractContextManager[object]] = getattr(self._model, "no_sync", nullcontext)
        with no_sync():
            start = self._now()
            step()
            end = self._now()
        if not self._ready:
            raise ProfileError("expected step() to run a backward pass through the model, got no gradient")
        if self._backward is None:
            raise ProfileError(
                "expected the model's forward to return tensors that require gradients, so that the beginning of the "
                "backward pass shows, got none"
            )
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        ready = {name: self._between(self._backward, mark) for name, mark in self._ready.items()}
        last = max(ready.values())
        forward_s, whole_s = self._between(start, self._backward), self._between(start, end)
        return {
            "forward": forward_s,
            "backward": last,
            "optimizer": max(0.0, whole_s - forward_s - last),
            "cpu": self._cpu[1] - self._cpu[0],
            # What got no gradient is not waited for longer than for the last that did.
            **{f"ready {name}": ready.get(name, last) for name in self._params},
        }

    def _forward_ends(self, module: nn.Module, args: object, output: object) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in tensors:
            tensor.register_hook(self._backward_begins)
        self._armed = bool(tensors)

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._armed:
            self._armed, self._ready = False, {}
            self._backward = self._now()
            self._cpu[0] = time.process_time()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def note(param: Tensor) -> None:
            self._ready[name] = self._now()
            self._cpu[1] = time.process_time()

        return note

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return end - start if self._device is None else start.elapsed_time(end) / 1e3
