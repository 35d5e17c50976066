"""auto at work: alike on all ranks, nothing lost on the way, plain DDP where nothing pays, resumed to the bit.

What steps take is made up here, so that the choices are known; the rules themselves are tested in tests/test_auto.py.
"""

import contextlib
import logging

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded

import thinwire
from thinwire import Auto
from thinwire.errors import AttachError, PlanError, StateError
from thinwire.integrations.stats import StepStats
from thinwire.integrations.tuning import Tuner

EXACT = Auto(candidates=("dense", "int8", "int4"))  # all that is lost is owed
DENSE_WINS, INT4_WINS, DENSE_WINS_FASTER = (1.0, 1.1, 1.2), (9.0, 2.0, 1.0), (0.5, 0.55, 0.6)
LENGTH = 4 + 8 * 3  # steps of a trial in which all three candidates stay near each other


@contextlib.contextmanager
def paced(seconds_of):
    """Let steps take `seconds_of(step)[candidate]`, inside collectives too."""
    note = Tuner.note

    def pretend(self, step, plan, seconds, stats, *, delivered):
        plans = self._candidates.plans
        candidate = next((i for i, one in enumerate(plans) if one is plan), 0)
        seconds = seconds_of(step)[candidate]
        note(self, step, plan, seconds, StepStats(transport_s=seconds), delivered=delivered)

    Tuner.note = pretend
    try:
        yield
    finally:
        Tuner.note = note


@contextlib.contextmanager
def heard():
    """Collect what is logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def recipe_of(link):
    return link.plan.by_name["layers.0.weight"].aggregator.recipe()


def owed(link):
    """Return the squared norm of all that this rank keeps."""
    return sum(float(tensor.square().sum()) for tensor in link.state.tensors())


# --- choosing -------------------------------------------------------------------------------------------------------


def _changing(rank, world_size):
    """Dense is fastest until step 40, then int4, and from step 100 on dense again."""
    model = DDP(seeded(Tower, 24, 3), bucket_cap_mb=0.003)
    plain = DDP(seeded(Tower, 24, 3), bucket_cap_mb=0.003)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, exact = [], []
    with (
        heard() as lines,
        paced(lambda step: DENSE_WINS if step < 40 else INT4_WINS if step < 100 else DENSE_WINS_FASTER),
        attached(model, EXACT, check_replicas_every=10) as link,
    ):
        ledger = Ledger(model, link)
        for step in range(170):
            plain.load_state_dict(model.state_dict())
            plain.zero_grad()
            x = batch(rank, step, width=24)
            ledger.expect(loss(model.module, x))
            optimizer.zero_grad()
            loss(model, x).backward()
            ledger.got()
            loss(plain, x).backward()
            seen.append(recipe_of(link))
            exact.append(digest(gradients(model)) == digest(gradients(plain)))
            optimizer.step()
            if step % 40 == 0:
                assert ledger.error() < 3e-6, step
            if step > 1:
                assert link.stats()["wire_nbytes"] == link.planned_nbytes(), step
            link.stats(reset=True)
        assert ledger.error() < 3e-6
        assert owed(link) == 0.0
        return seen, exact, [line for line in lines if "auto" in line], digest(model.parameters())


def test_changes_are_noticed_and_nothing_is_lost(ranks):
    """Through two changes of the network; and in between, where nothing pays, each gradient has DDP's own bits."""
    results = ranks(2).run(_changing)
    seen, exact, lines, parameters = results[0]
    assert (results[1][0], results[1][1], results[1][3]) == (seen, exact, parameters)
    assert results[1][2] == []  # rank 0 speaks
    assert ["chose" in line for line in lines] == [True, False, True, False, True]
    chosen = [line.split("chose ")[1].split(":")[0] for line in lines if "chose" in line]
    assert chosen == ["dense", "int4", "dense"]
    first, noticed, second, again, third = (int(line.split(":")[0].removeprefix("step ")) for line in lines)
    assert 40 < noticed < 140
    assert first == LENGTH
    assert 100 < again < 200
    for begin, end, recipe in ((first, noticed, "dense"), (second, again, "int4"), (third, 170, "dense")):
        assert set(seen[begin:end]) == {recipe}, (begin, end)
    assert all(exact[first + 1 : noticed])  # the first step settles what is owed
    assert not exact[first]
    assert all(exact[third + 1 :])
    assert "dense takes 1000.0 ms, int8 takes 1100.0 ms, int4 takes 1200.0 ms" in lines[0]
    assert "dense was skipped, at least" in lines[2]


