"""LAMB: blockwise Adam for large batches, with one ratio of norms a block."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.algorithms.blockwise import Blocks, BlockwiseAdam, update_moments
from thinwire.algorithms.norms import norms, ratios


class LAMB(BlockwiseAdam):
    r"""Blockwise Adam whose step is as long as the weights.

    A block is one parameter, x its weights, g its gradient, t the step, which counts from 1. With b1, b2 = `betas`,
    b3 = 1 - b1 (1 without `grad_averaging`), w = `weight_decay`, c = `max_grad_norm`, and G all gradients together:

        g  <- g / max(1, ||G|| / c)
        m  <- b1 m + b3 g,        v <- b2 v + (1 - b2) g^2
        mh  = m / (1 - b1^t),    vh  = v / (1 - b2^t)  (m and v themselves without `bias_correction`)
        u   = mh / (sqrt(vh) + eps) + w x
        x  <- x - lr ||x||/||u|| u

    The ratio of norms is 1 where either norm is 0, and, unless `adapt_all`, in groups where w = 0. It is not clamped.
    Without `decoupled_weight_decay` w x is added to g before the moments instead. inf and nan propagate.

    From LANS it differs in three things: gradients are clipped by one norm over all instead of normalised one by one;
    there is no Nesterov term; and blocks without weight decay take Adam's step.

    Args:
        params: float32 or float64 parameters, or groups of them; `no_decay_groups` makes the usual two.
        lr: eta, at least 0. A float or a scalar tensor.
        betas: b1 and b2, in [0, 1).
        eps: above 0.
        weight_decay: w, at least 0.
        max_grad_norm: c, above 0; None does not clip.
        adapt_all: whether blocks without weight decay are scaled by their ratio, too (NVLAMB).
        grad_averaging: whether b3 is 1 - b1.
        bias_correction: whether moments are corrected for their start at 0.
        decoupled_weight_decay: whether w x stays out of the moments.
        foreach: whether blocks are updated all at once; None: where all are on a GPU.

    Raises:
        OptimizerError: a setting out of range, or a parameter of another dtype, or a sharded one.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LAMB([x], lr=0.1, weight_decay=0.0, adapt_all=True)
        >>> x.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> x
        Parameter containing:
        tensor([2.5000, 4.0000], requires_grad=True)

    References:
        Yang You, Jing Li, Sashank Reddi, Jonathan Hseu, Sanjiv Kumar, Srinadh Bhojanapalli, Xiaodan Song, James
        Demmel, Kurt Keutzer, Cho-Jui Hsieh, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
        2020. Differs from the paper as the implementation in NVIDIA's apex does: gradients are clipped, and blocks
        without weight decay are not scaled.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = 1.0,
        adapt_all: bool = False,
        grad_averaging: bool = True,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "adapt_all": adapt_all,
            "grad_averaging": grad_averaging,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, foreach=foreach)

    def _begin(self, grads: list[Tensor]) -> None:
        self._global_norm = None
        if grads:
            (self._global_norm,) = norms([torch.stack([one.to(grads[0]) for one in norms(grads)])])

    def _update(self, blocks: Blocks, group: dict[str, Any]) -> None:
        if not blocks.x:
            return
        x, g = blocks.x, blocks.g
        decay = group["weight_decay"]
        if group["max_grad_norm"] is not None:
            assert self._global_norm is not None
            excess = (self._global_norm / group["max_grad_norm"]).clamp(min=1.0)
            g = list(torch._foreach_div(g, [excess] * len(g)))
        if decay and not group["decoupled_weight_decay"]:
            g = list(torch._foreach_add(g, x, alpha=decay))
        u, _ = update_moments(blocks, g, group)
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_add_(u, x, alpha=decay)
        if decay or group["adapt_all"]:
            torch._foreach_mul_(u, [group["lr"] * rho for rho in ratios(norms(x), norms(u))])
        else:
            torch._foreach_mul_(u, group["lr"])
        torch._foreach_sub_(x, u)
