"""Local methods among the plans: by their own plans and rhythms, ranked with the others and not taken for them."""

import dataclasses

import pytest
from profiles import profile_of

from thinwire.advisor.advise import RISKS, advise
from thinwire.advisor.apart import Apart, simulate_apart
from thinwire.advisor.lines import cells
from thinwire.advisor.profile import Overhead, Profile
from thinwire.algorithms.planned import planned
from thinwire.errors import AttachError, ProfileError

LAYERS = ((1024, 1024),) * 4


def _apart(profile: Profile, kind: str = "diloco", recipe: str = "int8", every: int = 10, **settings: int) -> Apart:
    tensors = profile.computation.named_tensors()
    name = f"{kind}:{every}:{recipe}"
    return planned(name, kind, recipe, tensors, profile.cluster.world_size, sync_every=every, **settings)


def test_what_is_not_overlapped_costs_its_share_of_every_step() -> None:
    profile = profile_of(LAYERS, beta=1e7)
    ten, hundred = (simulate_apart(_apart(profile, every=every), profile) for every in (10, 100))
    assert ten.step_s == pytest.approx(profile.computation.compute_s + ten.exposed_s)
    assert ten.exposed_s == pytest.approx(10 * hundred.exposed_s)
    assert ten.sent_nbytes.tolist() == pytest.approx([10 * sent for sent in hundred.sent_nbytes])
    plan = _apart(profile).plan
    assert ten.sent_nbytes[0] * 10 == pytest.approx(plan.sent_nbytes(0), rel=1e-3)
    # At 10 MB/s the wire decides: all the bytes of one exchange, once in ten steps.
    assert ten.exposed_s * 10 == pytest.approx(plan.busiest_nbytes / 1e7, rel=0.05)


def test_steps_that_go_on_hide_an_exchange_up_to_what_they_take() -> None:
    profile = profile_of(LAYERS, beta=1e7)
    waits, some, all_of_it = (
        simulate_apart(_apart(profile, "streaming", every=20, fragments=4, overlap=overlap), profile)
        for overlap in (0, 1, 10)
    )
    one_s, each_s = profile.computation.compute_s, waits.exposed_s * 20 / 4
    assert some.exposed_s * 20 == pytest.approx(4 * max(each_s - one_s, 0.0), abs=1e-3)
    assert waits.exposed_s > some.exposed_s >= all_of_it.exposed_s == pytest.approx(0.0, abs=1e-9)


def test_fixed_costs_count_here_too() -> None:
    profile = profile_of(LAYERS, beta=1e30, alpha_s=0.0)
    costly = dataclasses.replace(profile, overhead=Overhead(message_s=0.1, bucket_s=7.0))
    apart = _apart(profile)
    messages = len(apart.plan.messages(apart.parts[0]))
    assert simulate_apart(apart, costly).exposed_s == pytest.approx(0.1 * messages / 10)


def test_they_are_ranked_but_the_best_exchanges_in_every_step() -> None:
    profile = profile_of(LAYERS, beta=1e6)
    report = advise(profile, ("int8",), apart=[_apart(profile, every=every) for every in (10, 100)])
    assert [plan.step_s for plan in report.plans] == sorted(plan.step_s for plan in report.plans)
    assert report.plans[0].recipe == "diloco:100:int8"
    assert report.best.recipe == "int8"
    assert {plan.recipe for plan in report.every_step} == {"dense", "dense:fp16", "fp16", "int8"}
    assert "If ranks may train apart for 100 steps, diloco:100:int8 takes" in report.verdict
    by_name = {plan.recipe: plan for plan in report.plans}
    ten, hundred = by_name["diloco:10:int8"], by_name["diloco:100:int8"]
    assert (ten.risk, hundred.risk) == ("medium", "high")
    assert RISKS.index(ten.risk) > RISKS.index(by_name["int8"].risk)
    assert ten.extra_memory_nbytes == 12 * 4 * 2**20
    assert cells(ten)[1] == "-"
    assert "exchanges the model once in 10 steps" in ten.reason
    assert ten.wire_nbytes == pytest.approx(by_name["int8"].wire_nbytes / 10, rel=0.01)


def test_where_the_network_is_fast_they_are_not_recommended() -> None:
    profile = profile_of(LAYERS, beta=1e12)
    assert "train apart" not in advise(profile, ("int8",), apart=[_apart(profile)]).verdict


def test_what_cannot_be_is_said() -> None:
    profile = profile_of(LAYERS)
    with pytest.raises(AttachError, match="fragments: expected 1 to 4"):
        _apart(profile, "streaming", fragments=5)
    with pytest.raises(AttachError, match="overlap: expected 0 to 9"):
        _apart(profile, "streaming", fragments=2, overlap=10)
    with pytest.raises(ProfileError, match="expected how fast 'e3m0' does"):
        simulate_apart(_apart(profile, recipe="e3m0"), profile)
    report = advise(profile, ("int8",), apart=[_apart(profile, recipe="e3m0")])
    assert "measure it with thinwire probe" in report.left_out["diloco:10:e3m0"]