def _measured(rank, world_size):
    """Choose by what steps take, whatever that is."""
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with heard() as lines, attached(model, "auto", start_after=3) as link:
        for step in range(45):
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
            if step == 2:
                assert owed(link) == 0.0
        return recipe_of(link), link.state_dict()["auto"], digest(gradients(model)), lines


def test_ranks_choose_alike_by_what_they_measure(ranks):
    results = ranks(3).run(_measured)
    assert all(result[:3] == results[0][:3] for result in results)
    assert results[0][1]["chosen"] in Auto().names
    assert all(seconds > 0 for seconds in results[0][1]["pace"])
    assert sum("auto chose" in line for line in results[0][3]) == 1


def _alone(rank, world_size):
    models = [DDP(seeded(Tower)) for _ in range(2)]
    with attached(models[0], "auto") as link:
        for step in range(3):
            for model in models:
                model.zero_grad()
                loss(model, batch(rank, step)).backward()
            assert digest(gradients(models[0])) == digest(gradients(models[1]))
        return recipe_of(link)


def test_alone_there_is_nothing_to_try(ranks):
    assert ranks(1).run(_alone) == ["dense"]


def _uneven(rank, world_size):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with paced(lambda step: DENSE_WINS), attached(model, EXACT), model.join():
        for step in range(20 + 12 * rank):
            optimizer.zero_grad()
            with model.no_sync() if step % 3 == 0 else contextlib.nullcontext():
                loss(model, batch(rank, step)).backward()
            optimizer.step()
    return digest(model.parameters())


def test_uneven_inputs_and_no_sync(ranks):
    results = ranks(2).run(_uneven)
    assert results[0] == results[1]


# --- steps that do not count ----------------------------------------------------------------------------------------


class FixedScaler:
    """A scaler whose scale the test sets."""

    def __init__(self):
        self.scale = 4.0

    def get_scale(self):
        return self.scale


def _skipped(rank, world_size):
    """The step that settles what is owed is skipped twice, and the scale changes between."""
    model, scaler = DDP(seeded(Tower), bucket_cap_mb=0.01), FixedScaler()
    with paced(lambda step: DENSE_WINS), attached(model, EXACT, scaler=scaler) as link:
        ledger, skipped = Ledger(model, link), 0
        for step in range(LENGTH + 5):
            bad = link.state.step == LENGTH and skipped < 2
            x = batch(rank, step)
            if not bad:
                ledger.expect(loss(model.module, x))
            model.zero_grad()
            value = loss(model, x) * scaler.scale
            (value * float("inf") if bad and rank == 1 else value).backward()
            if bad:
                skipped += 1
                assert owed(link) > 0
            else:
                ledger.got(scaler.scale)
            scaler.scale *= 0.5 if step % 2 else 2.0
        assert link.skipped_steps == skipped == 2
        assert owed(link) == 0.0
        return ledger.error()


def test_a_skipped_step_settles_nothing(ranks):
    assert max(ranks(2).run(_skipped)) < 3e-6


# --- resume ---------------------------------------------------------------------------------------------------------


