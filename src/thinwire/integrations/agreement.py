"""Before the first byte: all ranks either agree on the plan, or all raise, with the first difference named."""

from collections.abc import Callable

import torch.distributed as dist

from thinwire.comm.process_group import all_gather_text
from thinwire.errors import PlanError
from thinwire.plan import Plan, first_difference


def agree(build: Callable[[], Plan], group: dist.ProcessGroup) -> Plan:
    """Build the plan on this rank and compare it with every other rank's. Collective, whatever happens on any rank.

    Args:
        build: makes the plan; may raise.
        group: a group whose tensors live on the CPU.

    Raises:
        ThinwireError: what `build` raised here.
        PlanError: what it raised elsewhere, or the first difference between plans.
    """
    plan, error = None, None
    try:
        plan = build()
        verdict = f"plan {plan.digest}"
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
        plans = [text.split("\n") for text in all_gather_text("\n".join(plan.lines()), group)]
        raise PlanError(
            f"ranks have different plans: {first_difference(plans)}; give every rank the same model and recipe"
        )
    return plan
