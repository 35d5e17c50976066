"""Plans: policies, reasons, owners, messages, arithmetic, agreement."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import (
    BlockQuant,
    Cast,
    Dense,
    ErrorFeedback,
    Gather,
    Identity,
    OneBit,
    ParamInfo,
    Patterns,
    Plan,
    PlanOptions,
    TopK,
    TwoShot,
    parse_recipe,
)
from thinwire.aggregators import Partition, PushPull
from thinwire.errors import PlanError, RecipeError
from thinwire.plan import build_plan, first_difference
from thinwire.random import parameter_key

MODEL = {
    "embed.weight": torch.zeros(500, 64),
    "layer.weight": torch.zeros(300, 400),
    "layer.bias": torch.zeros(300),
    "norm.weight": torch.zeros(40000),
    "head.weight": torch.zeros(10, 64),
}
DENSE_IN_MESSAGE = TwoShot(up=Identity(), down=Identity())


def plan(policy, world_size: int = 4, model: dict[str, Tensor] = MODEL, **options) -> Plan:
    return build_plan(model.items(), policy, world_size, PlanOptions(**options))


def recipes(made: Plan) -> dict[str, str]:
    return {p.info.name: p.reason or p.aggregator.recipe() for p in made.params}


# --- policies -------------------------------------------------------------------------------------------------------


def test_one_recipe_for_all_leaves_small_and_flat_ones_dense() -> None:
    made = plan("int8")
    assert recipes(made) == {
        "embed.weight": "int8",
        "layer.weight": "int8",
        "layer.bias": "one-dimensional",
        "norm.weight": "one-dimensional",
        "head.weight": "below 65,536 bytes",
    }
    assert made.by_name["layer.bias"].aggregator == DENSE_IN_MESSAGE
    assert plan(parse_recipe("int8")).lines() == made.lines()
    assert not made.is_dense


def test_thresholds() -> None:
    assert recipes(plan("int8", compress_1d=True))["norm.weight"] == "int8"
    assert recipes(plan("int8", compress_1d=True))["layer.bias"] == "below 65,536 bytes"
    assert set(recipes(plan("int8", compress_1d=True, min_nbytes=0)).values()) == {"int8"}
    assert recipes(plan("int8", min_nbytes=128_000))["embed.weight"] == "int8"
    assert recipes(plan("int8", min_nbytes=128_001))["embed.weight"] == "below 128,001 bytes"


def test_the_first_pattern_that_matches_decides() -> None:
    policy = {"head.*": "dense", "*.bias": "int8", "layer.*": one_bit(), "*": "topk:0.01"}
    made = recipes(plan(policy, compress_1d=True, min_nbytes=0))
    assert made == {
        "embed.weight": "topk:0.01",
        "layer.weight": "onebit",
        "layer.bias": "int8",
        "norm.weight": "topk:0.01",
        "head.weight": "asked for",
    }


def test_a_pattern_behind_one_that_takes_all_of_its_own_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"pattern 'head\.\*' decides nothing.* as '\*'; .* special ones first"):
        plan({"*": "topk:0.01", "head.*": "dense"})
    with pytest.raises(PlanError, match=r"'layer\.\*' decides nothing"):
        plan({"*.weight": "topk:0.01", "*.bias": "int8", "layer.*": "int4"})
    plan({"layer.weight": "int8", "layer.*": "int4"})  # which leaves it the bias


def one_bit() -> TwoShot:
    return TwoShot(up=OneBit(), down=OneBit(), feedback=ErrorFeedback())


def test_what_no_pattern_matches_stays_dense() -> None:
    assert recipes(plan({"layer.*": "int8"}))["embed.weight"] == "no pattern matches"


def test_patterns_are_case_sensitive_shell_patterns() -> None:
    assert Patterns({"layer.[wx]*": "int8"}).resolve("layer.weight") == parse_recipe("int8")
    assert Patterns({"LAYER.*": "int8"}).resolve("layer.weight") is None


def test_a_pattern_that_matches_nothing_is_an_error_with_close_names() -> None:
    with pytest.raises(PlanError, match=r"pattern 'layr\.weight' matches no parameter; close names: layer\.weight"):
        plan({"layr.weight": "int8", "*": "dense"})
    with pytest.raises(PlanError, match=r"pattern 'zzz' matches no parameter; close names: embed\.weight, "):
        plan({"zzz": "int8"})


def test_bad_recipes_in_patterns_are_recipe_errors() -> None:
    with pytest.raises(RecipeError, match=r"pattern '\*': recipe 'int9': expected a kind of compressor"):
        plan({"*": "int9"})


@pytest.mark.parametrize("policy", [{"*": "dense until 5 then int8"}, lambda info: "topk:0.01 ramp 10"])
def test_schedules_in_patterns_and_functions_are_errors_with_a_hint(policy: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"expected one recipe, got .*; schedules go around patterns and functions: Sch"
    ):
        plan(policy)


def test_functions_have_the_last_word() -> None:
    seen: list[ParamInfo] = []

    def policy(info: ParamInfo) -> TwoShot | Dense | None:
        seen.append(info)
        return one_bit() if info.name == "layer.bias" else Dense() if info.index == 0 else None

    made = plan(policy)
    assert recipes(made) == dict.fromkeys(MODEL, "policy") | {"layer.bias": "onebit", "embed.weight": "asked for"}
    assert seen[1] == ParamInfo(name="layer.weight", shape=(300, 400), dtype=torch.float32, index=1)
    assert (seen[1].numel, seen[1].nbytes) == (120_000, 480_000)


def test_functions_may_return_recipes() -> None:
    made = plan(lambda info: "int8" if info.name == "layer.weight" else None)
    assert made.by_name["layer.weight"].aggregator == parse_recipe("int8")
    assert recipes(made)["head.weight"] == "policy"
    with pytest.raises(RecipeError, match=r"policy\('embed.weight'\): recipe 'topk': expected a density"):
        plan(lambda info: "topk")


def test_functions_must_return_settings() -> None:
    with pytest.raises(PlanError, match=r"policy\('embed.weight'\): expected a recipe, an Aggregator or None, got 8"):
        plan(lambda info: 8)


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(PlanError, match="got none"):
        plan("int8", model={})


@pytest.mark.parametrize("bad", [{"partition_numel": 0}, {"message_nbytes": 0}, {"min_nbytes": -1}], ids=str)
def test_bad_options(bad: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="expected positive sizes"):
        PlanOptions(**bad)


def test_partitions_too_large_for_top_k_name_the_parameter() -> None:
    with pytest.raises(PlanError, match=r"^layer\.weight: TopK: expected at most 65536 .* got 120000"):
        plan("topk:0.01", partition_numel=1 << 20)


# --- dtypes ---------------------------------------------------------------------------------------------------------


def test_dtypes_that_no_compressor_takes_stay_dense() -> None:
    model = MODEL | {"wide": torch.zeros(300, 300, dtype=torch.float64), "z": torch.zeros(300, dtype=torch.complex64)}
    made = plan(lambda info: one_bit(), model=model)
    assert recipes(made)["wide"] == "dtype float64"
    assert recipes(made)["z"] == "dtype complex64"
    assert made.by_name["wide"].aggregator == Dense()
    assert "dtype float64" in str(made)
    assert made.raw_nbytes == sum(t.numel() * t.element_size() for t in model.values())
    rounds = [r for layout in made.messages(["wide", "z"]) for r in layout.rounds]
    assert sum(r.sent_nbytes(0) for r in rounds) == 2 * 3 / 4 * (300 * 300 * 8 + 300 * 8)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_dense_bytes_are_counted_in_each_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    model = {str(dtype): torch.zeros(1000, dtype=dtype) for dtype in dtypes}
    made = plan("dense", 2, model)
    assert made.is_dense
    assert made.sent_nbytes(0) == made.raw_nbytes == sum(1000 * dtype.itemsize for dtype in dtypes)
    assert made.compression_ratio == 1.0


def test_a_dense_plan_is_ddps_own() -> None:
    made = plan("dense")
    assert made.is_dense
    assert {p.aggregator for p in made.params} == {Dense()}
    assert [len(p.partitions) for p in made.params] == [1] * 5
    assert len(made.messages(list(MODEL))) == 1


def test_dense_wires_that_differ_are_kept_apart() -> None:
    """One all-reduce has one dtype: where wires differ each parameter travels as asked, through owners."""
    made = plan({"head.*": "dense:fp16", "*": "dense"})
    assert made.by_name["head.weight"].aggregator == TwoShot(up=Cast(), down=Cast())
    assert made.by_name["layer.weight"].aggregator == DENSE_IN_MESSAGE
    assert not made.is_dense
    assert plan("dense:fp16").is_dense


# --- partitions and owners ------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=12),
    world_size=st.integers(1, 9),
    partition_numel=st.integers(1, 300),
    seed=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=60)
def test_partitions_cover_and_owners_are_even_in_every_bucket(
    sizes: list[int], world_size: int, partition_numel: int, seed: int, data: st.DataObject
) -> None:
    model = {f"p{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    policy = parse_recipe("onebit")
    made = plan(
        lambda info: policy if info.index % 3 else None,
        world_size,
        model,
        partition_numel=partition_numel,
        seed=seed,
    )
    for param in made.params:
        end = 0
        for partition in param.partitions:
            assert partition.offset == end
            assert partition.numel <= max(partition_numel, 1) or isinstance(partition.aggregator, Dense)
            assert 0 <= partition.owner < world_size
            assert partition.key == parameter_key(seed, param.info.name)
            end += partition.numel
        assert end == param.info.numel
        assert len(param.partitions) >= 1
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first, len(sizes) - 1))
    owned: Counter[int] = Counter()
    for param in made.params[first : last + 1]:
        for partition in param.partitions:
            owned[partition.owner] += owned_nbytes(partition)
    largest = max(owned_nbytes(p) for param in made.params for p in param.partitions)
    assert (
        max(owned[rank] for rank in range(world_size)) - min(owned[rank] for rank in range(world_size)) <= 2 * largest
    )


def owned_nbytes(partition: Partition) -> int:
    """What a partition puts on its owner: its bytes up and down."""
    return sum(c.nbytes(partition.spec) for c in (partition.aggregator.up, partition.aggregator.down))


def test_owners_are_dealt_from_the_last_parameter() -> None:
    made = plan("int8", 3)
    dealt = [p.owner for param in reversed(made.params) for p in param.partitions]
    assert dealt[:3] == [0, 1, 2]
    assert len(dealt) == 1 + 1 + 1 + 2 + 1


def test_small_partitions_do_not_shift_the_large_ones() -> None:
    """A block of a transformer: each owner gets as many bytes of every message, biases or not."""
    shapes = {
        "qkv": (768, 256),
        "bias1": (768,),
        "out": (256, 256),
        "bias2": (256,),
        "up": (1024, 256),
        "bias3": (1024,),
    }
    made = plan("int8", 4, {f"{i}.{name}": torch.zeros(shape) for i in range(3) for name, shape in shapes.items()})
    for layout in made.messages([param.info.name for param in reversed(made.params)]):
        for r in layout.rounds:
            assert max(r.nbytes) <= 1.1 * sum(r.nbytes) / 4


# --- kinds that see whole matrices ----------------------------------------------------------------------------------


def test_matrices_stay_whole_and_what_has_no_rank_to_lower_stays_dense() -> None:
    model = MODEL | {"narrow": torch.zeros(40000, 3), "kernel": torch.zeros(64, 32, 3, 3), "one": torch.zeros(1, 70000)}
    made = plan("lowrank:4", model=model, compress_1d=True)
    assert recipes(made) == {
        "embed.weight": "lowrank:4",
        "layer.weight": "lowrank:4",
        "layer.bias": "below 65,536 bytes",
        "norm.weight": "one-dimensional",
        "head.weight": "below 65,536 bytes",
        "narrow": "lowrank:4 saves less than half",
        "kernel": "lowrank:4",
        "one": "lowrank:4 saves less than half",
    }
    (layer,) = made.by_name["layer.weight"].partitions
    assert (layer.offset, layer.numel, layer.spec.shape) == (0, 120_000, (300, 400))
    assert made.by_name["kernel"].partitions[0].spec.shape == (64, 32, 3, 3)
    assert made.by_name["norm.weight"].partitions[0].spec.shape == (40000,)
    assert layer.aggregator.up.nbytes(layer.spec) == 4 + 2 * 4 * 700
    assert recipes(plan("lowrank:4:fp32", model=model, min_nbytes=0))["head.weight"] == "lowrank:4:fp32"
    assert recipes(plan("lowrank:5:fp32", model=model, min_nbytes=0))["head.weight"].endswith("less than half")


def test_one_hop_that_sees_matrices_keeps_them_whole_for_both() -> None:
    made = plan("int8+lowrank:2")
    assert [p.spec.shape for p in made.by_name["layer.weight"].partitions] == [(300, 400)]
    with pytest.raises(PlanError, match=r"^layer\.weight: TopK: expected at most 65536 .* got 120000"):
        plan("topk:0.01+lowrank:2")


def test_a_function_sends_vectors_through_it_too() -> None:
    made = plan(lambda info: parse_recipe("lowrank:2"))
    assert set(recipes(made).values()) == {"lowrank:2"}


def test_matrices_are_seen_in_the_order_of_memory() -> None:
    """As they lie in DDP's buckets: a transposed parameter is its transpose, whose rank is the same."""
    model = {
        "transposed": torch.zeros(200, 300).t(),
        "channels_last": torch.zeros(64, 32, 3, 3).to(memory_format=torch.channels_last),
        "gaps": torch.zeros(200, 600)[:, ::2],
    }
    made = plan("lowrank:2", model=model)
    shapes = {param.info.name: param.partitions[0].spec.shape for param in made.params}
    assert shapes == {"transposed": (200, 300), "channels_last": (64, 3, 3, 32), "gaps": (200, 300)}


