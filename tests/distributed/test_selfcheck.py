"""`thinwire.selfcheck`: every rung holds on a healthy launch, and each is seen to fail where something is wrong."""

import os
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import thinwire
from thinwire.comm import process_group
from thinwire.errors import AttachError, RecipeError, ThinwireError
from thinwire.integrations.fsdp_collectives import WeightGather
from thinwire.ladder.climb import LADDER
from thinwire.ladder.training import Training, local
from thinwire.state import State

OPTIONS = thinwire.PlanOptions(min_nbytes=0, partition_numel=1024, node_sizes=2)
RECIPES = {  # and what does not apply
    "int8": {"conservation"},
    "topk:0.25": set(),
    "gather/onebit": set(),
    "sign": {"conservation", "parity"},
    "topk:0.05@ef21": {"conservation"},
    "topk:0.25@dgc": {"conservation", "parity"},
    "topkc:0.25": {"conservation"},
    "topkc:0.25:fp32": set(),
    "powersgd:2": {"resume"},
    "hier/int4": set(),
    "dense": set(),
}


def _made():
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, 48))

    def loss(model, step, rank):
        x = torch.randn(8, 48)
        return (model(x) - x.roll(1, dims=1)).square().mean()

    return model, loss


def _sharded():
    model, loss = _made()
    for layer in (model[0], model):
        fully_shard(layer)
    return model, loss


def _forgetful():
    """A loss that knows how often it was called, which no checkpoint says."""
    model, loss = _made()
    calls = []

    def counting(model, step, rank):
        calls.append(step)
        return loss(model, step, rank) * len(calls)

    return model, counting


def _by_process():
    model, loss = _made()
    return model, lambda model, step, rank: loss(model, step, rank) * (1 + os.getpid() * 1e-7)


def _checked(rank, world_size, recipe, factory=_made, **kwargs):
    kwargs = {"options": OPTIONS, "lr": 1.0, "timeout": 20.0, **kwargs}
    before = torch.random.get_rng_state()
    report = thinwire.selfcheck(factory, recipe, **kwargs)
    assert torch.equal(torch.random.get_rng_state(), before)
    return report


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_healthy_launch(ranks, recipe):
    # Parity takes most of the time; what is killed is below, and under a launcher in tests/cli.
    rungs = [name for name in LADDER if name != "parity" or recipe in ("int8", "topk:0.25", "sign", "topk:0.25@dgc")]
    rungs.remove("kill")
    world_size = 3 if recipe in ("int8", "powersgd:2", "hier/int4") else 2
    first, *others = ranks(world_size).run(_healthy, recipe, rungs)
    for rung in first.rungs:
        assert rung.verdict == ("not applicable" if rung.name in RECIPES[recipe] else "ok"), str(first)
        assert rung.sentence
    assert first.ok
    assert all(other.as_dict()["rungs"][0]["sentence"] == first.rungs[0].sentence for other in others)
    assert f"{recipe} on {world_size} ranks does what it promises here: " in str(first)


def _healthy(rank, world_size, recipe, rungs):
    return _checked(rank, world_size, recipe, rungs=rungs)


def _healthy_shards(rank, world_size):
    rungs = ["dense", "replicas", "conservation", "bytes", "resume"]  # the others: tests/cli, marked slow
    return _checked(rank, world_size, "topk:0.25", factory=_sharded, weights="int8", rungs=rungs)


def test_a_sharded_model(ranks):
    for report in ranks(3).run(_healthy_shards):
        assert [rung.verdict for rung in report.rungs] == ["ok"] * 5, str(report)
        by_name = {rung.name: rung for rung in report.rungs}
        assert by_name["dense"].sentence.startswith("'dense' gives FSDP2's own bits")
        assert by_name["replicas"].sentence.startswith("all ranks compute with the same")
        assert by_name["bytes"].numbers["weight_nbytes"] > 0


