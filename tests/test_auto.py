"""The rules of auto alone: which candidate is tried next, which is skipped, which wins, and when to begin anew."""

import pytest
import torch

from thinwire import Auto, Dense, ErrorFeedback, PlanOptions, TwoShot
from thinwire.auto import NUM_ROUNDS, Pace, Trial, choose, read_auto
from thinwire.errors import PlanError, RecipeError
from thinwire.feedback import Slot
from thinwire.integrations import tuning
from thinwire.integrations.stats import StepStats
from thinwire.phases import build_phases
from thinwire.random import Key

NAMES = ("dense", "bf16", "int8", "int4")
NBYTES = [800, 400, 200, 100]


def tried(seconds_of, nbytes=NBYTES, codec_s=0.0):
    """Run a trial in which a step with candidate c takes `seconds_of(c)`; return it, and whose turns there were."""
    trial, turns = Trial(nbytes), []
    while (candidate := trial.candidate) is not None:
        turns.append(candidate)
        trial.add([seconds_of(candidate)] * 2, codec_s)
    return trial, turns


def on_a_wire(bytes_per_s, compute_s=1.0, codec_s=0.1):
    """Return seconds of a step that overlaps computing and a wire; all but dense encode."""
    return lambda c: max(compute_s, NBYTES[c] / bytes_per_s) + (codec_s if c else 0.0)


@pytest.mark.parametrize(
    ("bytes_per_s", "first_round", "winner"),
    [
        (1000.0, [3, 2, 1, 0], "dense"),  # nothing pays
        (700.0, [3, 2, 1, 0], "bf16"),
        (300.0, [3, 2, 1, 0], "int8"),
        (150.0, [3, 2, 1], "int4"),
        (10.0, [3, 2], "int4"),  # a slow network is spared the large ones
        (0.1, [3, 2], "int4"),
    ],
)
def test_the_fastest_wins(bytes_per_s, first_round, winner) -> None:
    trial, turns = tried(on_a_wire(bytes_per_s), codec_s=0.1)
    assert turns[: len(first_round)] == first_round
    assert sorted({*turns, *trial.bounds}) == [0, 1, 2, 3]
    assert NAMES[trial.choose()] == winner
    assert len(turns) <= NUM_ROUNDS * 4


def test_what_is_skipped_is_slower_than_its_bound() -> None:
    for rate in (0.1, 1.0, 10.0, 50.0, 100.0):
        seconds_of = on_a_wire(rate)
        trial, turns = tried(seconds_of, codec_s=0.1)
        assert not set(trial.bounds) & set(turns)
        for candidate, bound in trial.bounds.items():
            assert bound <= seconds_of(candidate) + 1e-9
            assert bound > 3 * min(trial.medians().values())


def test_equal_bytes_skip_nothing() -> None:
    trial, turns = tried(lambda c: 1.0 + c, nbytes=[100, 100, 100])
    assert sorted(set(turns)) == [0, 1, 2]
    assert trial.bounds == {}
    assert trial.choose() == 0


def test_only_what_is_near_is_tried_again() -> None:
    trial, turns = tried([1.0, 1.1, 1.3, 1.4].__getitem__)
    assert turns == [3, 2, 1, 0, *[1, 0] * (NUM_ROUNDS - 1)]
    assert {c: len(s) for c, s in trial.seconds.items()} == {3: 2, 2: 2, 1: 6, 0: 6}
    clear, turns = tried([1.0, 1.3, 1.3, 1.4].__getitem__)
    assert turns == [3, 2, 1, 0]
    assert clear.choose() == 0


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({0: [1.02, 1.02, 1.02], 1: [1.0, 1.0, 1.0]}, 0),  # always a tie
        ({0: [1.03, 1.03, 1.03], 1: [1.0, 1.0, 1.0]}, 1),
        ({0: [1.03, 0.98, 1.08], 1: [1.0, 0.95, 1.05]}, 0),  # within the noise
        ({0: [1.06, 0.5, 1.9], 1: [1.0, 0.4, 1.8]}, 1),  # never a tie, whatever the noise
        ({1: [1.0], 2: [1.01], 3: [1.02]}, 1),
        ({2: [2.0], 3: [1.0]}, 3),
        ({0: [0.0], 1: [0.0]}, 0),
    ],
)
def test_ties_go_to_what_loses_less(seconds, winner) -> None:
    assert choose(seconds) == winner


@pytest.mark.parametrize(
    ("step_s", "wire_s", "drift"),
    [
        (1.0, 1.0, 0),
        (1.2, 1.4, 0),
        (0.85, 0.7, 0),
        (1.3, 1.0, 1),
        (0.7, 1.0, -1),
        (1.0, 1.6, 1),  # still hidden behind computing, but for how long
        (1.0, 0.6, -1),
    ],
)
def test_drift_is_a_quarter_of_the_step_or_half_of_the_wire(step_s, wire_s, drift) -> None:
    assert Pace(1.0, 1.0).drift(Pace(step_s, wire_s)) == drift


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ("dense", "at least two candidates"),
        (["dense"], "at least two candidates"),
        (["dense", "int8", "int8"], "each once"),
        (["int8", "dense"], "'dense' first"),
        (["dense", "sign"], "cannot take turns"),
        (["dense", "topk:0.01@dgc"], "cannot take turns"),
        (["dense", "topk:0.01@ef21"], "cannot take turns"),
        (["dense", "int9"], "int9"),
        (["dense", 8], "expected recipes or Aggregators, got 8"),
        (["dense", "auto"], "stands alone"),
    ],
)
def test_bad_candidates_are_refused(candidates, message) -> None:
    with pytest.raises(RecipeError, match=message):
        Auto(candidates=candidates)