# --- messages and arithmetic ----------------------------------------------------------------------------------------


def test_messages_close_once_full_and_hold_one_kind() -> None:
    policy = {"embed.*": "gather/onebit", "layer.weight": "int8", "*": "dense"}
    made = plan(policy, partition_numel=10_000, message_nbytes=100_000)
    layouts = made.messages(list(MODEL))
    kinds = [{type(p.aggregator) for p in layout.partitions} for layout in layouts]
    assert all(len(kind) == 1 for kind in kinds)
    assert {Gather} in kinds
    assert {TwoShot} in kinds
    for layout in layouts:
        # Without its last partition a message was not full: too few raw bytes, or too few to send.
        raw = sum(p.spec.raw_nbytes for p in layout.partitions[:-1])
        sent = sum(p.aggregator.up.nbytes(p.spec) for p in layout.partitions[:-1])
        assert raw < 100_000 or 16 * sent < 100_000
    full = [layout for layout in layouts if sum(p.spec.raw_nbytes for p in layout.partitions) >= 100_000]
    assert len(full) >= 2
    travelled = [(p.name, p.offset) for layout in layouts for p in layout.partitions]
    assert Counter(travelled) == Counter((p.name, p.offset) for param in made.params for p in param.partitions)


def test_sent_nbytes_by_hand() -> None:
    """Two ranks, two one-bit partitions of 1,000 elements: each rank sends one up and one down, and a header each."""
    model = {"w": torch.zeros(20, 100)}
    made = plan("onebit", 2, model, partition_numel=1000, min_nbytes=0)
    encoded = 4 + 125 + 3
    assert [made.sent_nbytes(rank) for rank in range(2)] == [2 * (8 + encoded)] * 2
    assert made.raw_nbytes == 8000
    assert made.busiest_nbytes == 2 * (8 + encoded)
    assert made.compression_ratio == 8000 / (2 * (8 + encoded))


