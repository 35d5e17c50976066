"""The simulator against limits in which the answer is known, and the laws it must keep."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import profile_of

from thinwire.advisor.advise import Candidate
from thinwire.advisor.buckets import BUCKET_NBYTES, ddp_buckets
from thinwire.advisor.closed_forms import overlapped_s
from thinwire.advisor.collectives import ring_all_reduce_s, two_shot_s
from thinwire.advisor.probe import plan_for
from thinwire.advisor.profile import CollectiveFit, Overhead, Pair, Profile
from thinwire.advisor.simulate import ONE_STREAM, THINWIRE, Driving, Exchanged, Step, Stragglers, simulate
from thinwire.advisor.traffic import pair_nbytes, traffic
from thinwire.advisor.work import work
from thinwire.aggregators import NodePushPull, PushPull
from thinwire.errors import ProfileError
from thinwire.plan import build_plan
from thinwire.policy import PlanOptions

ONE = ((1024, 1024),)
MANY = ((512, 1024), (1024, 1024), (1024, 64), (64,), (2048, 1024), (300, 300))
RECIPES = (
    "dense",
    "dense:bf16",
    "int8",
    "topk:0.01",
    "gather/onebit",
    "powersgd:4",
    "global:8",
    "globalexp",
    "hier/int4",
)


def exchanged(profile: Profile, recipe: str, cap_nbytes: float | None = None) -> Exchanged:
    options = PlanOptions(node_sizes=profile.cluster.ranks_per_host, seed=1)
    tensors = profile.computation.named_tensors()
    plan = build_plan(tensors, recipe, profile.cluster.world_size, options)
    return Exchanged.of(plan, profile, bucket_cap_nbytes=cap_nbytes)


def run(profile: Profile, recipe: str, cap_nbytes: float | None = None, driving: Driving = THINWIRE) -> Step:
    return simulate(exchanged(profile, recipe, cap_nbytes), profile, driving=driving)


@pytest.mark.parametrize("hosts", [1, 2, 5, 64])
def test_one_all_reduce_and_no_compute_is_a_ring(hosts: int) -> None:
    profile = profile_of(ONE, hosts=hosts, forward_s=0.0, backward_s=0.0)
    expected = ring_all_reduce_s(4 * 2**20, hosts, profile.cluster.between)
    assert run(profile, "dense").exposed_s == pytest.approx(expected, rel=1e-6, abs=1e-12)
    halved = ring_all_reduce_s(2 * 2**20, hosts, profile.cluster.between)
    assert run(profile, "dense:bf16").exposed_s == pytest.approx(halved, rel=1e-6, abs=1e-12)


def test_one_two_shot_message_and_no_compute_is_a_scatter_and_a_gather() -> None:
    """16 slices for 4 owners: equal shares, but for a header of 8 bytes a block."""
    profile = profile_of(ONE, hosts=4, forward_s=0.0, backward_s=0.0)
    plan = build_plan(profile.computation.named_tensors(), "int8", 4)
    encoded = sum(p.aggregator.up.nbytes(p.spec) for param in plan.params for p in param.partitions)
    expected = two_shot_s(encoded, 4, profile.cluster.between)
    assert run(profile, "int8").exposed_s == pytest.approx(expected, rel=1e-4)


def test_one_owner_takes_in_what_all_others_send() -> None:
    """A single slice has one owner, and its interface 15 contributions: the incast that even shares hide."""
    profile = profile_of(((256, 256),), hosts=16, forward_s=0.0, backward_s=0.0, alpha_s=0.0)
    plan = build_plan(profile.computation.named_tensors(), "int8", 16)
    ((partition,),) = (param.partitions for param in plan.params)
    nbytes = partition.aggregator.up.nbytes(partition.spec)
    assert run(profile, "int8").exposed_s == pytest.approx(2 * 15 * nbytes / 1e8, rel=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_an_instant_network_leaves_compute_and_codec(recipe: str, ranks_per_host: int) -> None:
    """One core for backward and kernels, so that none of them hides behind the other."""
    instant = profile_of(
        MANY,
        hosts=4,
        ranks_per_host=ranks_per_host,
        alpha_s=0.0,
        beta=1e18,
        kernel_s_per_nbyte=2e-9,
        busy_cores=1.0,
        cores=1,
    )
    cluster = instant.cluster
    if cluster.inside is not None:
        inside = dataclasses.replace(cluster.inside, alpha_s=0.0, beta=1e18)
        instant = dataclasses.replace(instant, cluster=dataclasses.replace(cluster, inside=inside))
    step = run(instant, recipe)
    assert step.codec_s > 0 or recipe == "dense"
    if recipe in ("dense", "dense:bf16", "gather/onebit", "powersgd:4", "global:8"):  # ranks do the same
        assert step.exposed_s == pytest.approx(step.codec_s, rel=5e-3, abs=1e-9)
    else:  # and else wait for the busiest, message by message
        assert step.codec_s <= step.exposed_s * (1 + 1e-6)
        assert step.exposed_s < 2.5 * step.codec_s


def test_free_codec_hides_behind_compute_or_is_hidden_by_the_wire() -> None:
    """In buckets of one layer each, as in the closed form: max(backward, wire of all but the last), then the last."""
    shapes = ((1024, 1024),) * 6
    for beta in (1e6, 1e8, 1e9, 1e12):
        profile = profile_of(shapes, hosts=8, alpha_s=0.0, beta=beta, backward_s=0.6)
        step = run(profile, "dense", 4 * 2**20, driving=ONE_STREAM)
        comm_s = ring_all_reduce_s(4 * 2**20, 8, profile.cluster.between)
        # The first bucket is ready after a sixth of backward, which the closed form leaves out.
        upper = overlapped_s(0.6, [4 * 2**20] * 6, lambda _, seconds=comm_s: seconds) + 0.1
        lower = max(0.6, 0.1 + 6 * comm_s)
        assert lower - 1e-9 <= step.step_s - 0.11 <= upper + 1e-9


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks_per_host", [1, 4])
def test_bytes_are_those_of_the_rounds_and_none_is_lost(recipe: str, ranks_per_host: int) -> None:
    profile = profile_of(MANY, hosts=4, ranks_per_host=ranks_per_host)
    made = exchanged(profile, recipe)
    layouts = [layout for bucket in made.buckets for layout in made.plan.messages(bucket.names)]
    expected = np.sum([r.sent_nbytes_by_rank() for layout in layouts for r in layout.rounds], axis=0)
    np.testing.assert_array_equal(simulate(made, profile).sent_nbytes, expected)
    for layout in layouts:
        for r in layout.rounds:
            t = traffic(r, 4, ranks_per_host)
            assert t.out.sum() + t.out_inside.sum() == pytest.approx(t.sent.sum())
            assert t.into.sum() + t.into_inside.sum() == pytest.approx(t.sent.sum())


@settings(max_examples=40, deadline=None)
@given(
    recipe=st.sampled_from(RECIPES),
    beta=st.floats(1e6, 1e11),
    alpha_s=st.floats(0, 1e-2),
    faster=st.floats(1.0, 50.0),
    sooner=st.floats(0.0, 1.0),
    ranks_per_host=st.sampled_from([1, 2]),
)
def test_a_better_network_is_no_slower(
    recipe: str, beta: float, alpha_s: float, faster: float, sooner: float, ranks_per_host: int
) -> None:
    """With kernels that cost nothing: else an earlier arrival may interrupt what turns out to matter more."""
    worse = profile_of(MANY, hosts=4, ranks_per_host=ranks_per_host, beta=beta, alpha_s=alpha_s)
    between = dataclasses.replace(worse.cluster.between, beta=faster * beta, alpha_s=sooner * alpha_s)
    better = dataclasses.replace(worse, cluster=dataclasses.replace(worse.cluster, between=between))
    made = exchanged(worse, recipe, 2e6)
    assert simulate(made, better).step_s <= simulate(made, worse).step_s * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(recipe=st.sampled_from(RECIPES), beta=st.floats(1e6, 1e11), faster=st.floats(1.0, 50.0))
def test_with_kernels_a_faster_network_costs_at_most_what_they_take(recipe: str, beta: float, faster: float) -> None:
    worse = profile_of(MANY, hosts=4, beta=beta, kernel_s_per_nbyte=1e-9, busy_cores=1.0, cores=1)
    between = dataclasses.replace(worse.cluster.between, beta=faster * beta)
    better = dataclasses.replace(worse, cluster=dataclasses.replace(worse.cluster, between=between))
    made = exchanged(worse, recipe, 2e6)
    slow = simulate(made, worse)
    assert simulate(made, better).step_s <= slow.step_s + slow.codec_s


@settings(max_examples=25, deadline=None)
@given(recipe=st.sampled_from(RECIPES), beta=st.floats(1e6, 1e11), kernel=st.sampled_from([0.0, 1e-9]))
def test_a_step_takes_at_least_what_each_part_takes(recipe: str, beta: float, kernel: float) -> None:
    profile = profile_of(MANY, hosts=4, beta=beta, kernel_s_per_nbyte=kernel, busy_cores=1.0, cores=1)
    step = run(profile, recipe)
    assert step.step_s >= max(step.compute_s, step.wire_s, step.codec_s)
    assert step.exposed_s == pytest.approx(step.step_s - step.compute_s)
    busy = max(float(np.max(step.sent_nbytes)), 1.0) / beta
    assert step.wire_s >= busy * (1 - 1e-9)


def test_hosts_that_are_alike_are_simulated_once_with_the_same_result() -> None:
    """A pair no slower than others makes every host count."""
    profile = profile_of(MANY, hosts=6, kernel_s_per_nbyte=1e-9, busy_cores=1.0, cores=1)
    cluster = profile.cluster
    pair = Pair(source=0, target=1, alpha_s=cluster.between.alpha_s, beta=cluster.between.beta)
    each = dataclasses.replace(profile, cluster=dataclasses.replace(cluster, exceptions=(pair,)))
    for recipe in RECIPES:
        made = exchanged(profile, recipe)
        assert simulate(made, profile).step_s == pytest.approx(simulate(made, each).step_s, rel=1e-12)


def test_servers_on_the_ranks_hosts_cost_what_owners_do() -> None:
    """One a host: the same bytes both ways, but for the headers of frames; and the same work, in another process."""
    profile = profile_of(MANY, hosts=4, beta=1e7, kernel_s_per_nbyte=1e-9)
    plan = plan_for(profile.computation, profile.cluster, "servers:1/int8")
    assert plan is not None
    assert {type(param.aggregator) for param in plan.params} == {PushPull}
    served, owned = simulate(Exchanged.of(plan, profile), profile), run(profile, "int8")
    assert served.step_s == pytest.approx(owned.step_s, rel=0.02)
    assert served.codec_s == pytest.approx(owned.codec_s, rel=0.3)
    assert served.sent_nbytes.sum() == pytest.approx(owned.sent_nbytes.sum(), rel=0.01)
    layout = plan.messages(list(plan.by_name))[0]
    for one in layout.rounds:
        t = traffic(one, 4, 1)
        pairs = [[pair_nbytes(one, a, b, profile.cluster) for b in range(4)] for a in range(4)]
        assert t.out.tolist() == [sum(row) - row[a] for a, row in enumerate(pairs)]
        assert t.into.tolist() == [sum(row[b] for a, row in enumerate(pairs) if a != b) for b in range(4)]
    two = plan_for(profile.computation, profile.cluster, "servers:2/int8")
    assert two is not None
    assert simulate(Exchanged.of(two, profile), profile).wire_s == pytest.approx(served.wire_s, rel=0.3)
    odd = build_plan(profile.computation.named_tensors(), "int8", 4, PlanOptions(num_servers=3))
    with pytest.raises(ProfileError, match="as many servers on each of 4 hosts, got 3"):
        simulate(Exchanged.of(odd, profile), profile)


def test_more_is_under_way_through_servers_than_between_ranks() -> None:
    """Of forty messages on a network that takes its time and has room."""
    profile = profile_of([(1024, 1024)] * 40, alpha_s=0.05, beta=1e11)
    served, owned = (Candidate.of(recipe, profile).predict(profile, 8.0) for recipe in ("servers:1/int8", "int8"))
    assert served.exposed_s < 0.7 * owned.exposed_s


def test_leaders_of_nodes_exchange_for_all_their_ranks() -> None:
    """With a node on every host what crosses between hosts is what one rank a host would exchange through servers."""
    profile = profile_of(MANY, hosts=3, ranks_per_host=4, beta=1e7, kernel_s_per_nbyte=1e-9)
    plan = plan_for(profile.computation, profile.cluster, "servers:1/hier/int8")
    assert plan is not None
    assert {type(param.aggregator) for param in plan.params} == {NodePushPull}
    names = list(plan.by_name)
    single = profile_of(MANY, hosts=3)
    alone = plan_for(single.computation, single.cluster, "servers:1/int8")
    assert alone is not None
    for ours, theirs in zip(plan.messages(names), alone.messages(names), strict=True):
        for one, other in zip(ours.rounds[1:3], theirs.rounds, strict=True):
            t, expected = traffic(one, 3, 4), traffic(other, 3, 1)
            assert t.out == pytest.approx(expected.out, rel=1e-3)  # headers have bits for more ranks
            assert t.into == pytest.approx(expected.into, rel=1e-3)
            pairs = [[pair_nbytes(one, a, b, profile.cluster) for b in range(3)] for a in range(3)]
            assert t.out.tolist() == [sum(row) - row[a] for a, row in enumerate(pairs)]
            assert t.into.tolist() == [sum(row[b] for a, row in enumerate(pairs) if a != b) for b in range(3)]
        gather, spread = traffic(ours.rounds[0], 3, 4), traffic(ours.rounds[3], 3, 4)
        assert not any((*gather.out, *spread.out))
        assert [rank for rank in range(12) if spread.out_inside[rank]] == [0, 4, 8]
        before = work(ours, profile.kernels)
        assert [rank for rank in range(12) if before[0][rank]] == [1, 2, 3, 5, 6, 7, 9, 10, 11]
        assert [rank for rank in range(12) if before[1][rank]] == [0, 4, 8]
    step = simulate(Exchanged.of(plan, profile), profile)
    between = simulate(exchanged(profile, "hier/int8"), profile)
    assert step.wire_s == pytest.approx(between.wire_s, rel=0.3)
    assert step.step_s < run(profile, "int8").step_s


def test_one_slow_pair_slows_all() -> None:
    profile = profile_of(MANY, hosts=4)
    cluster = profile.cluster
    slow = Pair(source=2, target=3, alpha_s=0.0, beta=cluster.between.beta / 20)
    limping = dataclasses.replace(profile, cluster=dataclasses.replace(cluster, exceptions=(slow,)))
    for recipe in ("dense", "int8"):
        made = exchanged(profile, recipe)
        assert simulate(made, limping).exposed_s > 2 * simulate(made, profile).exposed_s


def test_what_was_measured_of_a_collective_counts() -> None:
    profile = profile_of(ONE, forward_s=0.0, backward_s=0.0)
    fit = CollectiveFit(operation="all_reduce", alpha_s=0.02, beta=5e7, cpu_s=0.5)
    cluster = dataclasses.replace(profile.cluster, collectives=(fit,))
    measured = dataclasses.replace(profile, cluster=cluster)
    sent = 2 * 3 / 4 * 4 * 2**20
    free = dataclasses.replace(fit, cpu_s=0.0)
    without = dataclasses.replace(measured, cluster=dataclasses.replace(cluster, collectives=(free,)))
    assert run(without, "dense").exposed_s == pytest.approx(0.02 + sent / 5e7)
    assert run(measured, "dense").exposed_s == pytest.approx(0.5), "the processor is slower than the wire"


@pytest.mark.parametrize("cores", [1, 8])
def test_fixed_costs_count_by_messages_rounds_and_buckets(cores: int) -> None:
    """Messages of two rounds in one bucket, on a network that takes no time; a dense one has none of the first."""
    free = profile_of(ONE, forward_s=0.0, backward_s=0.0, alpha_s=0.0, beta=1e30, cores=cores)
    overhead = Overhead(message_s=0.1, round_s=0.02, bucket_s=0.003, copy_s_per_nbyte=1e-9)
    profile = dataclasses.replace(free, overhead=overhead)
    ddp_s = 0.003 + 4 * 2**20 * 1e-9
    (messages,) = exchanged(profile, "int8", 1e9).messages
    assert run(profile, "int8", 1e9).exposed_s == pytest.approx(len(messages) * (0.1 + 2 * 0.02) + ddp_s)
    assert run(profile, "dense", 1e9, ONE_STREAM).exposed_s == pytest.approx(ddp_s)
    # With backward to hide behind, and a core to spare, all but the last bucket's do.
    computing = profile_of(MANY, backward_s=10.0, alpha_s=0.0, beta=1e30, cores=8)
    hidden = dataclasses.replace(computing, overhead=Overhead(message_s=0.1))
    last = exchanged(hidden, "int8", 1.0).messages[-1]
    assert run(hidden, "int8", 1.0).exposed_s == pytest.approx(0.1 * len(last))


def test_a_core_of_which_other_programs_have_a_part_is_as_slow_for_exchanges() -> None:
    """Backward got a quarter of it, so messages do."""
    shared = profile_of(ONE, forward_s=0.0, backward_s=0.0, alpha_s=0.0, beta=1e30, cores=1, busy_cores=0.25)
    profile = dataclasses.replace(shared, overhead=Overhead(message_s=0.1))
    (messages,) = exchanged(profile, "int8", 1e9).messages
    assert run(profile, "int8", 1e9).exposed_s == pytest.approx(4 * 0.1 * len(messages))
    own = dataclasses.replace(profile, kernels=dataclasses.replace(profile.kernels, cores=8))
    assert run(own, "int8", 1e9).exposed_s == pytest.approx(0.1 * len(messages)), "there are others to take"


def test_stragglers_are_drawn_alike_and_cost_time() -> None:
    profile = profile_of(MANY, hosts=16)
    made = exchanged(profile, "int8")
    late = Stragglers(mean=0.2, seed=3)
    steps = [simulate(made, profile, stragglers=late, step=step).step_s for step in range(5)]
    assert steps == [simulate(made, profile, stragglers=late, step=step).step_s for step in range(5)]
    assert len(set(steps)) == 5
    assert min(steps) > simulate(made, profile).step_s
    assert simulate(made, profile, stragglers=Stragglers(mean=0.0)).step_s == simulate(made, profile).step_s
    # The slowest of 16 exponentials is about 3.4 means late.
    factors = np.array([late.factors(16, step).max() for step in range(500)])
    assert factors.mean() == pytest.approx(1 + 0.2 * sum(1 / k for k in range(1, 17)), rel=0.05)


def test_thousands_of_ranks() -> None:
    profile = profile_of(((4096, 4096),) * 4, hosts=4096)
    for recipe in ("dense", "int8"):
        step = run(profile, recipe)
        assert step.sent_nbytes.shape == (4096,)
        assert step.step_s > step.compute_s
    in_nodes = profile_of(((4096, 4096),) * 4, hosts=512, ranks_per_host=8)
    assert run(in_nodes, "hier/int8").wire_s < run(in_nodes, "int8").wire_s / 7


def test_buckets_are_ddps() -> None:
    computation = profile_of(((1024, 1024),) * 20).computation
    buckets = ddp_buckets(computation)
    # 1 MiB is full with the first layer; 25 MiB with seven of 4 MiB each.
    assert [len(bucket.names) for bucket in buckets] == [1, 7, 7, 5]
    assert buckets[0].names == ("layer19.weight",)
    assert buckets[-1].names[-1] == "layer0.weight"
    assert [bucket.ready_s for bucket in buckets] == sorted(bucket.ready_s for bucket in buckets)
    assert all(bucket.nbytes >= BUCKET_NBYTES for bucket in buckets[1:-1])
    assert len(ddp_buckets(computation, 4 * 2**20)) == 20
    with pytest.raises(ProfileError, match="bucket cap"):
        ddp_buckets(computation, 0)


def test_what_does_not_fit_is_refused() -> None:
    profile = profile_of(MANY)
    with pytest.raises(ProfileError, match="expected a plan for 4 ranks, got one for 3"):
        Exchanged.of(build_plan(profile.computation.named_tensors(), "int8", 3), profile)
    with pytest.raises(ProfileError, match="another model"):
        Exchanged.of(build_plan(profile_of(ONE).computation.named_tensors(), "int8", 4), profile)
    with pytest.raises(ProfileError, match="expected how fast 'int2' does"):
        run(profile, "int2")
    with pytest.raises(ProfileError, match="expected a profile of 4 ranks, got one of 8"):
        simulate(exchanged(profile, "int8"), profile_of(MANY, hosts=8))
    with pytest.raises(ProfileError, match="stragglers"):
        Stragglers(mean=-1.0)
