"""Which compressors may go with which feedback."""

from thinwire.compressors import Compressor, Contract, Contractive, Sign, Unbiased, is_exact, needs_feedback
from thinwire.errors import RecipeError
from thinwire.feedback import EF21, ErrorFeedback, Feedback
from thinwire.spec import BlockSpec

_TYPICAL = {"slice": BlockSpec(shape=(65536,)), "matrix": BlockSpec(shape=(65536, 65536))}


def typical_contract(compressor: Compressor) -> Contract:
    """Return the contract for blocks that are neither short nor narrow, so that no rule hangs on one block's shape."""
    return compressor.contract(_TYPICAL[compressor.unit])


def owes_nothing(compressor: Compressor) -> bool:
    """Return whether nothing is to be made up for later: all arrives, or the mean over what is drawn does."""
    contract = typical_contract(compressor)
    return is_exact(contract) or isinstance(contract, Unbiased)


def check_feedback(compressor: Compressor, feedback: Feedback | None) -> None:
    """Raise `RecipeError` for a lossy kind without feedback, and for feedback that a kind diverges under."""
    contract = typical_contract(compressor)
    if feedback is None and needs_feedback(contract):
        raise RecipeError(
            f"{compressor.recipe()}: its contract is {contract}, too weak to train without feedback; "
            "pass feedback=ErrorFeedback()"
        )
    if feedback is not None and isinstance(contract, Unbiased) and not feedback.takes_unbiased:
        raise RecipeError(
            f"{compressor.recipe()}: unbiased kinds diverge under error feedback unless scaled by 1/(1+omega); "
            "drop the feedback, or scale it, as 'scaled:linear:3' is, or round to nearest"
        )
    if isinstance(feedback, EF21) and compressor.statistic_reduction is not None:
        raise RecipeError(
            f"{compressor.recipe()}: EF21 needs a contractive kind, and this one promises nothing of one rank alone; "
            "pass feedback=ErrorFeedback()"
        )
    if isinstance(feedback, EF21) and not isinstance(contract, Contractive):
        raise RecipeError(
            f"{compressor.recipe()}: EF21 needs a contractive kind, and this one's contract is {contract}; pass "
            "feedback=ErrorFeedback()"
        )


def check_one_mask(up: Compressor, down: Compressor) -> None:
    """Raise `RecipeError` where both hops draw one mask and scale for what it leaves out: the mean would be biased."""
    if up.shared_key and down.shared_key and isinstance(typical_contract(down), Unbiased):
        raise RecipeError(
            f"{down.recipe()}: both hops share one mask, and what comes up is scaled for it already; expected it in "
            "one hop, as in 'gather/', or unscaled with feedback"
        )


def default_feedback(*compressors: Compressor) -> ErrorFeedback | None:
    """Return `ErrorFeedback()` where one of the kinds needs it, else None."""
    needed = any(needs_feedback(typical_contract(compressor)) for compressor in compressors)
    return ErrorFeedback() if needed else None


def feedback_suffix(feedback: Feedback | None, *compressors: Compressor) -> str:
    """Return `@` and the feedback's recipe where it is not the default for these kinds."""
    return "" if feedback is None or feedback == default_feedback(*compressors) else f"@{feedback.recipe()}"


def check_votes(compressor: Compressor, feedback: Feedback | None) -> None:
    """Raise `RecipeError` for votes with feedback: what a rank sent is not what is delivered for it."""
    if feedback is not None:
        raise RecipeError(
            f"{compressor.recipe()}: a majority vote takes no feedback, got {feedback}; drop it, or use 'onebit', "
            "whose scale keeps the size of a gradient"
        )


def check_no_vote(compressor: Compressor, aggregator: str) -> None:
    """Raise `RecipeError` for signs without a scale."""
    if isinstance(compressor, Sign):
        raise RecipeError(
            f"{compressor.recipe()}: +1 and -1 say nothing of a gradient's size, and {aggregator} forms means, not "
            "majorities; expected 'onebit', or Gather(up=Sign()), which votes"
        )


def check_own_scale(compressor: Compressor, encoder: str) -> None:
    """Raise `RecipeError` for kinds that wait for a statistic of all ranks, where one encodes alone."""
    if compressor.statistic_reduction is not None:
        raise RecipeError(
            f"{compressor.recipe()}: its scale is agreed on by all ranks before they encode, not by {encoder}; "
            "expected a kind with scales of its own on the way back, as in 'terngrad:shared+terngrad'"
        )
