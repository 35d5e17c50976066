"""LANS: blockwise Adam with Nesterov's momentum, for large batches."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.algorithms.blockwise import Blocks, BlockwiseAdam, momentum_share, update_moments
from thinwire.algorithms.norms import norms, ratios


class LANS(BlockwiseAdam):
    r"""Blockwise Adam whose step is as long as the weights, in the directions of the momentum and of the gradient.

    A block is one parameter, x its weights, g its gradient, t the step, which counts from 1. With b1, b2 = `betas`,
    b3 = 1 - b1 (1 without `grad_averaging`), w = `weight_decay`, all norms L2 and over the whole block:

        g  <- g / (||g|| + eps)                        with `normalize_grad`
        m  <- b1 m + b3 g,        v <- b2 v + (1 - b2) g^2
        mh  = m / (1 - b1^t),    vh  = v / (1 - b2^t)  (m and v themselves without `bias_correction`)
        r   = mh / (sqrt(vh) + eps) + w x,    c = g / (sqrt(vh) + eps) + w x
        x  <- x - lr (b1 ||x||/||r|| r + b3 ||x||/||c|| c)

    A ratio of norms is 1 where either norm is 0. It applies to every block, also to those with w = 0, and is not
    clamped. Without `decoupled_weight_decay` w x is added to g before the moments instead, and not to r and c. inf and
    nan propagate. Since steps are as long as ||x||, parameters that start at 0 move by the rule without ratios, once.

    On CPUs norms of float32 are the same to the bit whatever the machine and its threads, so that replicas with equal
    gradients do not drift apart.

    Args:
        params: float32 or float64 parameters, or groups of them; `no_decay_groups` makes the usual two.
        lr: eta, the length of a step relative to that of the weights, about; at least 0. A float or a scalar tensor.
        betas: b1 and b2, in [0, 1).
        eps: above 0.
        weight_decay: w, at least 0.
        normalize_grad: whether gradients are scaled to norm 1, block by block, before the moments. CLAN's released
            code trains without.
        grad_averaging: whether b3 is 1 - b1.
        bias_correction: whether moments are corrected for their start at 0.
        decoupled_weight_decay: whether w x stays out of the moments.
        foreach: whether blocks are updated all at once; None: where all are on a GPU.

    Raises:
        OptimizerError: a setting out of range, or a parameter of another dtype, or a sharded one.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LANS([x], lr=0.1, weight_decay=0.0)
        >>> x.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> x  # a tenth of ||x|| = 5, against the gradient
        Parameter containing:
        tensor([2.5000, 4.0000], requires_grad=True)

    References:
        Shuai Zheng, Haibin Lin, Sheng Zha, Mu Li, "Accelerated Large Batch Optimization of BERT Pretraining in 54
        minutes", 2020. As its released code has it, phi(||x||) is ||x||.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        normalize_grad: bool = True,
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
            "normalize_grad": normalize_grad,
            "grad_averaging": grad_averaging,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, foreach=foreach)

    def _update(self, blocks: Blocks, group: dict[str, Any]) -> None:
        if not blocks.x:
            return
        x, g = blocks.x, blocks.g
        decay = group["weight_decay"]
        if group["normalize_grad"]:
            g = list(torch._foreach_div(g, [size + group["eps"] for size in norms(g)]))
        if decay and not group["decoupled_weight_decay"]:
            g = list(torch._foreach_add(g, x, alpha=decay))
        r, den = update_moments(blocks, g, group)
        c = list(torch._foreach_div(g, den))
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_add_(r, x, alpha=decay)
            torch._foreach_add_(c, x, alpha=decay)
        lengths = norms(x)
        for direction, share in ((r, group["betas"][0]), (c, momentum_share(group))):
            torch._foreach_mul_(direction, [group["lr"] * share * rho for rho in ratios(lengths, norms(direction))])
        torch._foreach_add_(r, c)
        torch._foreach_sub_(x, r)