def test_auto_is_short_for_the_default() -> None:
    assert read_auto(" auto ") == Auto()
    assert Auto().names == NAMES
    assert read_auto("int8") == "int8"


OPTIONS = PlanOptions(partition_numel=200, min_nbytes=0)


def phases_of(recipe, **kwargs):
    params = [("weight", torch.zeros(30, 40)), ("bias", torch.zeros(30))]
    return build_phases(params, recipe, 3, OPTIONS, **kwargs)


def test_dense_is_the_all_reduce_and_what_it_leaves_is_settled_by_owners() -> None:
    phases = phases_of(Auto(candidates=("dense", "dense:fp16", "int8", "int4")), start_after=5)
    found = phases.candidates
    assert found is not None
    dense, half, int8, int4 = found.plans
    assert dense.is_dense
    assert half.is_dense
    assert phases.plans == ((0, dense), (5, int4))
    assert found.owing == (False, False, True, True)  # int8 delivers what int4 owes, and owes what it loses itself
    assert int8.by_name["weight"].aggregator.feedback == ErrorFeedback()
    settling = found.settling.by_name["weight"].aggregator
    assert isinstance(settling, TwoShot)
    assert not isinstance(settling, Dense)
    assert settling.feedback == ErrorFeedback()
    assert {Slot.WORKER, Slot.OWNER} <= phases.kept.by_name["weight"].slots
    owners = [[(p.offset, p.owner) for p in plan.by_name["weight"].partitions] for plan in (int8, int4, found.settling)]
    assert owners[0] == owners[1] == owners[2]


def test_no_candidate_of_ours_refuses_what_float32_holds() -> None:
    x = torch.tensor([3e38, -1e6, 1e-30, 0.0])
    for compressor in (kind for one in Auto().settings for kind in (one.up, one.down)):
        compressor.encode(x, Key(0, 0, 0, 0))  # raises what the range of the wire cannot hold


def test_all_candidates_are_agreed_on() -> None:
    fewer = phases_of(Auto(candidates=("dense", "int4")))
    assert fewer.digest != phases_of("auto").digest
    assert phases_of("auto").digest == phases_of(Auto()).digest


def test_candidates_that_cannot_follow_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="would never do"):
        phases_of(Auto(candidates=("dense", "powersgd:2", "int4")))
    with pytest.raises(PlanError, match="cannot deliver"):
        phases_of(Auto(candidates=("dense", "linear:5", "int4")))


def test_candidates_without_compression_keep_nothing() -> None:
    phases = phases_of(Auto(candidates=("dense", "dense:fp16")))
    assert all(plan.is_dense for plan in phases.all_plans)
    assert not any(param.slots for param in phases.kept.params)


# --- windows of steps -----------------------------------------------------------------------------------------------


class Two:
    """A group of two ranks, of which the other measures the same."""

    def size(self):
        return 2


def tuned(monkeypatch, seconds_of, steps):
    """Return the steps in which trials began and ended."""
    monkeypatch.setattr(tuning, "all_gather_text", lambda text, group: [text, text])
    candidates = phases_of(Auto(candidates=("dense", "int8", "int4"))).candidates
    tuner, changes, trying = tuning.Tuner(candidates, 0, 0, Two()), [], True
    for step in range(steps):
        plan = tuner.next_plan(step)
        if (tuner.state_dict()["chosen"] == "") != trying:
            trying = not trying
            changes.append((step, tuner.state_dict()["chosen"]))
        place = next((i for i, one in enumerate(candidates.plans) if one is plan), 0)
        seconds = seconds_of(step)[place]
        tuner.note(step, plan, seconds, StepStats(transport_s=seconds), delivered=True)
    return changes


FAST, SLOW = (1.0, 1.4, 1.4), (9.0, 2.0, 1.0)


def test_a_change_is_noticed_within_fifty_steps(monkeypatch) -> None:
    for change in range(30, 50):
        changes = tuned(monkeypatch, lambda step, change=change: SLOW if step >= change else FAST, 130)
        (first, _), (noticed, _), (_, chosen) = changes
        assert first == 10
        assert 30 <= noticed - change < 50
        assert chosen == "int4"


def test_a_burst_is_no_change(monkeypatch) -> None:
    for burst in range(10, 50):
        changes = tuned(
            monkeypatch, lambda step, burst=burst: (5.0, 5.0, 5.0) if burst <= step < burst + 19 else FAST, 160
        )
        assert changes == [(10, "dense")], burst


def test_after_a_trial_that_changed_nothing_it_takes_longer(monkeypatch) -> None:
    def seconds_of(step):
        return tuple((2.0 if step >= 30 else 1.0) * s for s in FAST) if step < 150 else SLOW

    changes = tuned(monkeypatch, seconds_of, 280)
    assert [chosen for _, chosen in changes] == ["dense", "", "dense", "", "int4"]
    (_, _), (noticed, _), (again, _), (second, _), _ = changes
    assert 30 <= noticed - 30 < 50
    assert again - noticed == 9
    assert 70 <= second - 150 < 90
