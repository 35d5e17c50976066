"""The feedback interface: which tensors are kept between steps, and what happens to a block around its encoding.

What kernels do by themselves is error feedback: q = x + residual_scale * residual is encoded, and the residual ends as
q - decode(bytes). Everything else happens before and after, on one block at a time.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor


class Slot(enum.StrEnum):
    """What is kept of a parameter between steps; float32, all but `FACTOR` in units of loss scale times gradient.

    All but the owners' are kept whole by every rank. `DELIVERED` and `FACTOR` are the same on all of them.
    """

    WORKER = "worker"  # what this rank has not sent yet
    MOMENTUM = "momentum"  # u of MomentumCorrection
    ESTIMATE = "estimate"  # g_i of EF21, what this rank's contribution is taken to be
    DELIVERED = "delivered"  # G of EF21, what was delivered last
    FACTOR = "factor"  # of PowerSGD: the factor that the next step begins with, column after column
    OWNER = "owner"  # what an owner has not sent back yet
    MEAN = "mean"  # of EF21, at an owner: the mean of all ranks' estimates

    @property
    def owned(self) -> bool:
        """Whether it is kept by owners, for what they own."""
        return self in (Slot.OWNER, Slot.MEAN)

    @property
    def common(self) -> bool:
        """Whether all ranks keep the same."""
        return self in (Slot.DELIVERED, Slot.FACTOR)


def residual_slots(*, exact_up: bool, exact_down: bool) -> frozenset[Slot]:
    """Return a residual for every side that loses something."""
    exact = {Slot.WORKER: exact_up, Slot.OWNER: exact_down}
    return frozenset(slot for slot, nothing_lost in exact.items() if not nothing_lost)


Memory = Mapping[Slot, Tensor]  # of one block: what it keeps, but for the residuals, which the kernels rewrite


class Feedback(ABC):
    """What is done with the part that was not sent. Frozen settings; the tensors are the caller's."""

    __slots__ = ()

    @abstractmethod
    def recipe(self) -> str:
        """Return the name with arguments, as it follows "@" in a recipe."""

    @abstractmethod
    def slots(self, *, exact_up: bool, exact_down: bool, owners: bool) -> frozenset[Slot]:
        """Return what must be kept.

        Args:
            exact_up: what ranks send arrives as it is, at least in the mean.
            exact_down: what owners send back does.
            owners: whether there are any; else every rank forms the mean itself.
        """

    @property
    def takes_unbiased(self) -> bool:
        """Whether it may surround unbiased kinds, of which it then keeps no residual."""
        return False

    @property
    def needs_learning_rate(self) -> bool:
        """Whether `unit_ratio` depends on the learning rate."""
        return False

    def unit_ratio(
        self, *, lr: float = 1.0, last_lr: float = 1.0, loss_scale: float = 1.0, last_loss_scale: float = 1.0
    ) -> float:
        """Return what converts all that is kept into this step's units.

        Args:
            lr: learning rate of the step that begins.
            last_lr: learning rate when the residual was left.
            loss_scale: factor on this step's gradients (GradScaler's scale).
            last_loss_scale: factor on the gradients of the last step.
        """
        return loss_scale / last_loss_scale

    def residual_scale(self, unit_ratio: float) -> float:
        """Return the factor on the residuals in q."""
        return unit_ratio

    def largest_norm(self, world_size: int) -> float | None:
        """Return the norm to which this rank's gradient of a parameter is clipped, or None where it is not."""
        return None

    def sees_sent(self, *, sparse: bool) -> bool:
        """Return whether `after_up` must be called, for a compressor that holds values back if `sparse`."""
        return False

    # Error feedback needs none of these.

    def before_up(self, value: Tensor, memory: Memory, *, unit_ratio: float) -> None:  # noqa: B027
        """Turn the gradient in `value` into what is encoded; bring `memory`, but the mean, into this step's units."""

    def after_up(self, sent: Tensor, memory: Memory) -> None:  # noqa: B027
        """Take note of what the bytes decode to."""

    def before_down(self, value: Tensor, memory: Memory, *, unit_ratio: float) -> None:  # noqa: B027
        """On the owner: turn the mean of what arrived, in `value`, into what is encoded."""

    def settle(self, value: Tensor, memory: Memory) -> None:  # noqa: B027
        """Turn what was decoded last, in `value`, into what is delivered."""
