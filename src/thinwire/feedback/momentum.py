"""Momentum correction: every rank applies the momentum itself, before what is sent is chosen."""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.errors import RecipeError
from thinwire.feedback.base import Feedback, Memory, Slot, residual_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumCorrection(Feedback):
    r"""Accumulates momentum, not gradients, until they are sent; the optimizer must have no momentum of its own.

    With the momentum u_t and the residual v_t (0 at first), m = `momentum`, per sender:

        u_t = m u_{t-1} + clip(g_t),   d_t = u_t   (g_t + m u_t with `nesterov`),
        q_t = d_t + v_{t-1},   send C(q_t),   v_t = q_t - decode(C(q_t)),
        u_t <- 0 wherever something was sent   (momentum factor masking).

    A value that waits in v for many steps would otherwise come with one step's momentum instead of theirs. Masking is
    for kinds that hold values back (top-k, random-k below density 1). Where all is sent, there is nothing stale to
    forget. Then, and without `masking`, what is delivered plus what is owed is the sum of momentum SGD's steps: with an
    exact C on one rank it is those steps, to the bit (with `nesterov` but for a rounding that torch may spare). Owners
    send back with plain error feedback. Parameters that stay dense get the same momentum, at once.

    Without `masking` unbiased kinds may be used, too: there is no v then, and no owner's residual, as there is nothing
    to make up for in the mean. With `nesterov`, that is the momentum of CLAN's system under SGD; recipe `@nag`.

    clip(g) = g min(1, c n^{1/2} / ||g||) with c = `clip`, the norm to which the mean gradient of a parameter should
    keep, and n ranks: n independent gradients of norm c n^{1/2} have a mean of norm c. That is the paper's c n^{-1/2},
    which bounds a rank's share g/n of the mean.

    Weight decay of the optimizer is applied to the weights without momentum; `thinwire.optim.NAG` with
    `worker_momentum` gives it its own. Nothing is corrected for changes of the learning rate.

    Args:
        momentum: m, in [0, 1).
        nesterov: look one step ahead, as `torch.optim.SGD(nesterov=True)` does.
        clip: c, in units of the unscaled gradient, above 0; None does not clip.
        masking: whether momentum starts again where something was sent.

    Raises:
        RecipeError: a field out of range.

    Example:
        >>> MomentumCorrection().recipe(), MomentumCorrection(nesterov=True, masking=False).recipe()
        ('dgc', 'nag')

    References:
        Yujun Lin, Song Han, Huizi Mao, Yu Wang, William J. Dally, "Deep Gradient Compression: Reducing the
        Communication Bandwidth for Distributed Training", 2018. Differs from the paper: the rounding error of what was
        sent stays in v; owners compress, too; the clipped norm is that of one parameter, since others may not have
        their gradient yet; nesterov is written as torch.optim writes it, with the same result.
        Yuchen Zhong, Cong Xie, Shuai Zheng, Haibin Lin, "Compressed Communication for Distributed Training: Adaptive
        Methods and System", 2021 (without masking, as its released code has it).
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None
    masking: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise RecipeError(f"MomentumCorrection: expected a momentum in [0, 1), got {self.momentum}")
        if self.clip is not None and not 0.0 < self.clip < math.inf:
            raise RecipeError(f"MomentumCorrection: expected a clip above 0, got {self.clip}")

    def recipe(self) -> str:
        """`dgc`, or `nag` for Nesterov's without masking, with what differs from the defaults."""
        name = "nag" if self.nesterov and not self.masking else "dgc"
        extras = [repr(float(self.momentum))] if self.momentum != 0.9 else []
        extras += ["nesterov"] if self.nesterov and name == "dgc" else []
        extras += ["unmasked"] if not self.masking and name == "dgc" else []
        extras += [f"clip={float(self.clip)!r}"] if self.clip is not None else []
        return ":".join([name, *extras])

    def slots(self, *, exact_up: bool, exact_down: bool, owners: bool) -> frozenset[Slot]:
        """The momentum, and a residual on every side that loses something."""
        return residual_slots(exact_up=exact_up, exact_down=exact_down) | {Slot.MOMENTUM}

    def largest_norm(self, world_size: int) -> float | None:
        """Return c n^1/2."""
        return None if self.clip is None else self.clip * math.sqrt(world_size)

    @property
    def takes_unbiased(self) -> bool:
        """Where nothing is masked."""
        return not self.masking

    def sees_sent(self, *, sparse: bool) -> bool:
        """Masking needs to know what was sent."""
        return sparse and self.masking

    def before_up(self, value: Tensor, memory: Memory, *, unit_ratio: float) -> None:
        """Turn g into d."""
        u = memory[Slot.MOMENTUM]
        u.mul_(self.momentum * unit_ratio).add_(value)
        if self.nesterov:
            value.add_(u * self.momentum)  # its own rounding: torch may fuse `add(alpha=)`
        else:
            value.copy_(u)

    def after_up(self, sent: Tensor, memory: Memory) -> None:
        """Mask. On the CPU NumPy does it in a fourth of the time that torch takes."""
        if sent.is_cpu:
            np.copyto(memory[Slot.MOMENTUM].numpy(), 0.0, where=sent.numpy() != 0.0)
        else:
            memory[Slot.MOMENTUM].masked_fill_(sent != 0.0, 0.0)