def _killed(rank, world_size, factory, kwargs):
    (rung,) = _checked(rank, world_size, "topk:0.25", factory=globals()[factory], rungs=["kill"], **kwargs).rungs
    return rung


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "kwargs", "verdict", "said"),
    [
        ("_made", {}, "ok", "new processes went on from what was saved with the same bits"),
        ("_sharded", {"weights": "int8"}, "ok", "rank 2's process was killed in step 3; the others noticed within"),
        ("_forgetful", {}, "failed", "does not go on as if nothing had happened: rank 0"),
        ("_by_process", {}, "not applicable", "another process trains to other bits before anything is killed"),
    ],
)
def test_what_killing_shows(ranks, factory, kwargs, verdict, said):
    for rung in ranks(3).run(_killed, factory, kwargs, timeout=100):
        assert rung.verdict == verdict, rung.sentence
        assert said in rung.sentence


def _early(rank, world_size):
    return _checked(rank, world_size, "topk:0.01", rungs=["parity"])


def test_a_recipe_that_still_owes_most_gets_no_verdict_on_its_loss(ranks):
    for report in ranks(2).run(_early):
        (rung,) = report.rungs
        assert rung.verdict == "not applicable"
        assert "of all gradients are still owed" in rung.sentence
        assert rung.numbers["share_owed"] > 0.25
        assert report.ok


def _diverging(rank, world_size):
    return _checked(rank, world_size, "int8", lr=1e25)


def test_an_error_is_said_without_its_stack(ranks):
    for report in ranks(2).run(_diverging):
        assert "NonFiniteError" in report.rungs[-1].sentence
        assert "At:" not in report.rungs[-1].sentence


def _without_loss(rank, world_size):
    return _checked(rank, world_size, "topk:0.25", factory=lambda: nn.Conv2d(3, 8, 5))


def test_a_model_without_a_loss_is_pulled_to_targets(ranks):
    for report in ranks(2).run(_without_loss):
        *others, kill = report.rungs
        assert [rung.verdict for rung in others] == ["ok"] * 6, str(report)
        assert kill.verdict == "not applicable"  # the factory has no name
        assert "another process cannot import the factory" in kill.sentence


# --- defects --------------------------------------------------------------------------------------------------------


@contextmanager
def _defect(kind, rank):
    """Break what one rung looks at, on one rank where that suffices."""
    step, saved, load, timed = Training.step, State.state_dict, State.load_state_dict, process_group._timed
    gather = WeightGather.__call__

    def perturbing(self, number):
        value = step(self, number)
        if rank == 1 and self.link is not None and number == 2:
            with torch.no_grad():
                local(self.module[3].weight).view(torch.int32)[4, 7] ^= 1
        return value

    def misreading(self, output_tensor, *args, **kwargs):
        gather(self, output_tensor, *args, **kwargs)
        if rank == 1:
            output_tensor.view(torch.int32)[5] ^= 1

    def forgetting(self):
        state = saved(self)
        if rank == 1:
            state["worker"]["3.weight"][0, 0] += 1e-3
        return state

    def miscounting(transfer, group, mesh, own_rank, outcome, name):
        timed(transfer, group, mesh, own_rank, outcome, name)
        if rank == 1:
            outcome.sent_nbytes += 8

    def idle(self, number):
        self.optimizer.param_groups[0]["lr"] *= self.link is None
        return step(self, number)

    def dropping(self, state, *, strict=True):
        load(self, state, strict=strict)
        if rank == 1:
            self.worker["0.weight"].zero_()

    with pytest.MonkeyPatch.context() as patch:
        match kind:
            case "dense" | "replicas":
                patch.setattr(Training, "step", perturbing)
            case "gathered":
                patch.setattr(WeightGather, "__call__", misreading)
            case "conservation":
                patch.setattr(State, "state_dict", forgetting)
            case "bytes":
                patch.setattr(process_group, "_timed", miscounting)
            case "parity":
                patch.setattr(Training, "step", idle)
            case "resume":
                patch.setattr(State, "load_state_dict", dropping)
        yield


def _broken(rank, world_size, kind):
    with _defect(kind, rank):
        return _checked(rank, world_size, "topk:0.25", rungs=[kind])


def _broken_shards(rank, world_size, kind):
    with _defect("gathered" if kind == "replicas" else kind, rank):
        return _checked(rank, world_size, "topk:0.25", factory=_sharded, weights="int8", rungs=[kind])


