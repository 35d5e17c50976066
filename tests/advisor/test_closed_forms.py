"""The closed forms against figures of the papers, or worked out from them by hand."""

import math

import pytest

from thinwire.advisor.closed_forms import (
    clan_ideal_scaling,
    cut,
    global_qsgd_limit,
    gossip_gain,
    headroom_s,
    ideal_compressor_s,
    power_sgd_nbytes,
    power_sgd_s,
    required_ratio,
    sign_vote_s,
    sync_sgd_s,
    top_k_s,
    trade_off_s,
)
from thinwire.advisor.collectives import (
    all_gather_s,
    all_to_all_s,
    gossip_s,
    halving_all_reduce_s,
    parameter_server_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
    two_shot_s,
)
from thinwire.advisor.profile import LinkClass
from thinwire.errors import ProfileError
from thinwire.shapes import model_layers

GBIT = 1e9 / 8


def shapes_of(model: str) -> list[tuple[int, ...]]:
    return [shape for layer in model_layers(model) for _, shape in layer.parameters]


def link(gbit: float, alpha_s: float = 10e-6) -> LinkClass:
    return LinkClass(alpha_s=alpha_s, beta=gbit * GBIT)


# Vogels et al.'s method on the models of Agarwal et al.: MB of P and of Q, and the ratio with vectors sent whole.
@pytest.mark.parametrize(
    ("model", "rank", "p_mb", "q_mb", "ratio"),
    [
        ("resnet50", 4, 0.441, 0.879, 66.5),
        ("resnet50", 8, None, None, 35.8),
        ("resnet50", 16, None, None, 18.6),
        ("resnet101", 4, 0.859, 1.854, 56.8),
        ("resnet101", 8, None, None, 30.5),
        ("resnet101", 16, None, None, 15.8),
        ("bert-base", 4, 1.836, 1.376, 118),
        ("bert-base", 8, None, None, 63.5),
        ("bert-base", 16, None, None, 32.9),
        ("bert-large", 4, None, None, 150),
    ],
)
def test_power_sgd_sends_factors_of_the_known_sizes(
    model: str, rank: int, p_mb: float | None, q_mb: float | None, ratio: float
) -> None:
    shapes = shapes_of(model)
    p, q, dense = power_sgd_nbytes(shapes, rank)
    if p_mb is not None:
        # 6.1 KB of slack for BERT: the figure takes four factors of its table of two segments, which has rank 2.
        assert p / 1e6 == pytest.approx(p_mb, abs=6e-4)
        assert q / 1e6 == pytest.approx(q_mb, abs=6e-3 if model == "bert-base" else 6e-4)
    total = 4 * sum(math.prod(shape) for shape in shapes)
    assert total / (p + q + dense) == pytest.approx(ratio, rel=5e-3)


@pytest.mark.parametrize(("model", "total_mb", "vectors_mb"), [("resnet50", 102.2, 0.216), ("resnet101", 178.2, 0.425)])
def test_vectors_of_resnets_are_of_the_known_size(model: str, total_mb: float, vectors_mb: float) -> None:
    shapes = shapes_of(model)
    assert 4e-6 * sum(math.prod(shape) for shape in shapes) == pytest.approx(total_mb, abs=0.05)
    assert power_sgd_nbytes(shapes, 4)[2] / 1e6 == pytest.approx(vectors_mb, abs=6e-4)


# Agarwal et al.'s model of ResNet-50 (97.5 MB in buckets of 25), alpha 10 us, 64 GPUs, gamma 1.07, T_comp 122 ms, and
# PowerSGD of rank 4 that takes 45 ms to encode and decode.
T_COMP, GPUS, NBYTES = 0.122, 64, 97.5e6


def synchronous(gbit: float) -> float:
    return sync_sgd_s(T_COMP, NBYTES, GPUS, link(gbit), bucket_nbytes=25e6, gamma=1.07)


def low_rank(gbit: float) -> float:
    return power_sgd_s(T_COMP, 0.045, 0.441e6, 0.879e6, GPUS, link(gbit))


