"""What is said of a step whose other ranks cannot be asked, as they may be gone."""

from thinwire.errors import LossScaleError, LostGradientError
from thinwire.integrations.verdicts import lost, scales_differ


def test_scales_that_differ() -> None:
    error = scales_differ(4.0, 7, None)
    assert isinstance(error, LossScaleError)
    assert "on all ranks, got another than 4, which this rank has, in step 7" in str(error)


def test_gradients_that_are_lost() -> None:
    error = lost(0.25, 50, None)
    assert isinstance(error, LostGradientError)
    assert "while gradients have norms of (this rank: 0.25)" in str(error)
    assert lost(0.0, 50, None) is None
