"""Before the first byte: all ranks either agree on the plan, or all raise, with the first difference named."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from thinwire.comm.process_group import OverlappedDriver, all_gather_text
from thinwire.comm.rounds import AllReduce, Exchange, Transfer
from thinwire.errors import PlanError
from thinwire.plan import first_difference


class Comparable(Protocol):
    """A plan, or the plans of several phases."""

    @property
    def digest(self) -> str:
        """Equal on two ranks iff they agree."""
        ...

    def lines(self) -> list[str]:
        """Return all that must agree, one fact a line."""
        ...


Planned = TypeVar("Planned", bound=Comparable)


def agree(build: Callable[[], Planned], group: dist.ProcessGroup, settings: Sequence[str] = ()) -> Planned:
    """Build the plan on this rank and compare it with every other rank's. Collective, whatever happens on any rank.

    Args:
        build: makes the plan; may raise.
        group: a group whose tensors live on the CPU.
        settings: what else must be equal on all ranks, one fact a line.

    Raises:
        ThinwireError: what `build` raised here.
        PlanError: what it raised elsewhere, or the first difference between plans.
    """
    plan, error = None, None
    try:
        plan = build()
        verdict = "\n".join([f"plan {plan.digest}", *settings])
    except Exception as raised:
        error = raised
        verdict = f"error {raised}"
    verdicts = all_gather_text(verdict, group)
    if error is not None:
        raise error
    assert plan is not None
    for rank, text in enumerate(verdicts):
        if text.startswith("error "):
            raise PlanError(f"rank {rank} could not be planned: {text.removeprefix('error ')}")
    if len(set(verdicts)) > 1:
        plans = [text.split("\n") for text in all_gather_text("\n".join([*settings, *plan.lines()]), group)]
        raise PlanError(
            f"ranks have different plans: {first_difference(plans)}; give every rank the same model, recipe and "
            "arguments"
        )
    return plan


def largest(value: float, driver: OverlappedDriver) -> float:
    """Return the largest of all ranks' values, which float32 must hold. Collective: an exchange of 4 bytes.

    Raises:
        Exception: what failed the exchange, or one before it.
    """
    number = torch.tensor([value], dtype=torch.float32)
    round_ = AllReduce(1, torch.float32, driver.control.size(), "max")

    def exchange() -> Exchange:
        yield Transfer(round_, number, number)

    driver.submit(exchange(), (round_,), "verdict").result()
    return float(number)