@pytest.mark.parametrize(
    ("gbit", "synchronous_ms", "low_rank_ms"),
    [(1, 1541, 191), (4, 389, 175), (8, 197, 172), (10, 167, 172), (25, 146, 170)],
)
def test_worked_example_of_synchronous_and_low_rank_training(
    gbit: float, synchronous_ms: float, low_rank_ms: float
) -> None:
    assert 1e3 * synchronous(gbit) == pytest.approx(synchronous_ms, abs=0.8)
    assert 1e3 * low_rank(gbit) == pytest.approx(low_rank_ms, abs=1.5)


def test_low_rank_stops_paying_near_9_4_gigabit() -> None:
    crossing = next(g / 100 for g in range(100, 2500) if synchronous(g / 100) < low_rank(g / 100))
    assert crossing == pytest.approx(9.4, rel=0.03)
    # Where it pays, codec and bytes take less than the head-room.
    for gbit in (crossing - 1, crossing + 1):
        spent = low_rank(gbit) - T_COMP
        assert (spent < headroom_s(T_COMP, synchronous(gbit))) == (gbit < crossing)


def test_a_bucket_is_the_last_whatever_the_sizes() -> None:
    assert cut(100, 25) == [25, 25, 25, 25]
    assert cut(10, 25) == [10]
    assert sum(cut(97.5, 25)) == 97.5
    with pytest.raises(ProfileError, match="positive sizes"):
        cut(0, 25)


def test_vgg16_scales_to_40_4_percent_and_resnet50_fully() -> None:
    """Zhong et al.: 25 Gbit/s; VGG16 at 194 images/s a GPU, 32 at a time, a third of it forward."""
    vgg_s = 32 / 194
    share = clan_ideal_scaling(vgg_s / 3, 2 * vgg_s / 3, 4 * 138_357_544, 25 * GBIT)
    assert share == pytest.approx(0.404, abs=0.002)
    assert clan_ideal_scaling(0.061, 0.122, 4 * 25_557_032, 25 * GBIT) == 1.0


def test_global_qsgd_pays_below_160_gigabytes_on_an_a100() -> None:
    """Xin et al.: g = 2 TB/s, codes of a quarter, reduced 79 times more slowly per byte; and as fast as float32."""
    limit = global_qsgd_limit(2e12, slower=79)
    assert limit == pytest.approx(160e9)
    assert limit > 53.9e9  # NVLink, measured
    assert global_qsgd_limit(2e12, slower=1) == math.inf
    for rate, pays in ((0.99 * limit, True), (1.01 * limit, False)):
        wire = LinkClass(alpha_s=1e-5, beta=rate)
        floats = tree_all_reduce_s(25e6, 8, wire, 1 / 2e12)
        codes = tree_all_reduce_s(25e6 / 4, 8, wire, 79 / 2e12)
        assert (codes < floats) == pays


def test_gossip_gains_by_latency_and_compression_by_rate() -> None:
    """Lian et al., figure by figure: about nothing at 1 Gbit/s and 0.13 ms, an order of magnitude at 5 ms."""
    model, nodes = 4 * 1.7e6, 112  # ResNet-56's parameters, about
    assert gossip_gain(model, nodes, link(10, 5e-3)) > 50
    assert 0.9 < gossip_gain(100e6, nodes, link(1, 0.0)) < 1.1
    slow, far = link(0.01, 0.13e-3), link(100, 5e-3)
    quarter = model / 4
    gains = {
        "codes": [two_shot_s(model, 8, k) / two_shot_s(quarter, 8, k) for k in (slow, far)],
        "gossip": [ring_all_reduce_s(model, 8, k) / gossip_s(model, 2, k) for k in (slow, far)],
    }
    assert gains["codes"][0] > 3.9 > 1.2 > gains["codes"][1]
    assert gains["gossip"][1] > 4 > 1.1 > gains["gossip"][0]


# BERT-large on SQuAD, as Gan et al. (BAGUA) report it: seconds of an epoch of DDP, by rate and by added latency.
DDP_BY_GBIT = {1: 2590, 2: 1290, 4: 650, 8: 325, 16: 165}
DDP_BY_MS = {1: 290, 2: 498, 3: 697, 4: 860, 5: 904}
NODES, STEPS, BERT_NBYTES = 16, 114, 4 * 335_141_888  # 87,599 examples, 128 GPUs, 6 at a time


