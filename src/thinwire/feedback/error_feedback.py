"""Error feedback: what was not sent is added to the next step."""

from dataclasses import dataclass

from thinwire.errors import RecipeError
from thinwire.feedback.base import Feedback, Slot, residual_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFeedback(Feedback):
    r"""Adds what was not sent to the next step's gradient.

    With the residual e_t (0 at first), per sender:

        q_t = g_t + decay * (lr_{t-1} / lr_t) * e_t,   send C(q_t),   e_{t+1} = q_t - decode(C(q_t)).

    The ratio of learning rates is 1 unless `lr_correction`. With decay = 1 nothing is ever lost: the sum of what was
    delivered plus the last residual is the sum of all gradients.

    Args:
        decay: in (0, 1]; below 1 old error fades, and that part is lost.
        lr_correction: keep the residual in units of weight change when the learning rate moves; right for SGD. Needs
            `optimizer` at attach. A learning rate of 0 leaves the residual uncorrected.

    Raises:
        RecipeError: decay out of range.

    Example:
        >>> ErrorFeedback().unit_ratio(loss_scale=2.0)
        2.0

    References:
        Shuai Zheng, Ziyue Huang, James T. Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with
        Error-Feedback", 2019.
    """

    decay: float = 1.0
    lr_correction: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise RecipeError(f"ErrorFeedback: expected a decay in (0, 1], got {self.decay}")

    def recipe(self) -> str:
        """`ef`, with what differs from the defaults."""
        extras = [f"decay={self.decay!r}"] if self.decay != 1.0 else []
        extras += ["lr"] if self.lr_correction else []
        return ":".join(["ef", *extras])

    def slots(self, *, exact_up: bool, exact_down: bool, owners: bool) -> frozenset[Slot]:
        """A residual on every side that loses something."""
        return residual_slots(exact_up=exact_up, exact_down=exact_down)

    @property
    def needs_learning_rate(self) -> bool:
        """Only for the correction."""
        return self.lr_correction

    def unit_ratio(
        self, *, lr: float = 1.0, last_lr: float = 1.0, loss_scale: float = 1.0, last_loss_scale: float = 1.0
    ) -> float:
        """Return what converts a residual into this step's units; the factor in `q` is decay times this."""
        lr_ratio = last_lr / lr if self.lr_correction and lr > 0 and last_lr > 0 else 1.0
        return lr_ratio * (loss_scale / last_loss_scale)

    def residual_scale(self, unit_ratio: float) -> float:
        """Return decay times the ratio."""
        return self.decay * unit_ratio
