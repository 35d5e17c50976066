"""What is advised: the ranking, what pays, and what is said for nothing."""

import dataclasses as dc

import pytest

from thinwire.advisor.advise import RISKS, Candidate, advise, at_rate, risk_of, sweep
from thinwire.advisor.known import known_computation, listed_computation
from thinwire.advisor.probe import plan_for
from thinwire.advisor.profile import Cluster, Kernels, KernelSpeed, LinkClass, Profile
from thinwire.errors import ProfileError, RecipeError

KINDS = ("identity", "fp16", "int8", "int4", "topk:0.01")
RECIPES = ("int8", "int4", "topk:0.01")


def _profile(rate_bps: float, *, kernels: float = 1e-10, model: str = "resnet50/4", hosts: int = 4) -> Profile:
    computation, assumptions = known_computation(model, backward_s=0.05)
    speeds = tuple(
        KernelSpeed(recipe=kind, operation=operation, threads=1, s_per_nbyte=kernels)
        for kind in KINDS
        for operation in ("encode", "encode_feedback", "decode", "accumulate")
    )
    return Profile(
        cluster=Cluster(hosts=hosts, ranks_per_host=1, between=LinkClass(alpha_s=50e-6, beta=rate_bps / 8)),
        computation=computation,
        kernels=Kernels(cores=4, ranks_per_machine=1, speeds=speeds),
        model=model,
        assumptions=tuple(assumptions),
    )


def test_a_fast_network_needs_no_compression() -> None:
    report = advise(_profile(100e9), RECIPES)
    assert not report.pays
    assert report.best.recipe == "dense"
    assert report.verdict.startswith("No: ")
    assert next(plan for plan in report.plans if plan.recipe == "dense").reason.startswith("the exchange hides")


def test_a_slow_network_does_and_frequency_is_advised() -> None:
    report = advise(_profile(10e6), RECIPES)
    assert report.pays
    assert report.best.recipe == "topk:0.01"
    assert report.verdict.startswith("Yes: topk:0.01 ")
    assert any(sentence.startswith("synchronise less often: with topk:0.01") for sentence in report.free)
    assert any(sentence.startswith("accumulate: with 4 micro-batches") for sentence in report.free)


def test_slow_kernels_undo_it() -> None:
    report = advise(_profile(1e9, kernels=1e-7), RECIPES)
    assert report.best.recipe in ("dense", "dense:fp16")
    int8 = next(plan for plan in report.plans if plan.recipe == "int8")
    assert int8.speedup_vs_ddp < 1
    assert "but its kernels take" in int8.reason


def test_figures_agree_with_each_other() -> None:
    report = advise(_profile(100e6), RECIPES)
    assert [plan.step_s for plan in report.plans] == sorted(plan.step_s for plan in report.plans)
    by_recipe = {plan.recipe: plan for plan in report.plans}
    dense, half = by_recipe["dense"], min(by_recipe[name].step_s for name in ("dense:fp16", "fp16"))
    for plan in report.plans:
        assert plan.speedup_vs_ddp == pytest.approx(dense.step_s / plan.step_s)
        assert plan.speedup_vs_16bit == pytest.approx(half / plan.step_s)
        assert plan.step_s - plan.exposed_comm_s == pytest.approx(0.075)
    numel = sum(p.numel for p in _profile(1e9).computation.parameters)
    assert dense.wire_nbytes == pytest.approx(2 * 3 / 4 * 4 * numel, rel=1e-3)
    assert by_recipe["topk:0.01"].extra_memory_nbytes > by_recipe["int8"].extra_memory_nbytes == 0


def test_the_safest_of_equals_is_chosen() -> None:
    """At a rate at which everything hides but dense, 16 bits are enough."""
    report = advise(_profile(800e6), RECIPES)
    assert report.plans[0].step_s <= 0.95 * next(p.step_s for p in report.plans if p.recipe == "dense")
    assert report.best.risk == "low"


@pytest.mark.parametrize(
    ("recipe", "risk"),
    [("dense", "none"), ("dense:fp16", "low"), ("int8", "low"), ("int4", "medium"), ("topk:0.01", "high")],
)
def test_classes_of_risk(recipe: str, risk: str) -> None:
    profile = _profile(1e9)
    plan = plan_for(profile.computation, profile.cluster, recipe)
    assert plan is not None
    assert risk_of(plan) == risk
    assert risk in RISKS


def test_unmeasured_kinds_are_left_out_and_unknown_ones_refused() -> None:
    report = advise(_profile(1e9), ("onebit",))
    assert "measure it with thinwire probe" in report.left_out["onebit"]
    with pytest.raises(RecipeError, match="int9"):
        advise(_profile(1e9), ("int9",))


def test_steps_do_not_take_longer_on_faster_networks() -> None:
    profile = _profile(100e6)
    for points in sweep(profile, ["dense", "int8"], (0.25, 1.0, 4.0, 16.0)).values():
        seconds = [step_s for _, step_s in points]
        assert seconds == sorted(seconds, reverse=True)
    assert at_rate(profile, 2.0).cluster.between.beta == 2 * profile.cluster.between.beta


def test_a_candidate_needs_room_for_all_ranks() -> None:
    profile = _profile(1e9)
    cluster = dc.replace(profile.cluster, hosts=1000)
    with pytest.raises(ProfileError, match="no room for the contributions of 1000 ranks"):
        Candidate.of("global:4", dc.replace(profile, cluster=cluster))


def test_a_list_of_parameters_needs_a_time(tmp_path) -> None:
    path = tmp_path / "params.json"
    path.write_text('{"a": [3, 4], "b": [5]}')
    computation, assumptions = listed_computation(path, backward_s=0.17)
    assert [(p.name, p.ready_s) for p in computation.parameters] == [("a", 0.17), ("b", pytest.approx(0.05))]
    assert any("evenly" in sentence for sentence in assumptions)
    with pytest.raises(ProfileError, match="expected --backward TIME"):
        listed_computation(path, backward_s=None)
    path.write_text('{"a": 3}')
    with pytest.raises(ProfileError, match="a: expected a list of sizes"):
        listed_computation(path, backward_s=1.0)