def test_sent_nbytes_of_uneven_owners() -> None:
    """Three ranks, one float32 partition of 10: the owner sends its mean to two, and headers to all."""
    made = plan(lambda info: DENSE_IN_MESSAGE, 3, {"w": torch.zeros(10)})
    assert made.by_name["w"].partitions[0].owner == 0
    assert made.sent_nbytes(0) == 2 * 8 + 2 * (8 + 40)
    assert made.sent_nbytes(1) == made.sent_nbytes(2) == (8 + 40) + 8 + 2 * 8
    assert made.busiest_nbytes == made.sent_nbytes(0)


@pytest.mark.parametrize(
    ("recipe", "ratio"),
    [("int8", 4 / (1 + 4 / 512)), ("fp16", 2.0), ("onebit", 32.0), ("topk:0.01", 100.0), ("int4", 4 / (0.5 + 4 / 512))],
)
def test_compression_ratio_of_a_large_layer(recipe: str, ratio: float) -> None:
    made = plan(recipe, 4, {"w": torch.empty(64 * 65536, 1, device="meta")})
    assert made.compression_ratio == pytest.approx(ratio, rel=0.002)


def test_one_rank_sends_nothing() -> None:
    for recipe in ("int8", "dense", "gather/onebit"):
        made = plan(recipe, 1)
        assert made.sent_nbytes(0) == 0
        assert made.compression_ratio == 1.0