DEFECTS = {
    "dense": ["'dense' differs from DDP: rank 1", "'3.weight'", "first in step 2"],
    "replicas": ["'3.weight' (rank 0, 2 has one value; rank 1 another)"],
    "conservation": ["'3.weight': delivered + owed misses"],
    "bytes": ["rank 1: counted", "where its plan claims"],
    "parity": ["this recipe learns slower here"],
    "resume": ["the resumed run goes other ways", "'0.weight'", "first in step 3"],
}


@pytest.mark.parametrize("kind", DEFECTS)
def test_each_rung_can_fail(ranks, kind):
    for report in ranks(3).run(_broken, kind):
        (rung,) = report.rungs
        assert rung.verdict == "failed", rung.sentence
        assert not report.ok
        assert f"{kind} failed; do not train with it" in report.verdict
        for words in DEFECTS[kind]:
            assert words in rung.sentence


SHARD_DEFECTS = {
    "dense": ["'dense' differs from FSDP2: rank 1", "'3.weight'", "first in step 2"],
    "replicas": ["ranks compute with different parameters", "(rank 0, 2 has one value; rank 1 another)"],
    "conservation": ["'3.weight': delivered + owed misses"],
    "bytes": ["rank 1: counted", "where its plan claims"],
    "parity": ["this recipe learns slower here"],
    "resume": ["the resumed run goes other ways", "'0.weight'", "first in step 3"],
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in ("parity", "resume") else ()) for kind in SHARD_DEFECTS],
)
def test_each_rung_can_fail_of_a_sharded_model(ranks, kind):
    for report in ranks(3).run(_broken_shards, kind):
        (rung,) = report.rungs
        assert rung.verdict == "failed", rung.sentence
        for words in SHARD_DEFECTS[kind]:
            assert words in rung.sentence


# --- ranks that raise, and ranks that hang --------------------------------------------------------------------------


def _raising(rank, world_size, how):
    def factory():
        model, loss = _made()

        def failing(model, step, own_rank):
            if step == 3 and own_rank == 1:
                if how == "raise":
                    raise KeyError("no such batch")
                time.sleep(6)
            return loss(model, step, own_rank)

        return model, failing

    started = time.monotonic()
    report = _checked(rank, world_size, "int8", factory=factory, timeout=2.0)
    return report, time.monotonic() - started


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_rank_that_raises_or_hangs_is_a_failed_rung_and_no_hang(ranks, how):
    for report, seconds in ranks(2).run(_raising, how):
        assert [rung.verdict for rung in report.rungs] == ["failed"], str(report)
        assert seconds < 15
        if how == "raise":
            assert report.rungs[0].sentence == "rank 1: KeyError: 'no such batch'"


def _refused(rank, world_size):
    for recipe, kwargs, kind, words in [
        ("int9", {}, RecipeError, "int9"),
        ("auto", {}, RecipeError, "check dense, bf16, int8, int4"),
        (thinwire.Auto(candidates=("dense", "int8")), {}, RecipeError, "check dense, int8, its candidates"),
        ("int8", {"steps": 1}, ThinwireError, "at least 2 steps"),
        ("int8", {"rungs": ["denser"]}, ThinwireError, "denser"),
    ]:
        with pytest.raises(kind, match=words):
            _checked(rank, world_size, recipe, **kwargs)
    (first,) = _checked(rank, world_size, "int8", factory=lambda: "a model").rungs
    (second,) = _checked(rank, world_size, "int8", factory=lambda: fully_shard(nn.Linear(48, 48))).rungs
    (third,) = _checked(rank, world_size, "int8", weights="int8").rungs
    return first.sentence, second.sentence, third.sentence


def test_bad_arguments(ranks):
    for sentence, without_loss, weights in ranks(2).run(_refused):
        assert "expected the factory to return an nn.Module" in sentence
        assert "expected the factory of a fully_shard model to return (model, loss)" in without_loss
        assert "weights='int8' is for fully_shard models" in weights
    with pytest.raises(AttachError, match="init_process_group"):
        thinwire.selfcheck(_made, "int8")
