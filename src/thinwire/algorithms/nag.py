"""SGD with Nesterov's momentum, which may be applied by those who send gradients instead of here."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.algorithms.checked import CheckedOptimizer


class NAG(CheckedOptimizer):
    r"""SGD with Nesterov's momentum and weight decay.

    With the gradient g, weights x, u = 0 at first, m = `momentum`, w = `weight_decay`:

        d = g + w x,    u <- m u + d,    x <- x - lr (d + m u)

    With `worker_momentum` g holds Nesterov's momentum of the gradients already, as recipes with `@nag` apply it before
    they compress. Weight decay, which must not go through a compressor, then gets its own momentum here:

        d = w x,        u <- m u + d,    x <- x - lr (g + d + m u)

    Both rules are one and the same where nothing is lost on the way: they are linear in g and x.

    Args:
        params: float32 or float64 parameters, or groups of them.
        lr: eta, at least 0. A float or a scalar tensor.
        momentum: m, in [0, 1).
        weight_decay: w, at least 0.
        worker_momentum: whether gradients come with their momentum. `thinwire.attach(..., optimizer=optimizer)`
            checks that it is the recipe's.

    Raises:
        OptimizerError: a setting out of range, or a parameter of another dtype, or a sharded one.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = NAG([x], lr=0.1, momentum=0.5)
        >>> x.grad = torch.tensor([2.0])
        >>> optimizer.step()
        >>> x  # 1 - 0.1 (2 + 0.5 * 2)
        Parameter containing:
        tensor([0.7000], requires_grad=True)

    References:
        Yurii Nesterov, "A method for solving the convex programming problem with convergence rate O(1/k^2)", 1983, as
        `torch.optim.SGD(nesterov=True)` writes it. Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed
        Communication for Distributed Training: Adaptive Methods and System", 2021 (momentum of workers; of weight
        decay, as its released code has it).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        worker_momentum: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "worker_momentum": worker_momentum,
        }
        super().__init__(params, defaults)

    def _update_groups(self) -> None:
        for group in self.param_groups:
            momentum, at_workers = group["momentum"], group["worker_momentum"]
            for x in group["params"]:
                if x.grad is None:
                    continue
                d = x * group["weight_decay"] if at_workers else x.grad.add(x, alpha=group["weight_decay"])
                state = self.state[x]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(x, memory_format=torch.preserve_format)
                u = state["momentum_buffer"].mul_(momentum).add_(d)
                d.add_(u, alpha=momentum)
                if at_workers:
                    d.add_(x.grad)
                x.add_(d, alpha=-float(group["lr"]))