def _run(rank, wins, steps, folder, *, save=False, load=False):
    model = DDP(seeded(Tower, seed=1 if load else 0), bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with paced(lambda step: wins), attached(model, EXACT) as link:
        if load:
            state = torch.load(f"{folder}/{rank}.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            link.load_state_dict(state["thinwire"])
        for step in steps:
            optimizer.zero_grad()
            loss(model, batch(rank, step)).backward()
            optimizer.step()
        state = link.state_dict()
        if save:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "thinwire": state}
            torch.save(saved, f"{folder}/{rank}.pt")
        kept = [t for slot in ("worker", "owner") for _, t in sorted(state[slot].items())]
        return digest([*model.parameters(), *kept]), state["auto"]


def _whole(rank, world_size, wins, cut, folder):
    return _run(rank, wins, range(cut + 8), folder)


def _first(rank, world_size, wins, cut, folder):
    return _run(rank, wins, range(cut), folder, save=True)


def _second(rank, world_size, wins, cut, folder, more=8):
    return _run(rank, wins, range(cut, cut + more), folder, load=True)


@pytest.mark.parametrize(("wins", "cut", "chosen"), [(DENSE_WINS, LENGTH + 1, "dense"), (INT4_WINS, 10, "int4")])
def test_resume_is_bit_for_bit_once_chosen(ranks, tmp_path, wins, cut, chosen):
    """Two ranks: sums have one order."""
    whole = ranks(2).run(_whole, wins, cut, str(tmp_path))
    first = ranks(2).run(_first, wins, cut, str(tmp_path))
    assert [(state["chosen"], state["owes"]) for _, state in first] == [(chosen, chosen == "int4")] * 2
    assert ranks(2).run(_second, wins, cut, str(tmp_path)) == whole


def test_a_trial_that_was_not_over_begins_anew(ranks, tmp_path):
    first = ranks(2).run(_first, DENSE_WINS, 7, str(tmp_path))
    assert [state["chosen"] for _, state in first] == ["", ""]
    results = ranks(2).run(_second, DENSE_WINS, 7, str(tmp_path), LENGTH + 2)
    assert [state["chosen"] for _, state in results] == ["dense", "dense"]


def _states(rank, world_size):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with paced(lambda step: DENSE_WINS), attached(model, EXACT) as link:
        fresh = link.state_dict()
        for step in range(LENGTH + 2):
            loss(model, batch(rank, step)).backward()
        state = link.state_dict()
        with pytest.raises(StateError, match="saved without auto"):
            link.load_state_dict({key: value for key, value in state.items() if key != "auto"})
        with pytest.raises(StateError, match=r"saved with the candidates \['dense'\]"):
            link.load_state_dict({**state, "auto": {**state["auto"], "candidates": ["dense"]}})
        link.load_state_dict(state if rank else fresh)
        with pytest.raises(PlanError, match="step"):
            loss(model, batch(rank, 0)).backward()
    with attached(DDP(seeded(Tower)), "int4") as link, pytest.raises(StateError, match="saved with auto"):
        link.load_state_dict(state)
    states = [state, {**state, "rank": 1 - rank}]
    assert [one["auto"] for one in thinwire.reshard_state(states, 3)] == [state["auto"]] * 3
    with pytest.raises(StateError, match="have not chosen the same"):
        thinwire.reshard_state([state, {**states[1], "auto": {**state["auto"], "chosen": "int4"}}], 3)


def test_states_that_do_not_fit_are_refused(ranks):
    ranks(2).run(_states)


# --- what cannot be -------------------------------------------------------------------------------------------------


def _refused(rank, world_size):
    with pytest.raises(AttachError, match="Auto: not supported with servers"):
        thinwire.attach(DDP(seeded(Tower)), "auto", servers=["tcp://127.0.0.1:1"], options=ALL)
    model = seeded(Tower)
    with pytest.raises(AttachError, match="Auto: expected one recipe, or patterns; local methods"):
        thinwire.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), "auto", sync_every=2)


def test_places_without_auto_say_so(ranks):
    ranks(1).run(_refused)