def test_bert_large_against_bandwidth_in_shape() -> None:
    predicted = {gbit: STEPS * sync_sgd_s(0.5, BERT_NBYTES, NODES, link(gbit)) for gbit in DDP_BY_GBIT}
    for gbit, measured in DDP_BY_GBIT.items():
        assert predicted[gbit] == pytest.approx(measured, rel=0.15)
    eighth = {g: STEPS * two_shot_s(BERT_NBYTES / 4, NODES, link(g)) for g in DDP_BY_GBIT}
    assert 3.3 < predicted[1] / eighth[1] < 4.2  # measured: 2590 / 700


def test_bert_large_against_latency_in_shape() -> None:
    """Rings of 2 (p-1) messages, once a bucket: 54 buckets of 25 MiB."""
    base = STEPS * sync_sgd_s(0.5, BERT_NBYTES, NODES, link(100, 0))
    for ms, measured in DDP_BY_MS.items():
        predicted = 125 - base + STEPS * sync_sgd_s(0.5, BERT_NBYTES, NODES, link(100, ms * 1e-3))
        assert predicted == pytest.approx(measured, rel=0.25)


def test_collectives_of_one_rank_take_no_time() -> None:
    k = link(1)
    for collective in (
        ring_all_reduce_s,
        halving_all_reduce_s,
        tree_all_reduce_s,
        all_to_all_s,
        all_gather_s,
        two_shot_s,
    ):
        assert collective(1e6, 1, k) == 0.0


def test_collectives_against_each_other() -> None:
    k = link(10, 1e-3)
    assert two_shot_s(8e6, 8, LinkClass(alpha_s=0, beta=1e9)) == pytest.approx(
        ring_all_reduce_s(8e6, 8, LinkClass(alpha_s=0, beta=1e9))
    )
    assert halving_all_reduce_s(8, 1024, k) == pytest.approx(20 * k.alpha_s, rel=1e-3)
    assert ring_all_reduce_s(8, 1024, k) == pytest.approx(2046 * k.alpha_s, rel=1e-3)
    # As many servers as workers: about the bytes of a ring, in two messages.
    assert parameter_server_s(8e6, 8, 8, k) == pytest.approx(2 * k.seconds(8e6))
    adding = ring_all_reduce_s(8e6, 8, k, 1e-9) - ring_all_reduce_s(8e6, 8, k)
    assert adding == pytest.approx(7 / 8 * 8e6 * 1e-9)


def test_what_all_ranks_gather_grows_with_their_number() -> None:
    k = link(10)
    few, many = (top_k_s(T_COMP, 0.24, 25_557_032, 0.01, p, k) for p in (8, 64))
    assert many - T_COMP - 0.24 == pytest.approx(9 * (few - T_COMP - 0.24), rel=1e-6)
    votes = [sign_vote_s(T_COMP, 0.01, 1e-4, 25_557_032, p, k) for p in (8, 64)]
    assert votes[1] - votes[0] == pytest.approx(56 * (1e-4 + k.seconds(25_557_032 / 8)))


def test_the_required_ratio_is_the_least() -> None:
    buckets, k = cut(NBYTES, 25e6), link(1)

    def comm(nbytes: float) -> float:
        return ring_all_reduce_s(nbytes, GPUS, k)

    ratio = required_ratio(T_COMP, buckets, comm, within=0.1)
    assert ratio > 1
    assert ideal_compressor_s(T_COMP, buckets, comm, ratio) <= 1.1 * T_COMP
    assert ideal_compressor_s(T_COMP, buckets, comm, 0.999 * ratio) > 1.1 * T_COMP
    assert required_ratio(4 * T_COMP, buckets, comm) < ratio, "a larger batch needs less"
    assert required_ratio(100.0, buckets, comm) == 1.0
    assert required_ratio(1e-6, buckets, comm) == math.inf, "latency alone takes longer"


def test_a_faster_codec_may_be_larger() -> None:
    """Agarwal et al.: k times faster at l k times the bytes still wins, as long as bytes are few."""
    k = link(10)

    def comm(nbytes: float) -> float:
        return ring_all_reduce_s(nbytes, GPUS, k)

    plain = trade_off_s(T_COMP, 0.045, 1.32e6, comm, faster=1, larger=1)
    assert trade_off_s(T_COMP, 0.045, 1.32e6, comm, faster=3, larger=2) < plain
    assert trade_off_s(T_COMP, 0.045, 1.32e6, comm, faster=50, larger=3) > plain
