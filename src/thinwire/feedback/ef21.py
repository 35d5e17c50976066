"""EF21: what is compressed is the change of the gradient, not the gradient."""

from dataclasses import dataclass

from torch import Tensor

from thinwire.feedback.base import Feedback, Memory, Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class EF21(Feedback):
    r"""Every rank keeps an estimate of its own gradient and sends the compressed difference.

    With estimates g_i and G (0 at first), n ranks and this step's gradients x_i:

        rank i:  sends c_i = C_up(x_i - g_i);          g_i <- g_i + decode(c_i)
        owner:   m <- m + (1/n) sum_i decode(c_i), the mean of all g_i;   sends b = C_down(m - G)
        all:     G <- G + decode(b), which is delivered.

    As gradients change less from step to step, so do the differences, and the error of G goes to zero with them; error
    feedback's does not. Nothing is owed: what was not sent of a gradient is not delivered later, but superseded.
    Noise of small batches does not fade from step to step, and then error feedback may well do better.

    Where C_down is exact, owners send m, and no G is kept; where there are no owners, everyone's G takes the place of
    m. Both compressors must be contractive.

    The kernels' residual is not used. With residual = -g_i they would encode the same q = x_i - g_i, but leave
    q - decode(c_i) = x_i - (g_i + decode(c_i)): taking x_i out again costs a pass and a rounding, and g_i must be the
    sum of the very values that receivers add up.

    Example:
        >>> EF21().recipe()
        'ef21'

    References:
        Peter Richtarik, Igor Sokolov, Ilyas Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically
        Faster Error Feedback", 2021. Two-way: Ilyas Fatkhullin, Igor Sokolov, Eduard Gorbunov, Zhize Li, Peter
        Richtarik, "EF21 with Bells & Whistles: Practical Algorithmic Extensions of Modern Error Feedback", 2021
        (EF21-BC). Differs from the papers: estimates start at 0, so that the first step sends C(x_i).
    """

    def recipe(self) -> str:
        """`ef21`."""
        return "ef21"

    def slots(self, *, exact_up: bool, exact_down: bool, owners: bool) -> frozenset[Slot]:
        """Estimates of whatever is compressed."""
        kept = set[Slot]()
        if not exact_up:
            kept |= {Slot.ESTIMATE, Slot.MEAN if owners else Slot.DELIVERED}
        if not exact_down:
            kept.add(Slot.DELIVERED)
        return frozenset(kept)

    def sees_sent(self, *, sparse: bool) -> bool:
        """The estimate is the sum of what was sent."""
        return True

    def before_up(self, value: Tensor, memory: Memory, *, unit_ratio: float) -> None:
        """Turn x into x - g."""
        if unit_ratio != 1.0:
            for slot in {Slot.ESTIMATE, Slot.DELIVERED} & memory.keys():
                memory[slot].mul_(unit_ratio)
        if Slot.ESTIMATE in memory:
            value.sub_(memory[Slot.ESTIMATE])

    def after_up(self, sent: Tensor, memory: Memory) -> None:
        """Add what was sent to g."""
        if Slot.ESTIMATE in memory:
            memory[Slot.ESTIMATE].add_(sent)

    def before_down(self, value: Tensor, memory: Memory, *, unit_ratio: float) -> None:
        """Turn the mean of the differences into m, or m - G."""
        if Slot.MEAN in memory:
            if unit_ratio != 1.0:
                memory[Slot.MEAN].mul_(unit_ratio)
            value.copy_(memory[Slot.MEAN].add_(value))
        if Slot.DELIVERED in memory:
            value.sub_(memory[Slot.DELIVERED])

    def settle(self, value: Tensor, memory: Memory) -> None:
        """Add the change to G."""
        if Slot.DELIVERED in memory:
            value.copy_(memory[Slot.DELIVERED].add_(value))
