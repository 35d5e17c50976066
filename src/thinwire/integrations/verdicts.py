"""What is wrong with a step, in words, once its last message is done: asked and told alike on all ranks."""

import torch.distributed as dist

from thinwire.aggregators import MANY, MEAN
from thinwire.comm.process_group import all_gather_text
from thinwire.errors import LossScaleError, LostGradientError, NonFiniteError


def not_finite(nonfinite: list[tuple[int, str]], step: int) -> NonFiniteError:
    """Return the error for contributions to a step, (rank, parameter) each, that are not finite."""
    rank, name = nonfinite[0]
    where = {MEAN: "the mean over ranks", MANY: "several ranks"}.get(rank, f"rank {rank}")
    return NonFiniteError(
        f"the gradient of {name!r} on {where} holds inf or nan, or does not fit its wire dtype ({len(nonfinite)} "
        f"such contributions, step {step}); inf or nan was delivered on all ranks and the residuals kept. With mixed "
        "precision pass scaler=GradScaler to attach; otherwise look at the loss, or pass on_nonfinite='warn'"
    )


def scales_differ(loss_scale: float, step: int, control: dist.ProcessGroup | None) -> Exception:
    """Ask all ranks for their scales, now that no exchange is under way. Collective: all know of it."""
    try:
        scales = _of_all(loss_scale, control)
    except Exception as error:
        return error
    usual = max(scales.values(), key=list(scales.values()).count)
    others = ", ".join(f"{who} has {scale:g}" for who, scale in scales.items() if scale != usual)
    got = f"{usual:g} on most while {others}" if others else f"another than {usual:g}, which this rank has"
    return LossScaleError(
        f"expected GradScalers of one scale on all ranks, got {got}, in step "
        f"{step}: gradients are in different units; nothing was delivered and residuals kept. Give all "
        "scalers the same arguments, load the same scaler state everywhere, and call step() and update() alike"
    )


def lost(local_norm: float, step: int, control: dist.ProcessGroup | None) -> Exception | None:
    """Ask all ranks for the norms of what they gave, where nothing but zeros came back. Collective, like that."""
    try:
        norms = _of_all(local_norm, control)
    except Exception as error:
        return error
    given = ", ".join(f"{who}: {norm:.3g}" for who, norm in norms.items() if norm > 0)
    if not given:
        return None
    return LostGradientError(
        f"step {step} delivered zeros only, while gradients have norms of ({given}): they are too small for "
        "what the recipe sends, or cancel. Use a GradScaler, a larger loss, or a recipe with a scale, as int8"
    )


def _of_all(number: float, control: dist.ProcessGroup | None) -> dict[str, float]:
    """Return every rank's number; without a group, where ranks may be gone that would be waited for, this one's."""
    if control is None:
        return {"this rank": number}
    return {f"rank {rank}": float(text) for rank, text in enumerate(all_gather_text(repr(number), control))}
