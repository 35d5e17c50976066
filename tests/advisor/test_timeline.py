"""The computation of a step: what is timed, and what is refused. Times are only ever bounded from below, by sleeps."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.advisor.timeline import measure_computation
from thinwire.errors import ProfileError

SLEEP_S = 0.01


class _Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return grad_outputs[0]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.spare = nn.Parameter(torch.zeros(5))  # never used
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = _Slow.apply(layer(x))  # type: ignore[assignment]
        time.sleep(SLEEP_S)
        return {"out": x}


def _step(model: nn.Module, num_backward: int = 1) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        for _ in range(num_backward):
            model(torch.ones(2, 8))["out"].sum().backward()
        time.sleep(2 * SLEEP_S)

    return step


def test_gradients_are_ready_when_backward_has_come_to_them() -> None:
    model = _Model()
    computation = measure_computation(model, _step(model), steps=3)
    ready = {parameter.name: parameter.ready_s for parameter in computation.parameters}
    for waits, layer in enumerate((2, 1, 0), start=1):
        assert ready[f"layers.{layer}.weight"] >= waits * SLEEP_S
    assert ready["layers.2.weight"] < ready["layers.1.weight"] < ready["layers.0.weight"]
    assert computation.backward_s == max(ready.values())
    assert ready["spare"] == computation.backward_s
    assert "frozen" not in ready
    assert computation.forward_s >= SLEEP_S
    assert computation.optimizer_s >= 2 * SLEEP_S
    assert [parameter.shape for parameter in computation.parameters][:2] == [(5,), (8, 8)]


def test_of_several_backward_passes_the_last_counts() -> None:
    model = _Model()
    once = 4 * SLEEP_S
    computation = measure_computation(model, _step(model, 3), steps=1)
    assert computation.forward_s >= 2 * once + SLEEP_S
    assert computation.backward_s >= 3 * SLEEP_S


def test_hooks_are_gone_afterwards() -> None:
    model = _Model()
    measure_computation(model, _step(model), steps=1)
    assert not model._forward_hooks
    assert not model.layers[0].weight._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda model: None, "expected step\\(\\) to run a backward pass"),
        (lambda model: model.layers[0].weight.sum().backward(), "expected the model's forward to return tensors"),
    ],
)
def test_a_step_without_a_backward_pass_through_the_model_is_refused(step: Any, said: str) -> None:
    model = _Model()
    with pytest.raises(ProfileError, match=said):
        measure_computation(model, lambda: step(model))


def test_a_model_that_does_not_train_is_refused() -> None:
    with pytest.raises(ProfileError, match="parameters that require gradients"):
        measure_computation(nn.ReLU(), lambda: None)
    with pytest.raises(ProfileError, match="at least one step"):
        measure_computation(nn.Linear(2, 2), lambda: None, steps=0)
