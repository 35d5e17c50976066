"""Learning rates that warm up, may stay for a while, and fall."""

import math
from dataclasses import dataclass
from typing import Literal

from thinwire.errors import OptimizerError


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    r"""The factor on the learning rate as a function of the step, for `torch.optim.lr_scheduler.LambdaLR`.

    With t = step + 1, which counts from 1, W = `warm_up`, H = `hold`, T = `total`, and s = (T - t) / (T - W - H):

        t / W                       for t <= W,
        1                           for W < t <= W + H,
        s                           for W + H < t <= T, with decay "linear"
        (1 + cos(pi (1 - s))) / 2   for W + H < t <= T, with decay "cosine"
        0                           afterwards.

    CLAN trains BERT with linear decay from the end of a warm-up of 1.25 %, and image models with cosine decay after 5
    epochs; LANS holds before a linear decay.

    Args:
        total: T, steps in all; above `warm_up` + `hold`.
        warm_up: W, steps, at least 0.
        hold: H, steps, at least 0.
        decay: "linear" or "cosine".

    Raises:
        OptimizerError: steps that do not add up, or another decay.

    Example:
        >>> schedule = WarmUp(total=8, warm_up=2, hold=2)
        >>> [schedule(step) for step in range(9)]
        [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    References:
        Shuai Zheng, Haibin Lin, Sheng Zha, Mu Li, "Accelerated Large Batch Optimization of BERT Pretraining in 54
        minutes", 2020. Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed
        Training: Adaptive Methods and System", 2021.
    """

    total: int
    warm_up: int = 0
    hold: int = 0
    decay: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if min(self.warm_up, self.hold) < 0 or self.warm_up + self.hold >= self.total:
            raise OptimizerError(
                f"WarmUp: expected warm_up and hold of at least 0 steps, together below total, got {self}"
            )
        if self.decay not in ("linear", "cosine"):
            raise OptimizerError(f"WarmUp: expected decay 'linear' or 'cosine', got {self.decay!r}")

    def __call__(self, step: int) -> float:
        """Return the factor at a step, which counts from 0."""
        t = step + 1
        if t <= self.warm_up:
            return t / self.warm_up
        s = min(1.0, max(0.0, (self.total - t) / (self.total - self.warm_up - self.hold)))
        return s if self.decay == "linear" else (1 + math.cos(math.pi * (1 - s))) / 2
