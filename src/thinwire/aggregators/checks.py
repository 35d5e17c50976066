"""Which compressors may go with which feedback."""

from thinwire.compressors import Compressor, Contractive, Unbiased, needs_feedback
from thinwire.errors import RecipeError
from thinwire.feedback import EF21, ErrorFeedback, Feedback
from thinwire.spec import BlockSpec

TYPICAL = BlockSpec(shape=(65536,))


def check_feedback(compressor: Compressor, feedback: Feedback | None) -> None:
    """Raise `RecipeError` for a lossy kind without feedback, and for feedback that a kind diverges under."""
    contract = compressor.contract(TYPICAL)
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
    if isinstance(feedback, EF21) and not isinstance(contract, Contractive):
        raise RecipeError(
            f"{compressor.recipe()}: EF21 needs a contractive kind, and this one's contract is {contract}; pass "
            "feedback=ErrorFeedback()"
        )


def check_one_mask(up: Compressor, down: Compressor) -> None:
    """Raise `RecipeError` where both hops draw one mask and scale for what it leaves out: the mean would be biased."""
    if up.shared_key and down.shared_key and isinstance(down.contract(TYPICAL), Unbiased):
        raise RecipeError(
            f"{down.recipe()}: both hops share one mask, and what comes up is scaled for it already; expected it in "
            "one hop, as in 'gather/', or unscaled with feedback"
        )


def default_feedback(*compressors: Compressor) -> ErrorFeedback | None:
    """Return `ErrorFeedback()` where one of the kinds needs it, else None."""
    needed = any(needs_feedback(compressor.contract(TYPICAL)) for compressor in compressors)
    return ErrorFeedback() if needed else None


def feedback_suffix(feedback: Feedback | None, *compressors: Compressor) -> str:
    """Return `@` and the feedback's recipe where it is not the default for these kinds."""
    return "" if feedback is None or feedback == default_feedback(*compressors) else f"@{feedback.recipe()}"
