"""The outer optimizer: what the mean of all ranks' differences does to the copy that all of them hold."""

from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import AttachError


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterSGD:
    r"""SGD on theta, with the mean difference D in place of a gradient.

    With eta = `lr`, m = `momentum`, and u (0 at first) kept where m > 0:

        u <- m u + D;   d = D + m u   (`nesterov`; else u);   theta <- theta - eta d.

    That is `torch.optim.SGD`. With eta = 1 and m = 0, theta becomes the mean of all ranks' models. Products and sums
    are rounded one by one: torch may fuse `add(alpha=)`, on some processors only, and ranks would drift apart.

    Args:
        lr: eta, above 0.
        momentum: m, in [0, 1).
        nesterov: look one step ahead.

    Raises:
        AttachError: a number out of range.

    Example:
        >>> theta, u = torch.tensor([1.0]), torch.tensor([0.0])
        >>> OuterSGD(lr=0.5, momentum=0.5).step(theta, torch.tensor([1.0]), u)
        >>> theta, u
        (tensor([0.2500]), tensor([1.]))
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.lr < float("inf"):
            raise AttachError(f"outer_lr: expected a number above 0, got {self.lr}")
        if not 0.0 <= self.momentum < 1.0:
            raise AttachError(f"outer_momentum: expected a number in [0, 1), got {self.momentum}")

    @property
    def is_mean(self) -> bool:
        """Whether theta becomes the mean of all ranks' models."""
        return self.lr == 1.0 and self.momentum == 0.0

    def step(self, theta: Tensor, mean: Tensor, velocity: Tensor | None) -> None:
        """Update `theta` and `velocity` (u; None without momentum) in place; `mean` is used up. All float32."""
        if velocity is not None:
            velocity.mul_(self.momentum).add_(mean)
            if self.nesterov:
                mean.add_(velocity * self.momentum)
            else:
                mean.copy_(velocity)
        theta.sub_(mean if self.lr == 1.0 else mean.mul_(self.lr))