def test_residual_memory_of_the_plan() -> None:
    made = plan(TwoShot(up=OneBit(), down=Identity(), feedback=ErrorFeedback()), 2)
    assert made.residual_nbytes(0) == made.residual_nbytes(1) == 4 * (32_000 + 120_000)
    both = plan("onebit", 2)
    assert sum(both.residual_nbytes(rank) for rank in range(2)) == 3 * 4 * (32_000 + 120_000)
    assert plan("int8", 2).residual_nbytes(0) == 0
    assert both.worker_nbytes == 4 * (32_000 + 120_000)
    owned = max(both.owner_nbytes(rank) for rank in range(2))
    assert f"({both.worker_nbytes:,} of what it sends, {owned:,} of what it owns)" in str(both)
    served = plan(PushPull(up=OneBit(), down=OneBit(), feedback=ErrorFeedback(), num_servers=5), 2)
    assert f"({both.worker_nbytes:,} of what it sends, 0 of what it owns)" in str(served)


# --- agreement ------------------------------------------------------------------------------------------------------


def test_the_digest_depends_on_everything_that_must_agree() -> None:
    renamed = {name.replace("head", "tail"): tensor for name, tensor in MODEL.items()}
    reordered = dict(reversed(MODEL.items()))
    reshaped = MODEL | {"head.weight": torch.zeros(64, 10)}
    narrow = MODEL | {"head.weight": torch.zeros(10, 64, dtype=torch.float16)}
    fp16 = TopK(density=0.01)
    plans = {
        "base": plan("topk:0.01"),
        "recipe": plan("topk:0.02"),
        "values": plan("topk:0.01:fp32"),
        "aggregator": plan("gather/topk:0.01"),
        "decay": plan(TwoShot(up=fp16, down=fp16, feedback=ErrorFeedback(decay=0.9))),
        "lr": plan(TwoShot(up=fp16, down=fp16, feedback=ErrorFeedback(lr_correction=True))),
        "down": plan(TwoShot(up=fp16, down=BlockQuant(), feedback=ErrorFeedback())),
        "one layer": plan({"embed.*": "topk:0.02", "*": "topk:0.01"}),
        "dense": plan("dense"),
        "dense:fp16": plan("dense:fp16"),
        "world size": plan("topk:0.01", 5),
        "seed": plan("topk:0.01", seed=1),
        "partition_numel": plan("topk:0.01", partition_numel=1000),
        "message_nbytes": plan("topk:0.01", message_nbytes=1000),
        "min_nbytes": plan("topk:0.01", min_nbytes=1),
        "compress_1d": plan("topk:0.01", compress_1d=True),
        "names": plan("topk:0.01", model=renamed),
        "order": plan("topk:0.01", model=reordered),
        "shape": plan("topk:0.01", model=reshaped),
        "dtype": plan("topk:0.01", model=narrow),
    }
    assert len({made.digest for made in plans.values()}) == len(plans)
    for what, made in plans.items():
        assert (first_difference([plans["base"].lines(), made.lines()]) is None) == (what == "base")
    assert plan("topk:0.01").digest == plans["base"].digest


