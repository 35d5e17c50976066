"""Which compressors may go with which feedback."""

from thinwire.compressors import Compressor, Contract, Contractive, Unbiased, needs_feedback
from thinwire.errors import RecipeError
from thinwire.feedback import ErrorFeedback
from thinwire.spec import BlockSpec

_TYPICAL = {"slice": BlockSpec(shape=(65536,)), "matrix": BlockSpec(shape=(65536, 65536))}


def typical_contract(compressor: Compressor) -> Contract:
    """Return the contract for blocks that are neither short nor narrow, so that no rule hangs on one block's shape."""
    return compressor.contract(_TYPICAL[compressor.unit])


def check_feedback(compressor: Compressor, feedback: ErrorFeedback | None) -> None:
    """Raise `RecipeError` for a lossy kind without feedback, and for an unbiased kind with it."""
    contract = typical_contract(compressor)
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
    if up.shared_key and down.shared_key and isinstance(typical_contract(down), Unbiased):
        raise RecipeError(
            f"{down.recipe()}: both hops share one mask, and what comes up is scaled for it already; expected it in "
            "one hop, as in 'gather/', or unscaled with feedback"
        )


def keeps_residual(compressor: Compressor, feedback: ErrorFeedback | None) -> bool:
    """Return whether this side has anything to remember: feedback is on and the compressor is not exact."""
    contract = typical_contract(compressor)
    return feedback is not None and not (isinstance(contract, Contractive) and contract.delta == 1.0)
