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


def scales_differ(loss_scale: float, step: int, control: dist.ProcessGroup) -> Exception:
    """Ask all ranks for their scales, now that no exchange is under way. Collective: all know of it."""
    try:
        scales = [float(text) for text in all_gather_text(repr(loss_scale), control)]
    except Exception as error:
        return error
    usual = max(scales, key=scales.count)
    others = ", ".join(f"rank {rank} has {scale:g}" for rank, scale in enumerate(scales) if scale != usual)
    return LossScaleError(
        f"expected GradScalers of one scale on all ranks, got {usual:g} on most while {others}, in step "
        f"{step}: gradients are in different units; nothing was delivered and residuals kept. Give all "
        "scalers the same arguments, load the same scaler state everywhere, and call step() and update() alike"
    )


def lost(local_norm: float, step: int, control: dist.ProcessGroup) -> Exception | None:
    """Ask all ranks for the norms of what they gave, where nothing but zeros came back. Collective, like that."""
    try:
        norms = [float(text) for text in all_gather_text(repr(local_norm), control)]
    except Exception as error:
        return error
    given = ", ".join(f"rank {rank}: {norm:.3g}" for rank, norm in enumerate(norms) if norm > 0)
    if not given:
        return None
    return LostGradientError(
        f"step {step} delivered zeros only, while gradients have norms of ({given}): they are too small for "
        "what the recipe sends, or cancel. Use a GradScaler, a larger loss, or a recipe with a scale, as int8"
    )