def test_first_difference_is_a_sentence() -> None:
    a, b = plan("int8").lines(), plan("int4").lines()
    sentence = first_difference([a, a, b])
    assert sentence is not None
    assert sentence.startswith("rank 0 has `embed.weight: shape [500, 64], torch.float32, TwoShot(up=BlockQuant(bits=8")
    assert ", rank 2 has `embed.weight: shape [500, 64], torch.float32, TwoShot(up=BlockQuant(bits=4" in sentence
    assert first_difference([a, a[:-1]]) == f"rank 0 has `{a[-1]}`, rank 1 has `nothing more`"
    assert first_difference([a[:-1], a]) == f"rank 0 has `nothing more`, rank 1 has `{a[-1]}`"
    assert first_difference([a, list(a)]) is None
    assert first_difference([a]) is None


def test_the_printed_table() -> None:
    model = {"w": torch.zeros(200, 400), "b": torch.zeros(400), "s": torch.zeros(())}
    lines = str(plan("onebit", 2, model)).splitlines()
    encoded = 2 * 4 + (65536 + 14464) // 8
    assert lines[:4] == [
        "parameter  shape    recipe  partitions      raw  sent once  why dense",
        f"w          200x400  onebit           2  320,000     {encoded:,}",
        "b          400      dense            1    1,600      1,600  one-dimensional",
        "s          scalar   dense            1        4          4  one-dimensional",
    ]
    made = plan("onebit", 2, model)
    assert lines[4].startswith(
        f"2 ranks; 321,604 bytes of gradient, {made.busiest_nbytes:,} sent per step by the busiest"
    )
    assert f"{made.compression_ratio:.1f}x less than a ring all-reduce" in lines[4]
