"""Error feedback's settings and units."""

import dataclasses
import math

import pytest

from thinwire import ErrorFeedback
from thinwire.compressors import Additive, Contractive, NoContract, Unbiased, needs_feedback
from thinwire.errors import RecipeError


def test_units() -> None:
    plain, corrected = ErrorFeedback(), ErrorFeedback(lr_correction=True)
    assert plain.unit_ratio() == 1.0
    assert plain.unit_ratio(lr=0.1, last_lr=0.3) == 1.0
    assert corrected.unit_ratio(lr=0.1, last_lr=0.3) == pytest.approx(3.0)
    assert corrected.unit_ratio(lr=0.0, last_lr=0.3) == 1.0
    assert corrected.unit_ratio(lr=0.1, last_lr=0.0) == 1.0
    for feedback in (plain, corrected):
        assert feedback.unit_ratio(loss_scale=1024.0, last_loss_scale=2048.0) == 0.5
    assert corrected.unit_ratio(lr=1.0, last_lr=2.0, loss_scale=8.0, last_loss_scale=2.0) == 8.0


def test_decay_is_no_unit() -> None:
    assert ErrorFeedback(decay=0.5).unit_ratio(loss_scale=4.0) == 4.0


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.0001, math.nan, math.inf])
def test_decay_out_of_range(decay: float) -> None:
    with pytest.raises(RecipeError, match=rf"decay in \(0, 1\], got {decay}"):
        ErrorFeedback(decay=decay)


def test_frozen() -> None:
    assert hash(ErrorFeedback()) == hash(ErrorFeedback(decay=1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ErrorFeedback().decay = 0.5  # type: ignore[misc]


def test_which_contracts_need_feedback() -> None:
    assert not needs_feedback(Unbiased(100.0))
    assert needs_feedback(NoContract("why"))
    assert needs_feedback(Additive(1e-3, None))
    assert needs_feedback(Contractive(0.899))
    assert not needs_feedback(Contractive(0.9))
    assert not needs_feedback(Contractive(1.0))
