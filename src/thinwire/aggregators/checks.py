"""Which compressors may go with which feedback."""

from thinwire.compressors import Compressor, Contractive, Unbiased, needs_feedback
from thinwire.errors import RecipeError
from thinwire.feedback import ErrorFeedback
from thinwire.spec import BlockSpec

_TYPICAL = BlockSpec(shape=(65536,))


def check_feedback(compressor: Compressor, feedback: ErrorFeedback | None) -> None:
    """Raise `RecipeError` for a lossy kind without feedback, and for an unbiased kind with it."""
    contract = compressor.contract(_TYPICAL)
    if feedback is None and needs_feedback(contract):
        raise RecipeError(
            f"{compressor.recipe()}: its contract is {contract}, too weak to train without feedback; "
            "pass feedback=ErrorFeedback()"
        )
    if feedback is not None and isinstance(contract, Unbiased):
        raise RecipeError(
            f"{compressor.recipe()}: unbiased kinds diverge under error feedback unless scaled by 1/(1+omega); "
            "drop the feedback, or round to nearest"
        )


def check_one_mask(up: Compressor, down: Compressor) -> None:
    """Raise `RecipeError` where both hops draw one mask and scale for what it leaves out: the mean would be biased."""
    if up.shared_key and down.shared_key and isinstance(down.contract(_TYPICAL), Unbiased):
        raise RecipeError(
            f"{down.recipe()}: both hops share one mask, and what comes up is scaled for it already; expected it in "
            "one hop, as in 'gather/', or unscaled with feedback"
        )


def check_own_scale(compressor: Compressor, aggregator: str) -> None:
    """Raise `RecipeError` for kinds that wait for a statistic of all ranks, where nothing reduces it."""
    if compressor.statistic_reduction is not None:
        raise RecipeError(
            f"{compressor.recipe()}: its scale is agreed on by all ranks before they encode, which {aggregator} does "
            "not do; expected a kind with scales of its own, as 'int8' or 'natural:5'"
        )


def keeps_residual(compressor: Compressor, feedback: ErrorFeedback | None) -> bool:
    """Return whether this side has anything to remember: feedback is on and the compressor is not exact."""
    contract = compressor.contract(_TYPICAL)
    return feedback is not None and not (isinstance(contract, Contractive) and contract.delta == 1.0)
