"""What LANS and LAMB share: Adam's moments, and a loop over blocks. A block is one parameter, whole."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.algorithms.checked import CheckedOptimizer


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks that are updated together, each list in the same order; all tensors of a block have its shape.

    Attributes:
        x: the weights, updated in place.
        g: the gradients; only read.
        m: first moments, updated in place.
        v: second moments, updated in place.
        steps: t, which counts from 1.
    """

    x: list[Tensor]
    g: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    steps: list[float]


class BlockwiseAdam(CheckedOptimizer):
    """Adam whose step is scaled block by block.

    `torch._foreach` functions work on lists: `foreach` says whether a list holds all blocks of a group, or one at a
    time. The numbers are the same, on a CPU to the bit; all at once needs fewer launches, and three more copies of the
    group's parameters while it runs.
    """

    def _update_groups(self) -> None:
        gathered = [(group, self._gather(group)) for group in self.param_groups]
        self._begin([g for _, blocks in gathered for g in blocks.g])
        for group, blocks in gathered:
            if not blocks.x:
                continue
            for some in [blocks] if _together(blocks, group) else _one_by_one(blocks):
                self._update(some, group)

    def _gather(self, group: dict[str, Any]) -> Blocks:
        blocks = Blocks([], [], [], [], [])
        for x in group["params"]:
            if x.grad is None:
                continue
            state = self.state[x]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(x, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(x, memory_format=torch.preserve_format)
            state["step"] += 1
            blocks.x.append(x)
            blocks.g.append(x.grad)
            blocks.m.append(state["exp_avg"])
            blocks.v.append(state["exp_avg_sq"])
            blocks.steps.append(float(state["step"]))
        return blocks

    def _begin(self, grads: list[Tensor]) -> None:
        """Look at the gradients of all groups, before any is used."""

    @abstractmethod
    def _update(self, blocks: Blocks, group: dict[str, Any]) -> None:
        """Bring moments and weights of these blocks up to date."""


def _together(blocks: Blocks, group: dict[str, Any]) -> bool:
    return all(x.is_cuda for x in blocks.x) if group["foreach"] is None else group["foreach"]


def _one_by_one(blocks: Blocks) -> list[Blocks]:
    every = zip(blocks.x, blocks.g, blocks.m, blocks.v, blocks.steps, strict=True)
    return [Blocks([x], [g], [m], [v], [t]) for x, g, m, v, t in every]


def update_moments(blocks: Blocks, g: list[Tensor], group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Take `g` into the moments; return mh / den and den, where den = sqrt(vh) + eps and hats correct the bias."""
    beta1, beta2 = group["betas"]
    torch._foreach_mul_(blocks.m, beta1)
    torch._foreach_add_(blocks.m, g, alpha=momentum_share(group))
    torch._foreach_mul_(blocks.v, beta2)
    torch._foreach_addcmul_(blocks.v, g, g, 1 - beta2)
    corrected = group["bias_correction"]
    den = torch._foreach_div(blocks.v, [1 - beta2**t if corrected else 1.0 for t in blocks.steps])
    torch._foreach_sqrt_(den)
    torch._foreach_add_(den, group["eps"])
    direction = torch._foreach_div(blocks.m, [1 - beta1**t if corrected else 1.0 for t in blocks.steps])
    torch._foreach_div_(direction, den)
    return list(direction), list(den)


def momentum_share(group: dict[str, Any]) -> float:
    """Return beta3, the factor on a gradient in the first moment."""
    return 1 - group["betas"][0] if group["grad_averaging"] else 1.0
