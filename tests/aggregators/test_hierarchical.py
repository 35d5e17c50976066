"""`Hierarchical`: means over ranks in nodes of any size, what is owed, flags, and what crosses between nodes."""

import dataclasses
import itertools

import pytest
import torch
from world import SHAPES, World, bits, gradients

from thinwire import (
    BlockQuant,
    ErrorFeedback,
    Hierarchical,
    Identity,
    OneBit,
    Patterns,
    PlanOptions,
    TernGrad,
    TwoShot,
    parse_recipe,
    reshard_state,
)
from thinwire.aggregators import MEAN, Partition, between_nodes_nbytes
from thinwire.comm.node_round import NodeRound
from thinwire.comm.nodes import Nodes
from thinwire.comm.rounds import SendRecv, buffer_sizes
from thinwire.errors import PlanError, RecipeError
from thinwire.plan import build_plan

EF = ErrorFeedback()
PLAIN = Hierarchical(up=Identity(), down=Identity())
ONE_BIT = Hierarchical(up=OneBit(), down=OneBit(), feedback=EF)
HALF = Hierarchical(up=BlockQuant(bits=4), down=BlockQuant(bits=4), feedback=EF, inner_dtype=torch.float16)
NODES = [(3, 1), (1, 3), (2, 2, 1), (4,), (1, 1, 1), (2, 5, 1)]
all_nodes = pytest.mark.parametrize("sizes", NODES, ids=str)


def world(aggregator: Hierarchical, sizes: tuple[int, ...], **settings) -> World:
    return World(dataclasses.replace(aggregator, node_sizes=sizes), sum(sizes), **settings)


@all_nodes
def test_the_mean_is_that_over_ranks_not_over_nodes(sizes: tuple[int, ...]) -> None:
    """Sums in rank order inside nodes, then in the order of nodes; divided once."""
    delivered = world(PLAIN, sizes).run()
    ranks = iter(range(sum(sizes)))
    nodes = [[next(ranks) for _ in range(size)] for size in sizes]
    for name in SHAPES:
        sums = []
        for node in nodes:
            total = gradients(node[0], 0)[name].clone()
            for rank in node[1:]:
                total += gradients(rank, 0)[name]
            sums.append(total)
        mean = sums[0].clone()
        for other in sums[1:]:
            mean += other
        mean /= sum(sizes)
        assert all(torch.equal(values[name], mean) for values in delivered)


@all_nodes
@pytest.mark.parametrize("aggregator", [ONE_BIT, HALF], ids=lambda a: a.recipe())
def test_delivered_and_owed_are_the_mean(aggregator: Hierarchical, sizes: tuple[int, ...]) -> None:
    made = world(aggregator, sizes, message_nbytes=1500)
    missing = {name: torch.zeros(gradients(0, 0)[name].numel(), dtype=torch.float64) for name in SHAPES}
    for step in range(5):
        delivered = made.run()
        assert all(bits(values) == bits(delivered[0]) for values in delivered)
        for name in SHAPES:
            mean = sum(gradients(rank, step)[name].double() for rank in range(sum(sizes))) / sum(sizes)
            missing[name] += mean - delivered[0][name]
    owed = made.owed()
    for name in SHAPES:
        torch.testing.assert_close(missing[name], owed[name], rtol=0, atol=5e-6)
    assert any(bool(value.any()) for value in owed.values())


@all_nodes
def test_residuals_lie_with_representatives_alone(sizes: tuple[int, ...]) -> None:
    """Where nothing is rounded inside a node."""
    made, nodes = world(ONE_BIT, sizes), Nodes.sized(sizes)
    made.run()
    for (rank, slot, name, offset), kept in made.residuals().items():
        (partition,) = (p for p in made.plan.by_name[name].partitions if p.offset == offset)
        stands = nodes.representative(partition.owner, nodes.of[rank]) == rank
        assert stands or slot == "owner" or not any(kept)
        assert rank != partition.owner or stands


def test_resharding_conserves_what_is_owed_and_it_is_delivered() -> None:
    """A residual that comes to a rank which does not represent goes on to the one that does."""
    old = world(ONE_BIT, (3, 1))
    for _ in range(3):
        old.run()
    owed = old.owed()
    new = world(dataclasses.replace(ONE_BIT, up=Identity(), down=Identity(), inner_dtype=torch.float16), (2, 2, 1))
    states = reshard_state([state.state_dict() for state in old.states], 5, partition_numel=200)
    onebit = world(ONE_BIT, (2, 2, 1))
    for state, saved in zip(onebit.states, states, strict=True):
        state.load_state_dict(saved)
    for name, value in onebit.owed().items():
        torch.testing.assert_close(value, owed[name], rtol=0, atol=1e-5)
    assert all(any(bool(t.any()) for t in state.worker.values()) for state in onebit.states)
    zeros = {name: torch.zeros_like(g) for name, g in gradients(0, 0).items()}
    delivered = onebit.run([zeros] * 5)
    left = onebit.owed()
    for name, value in delivered[0].items():
        torch.testing.assert_close(value.double() + left[name], owed[name], rtol=0, atol=1e-5)
    assert new.plan.params[0].slots, "what is rounded inside a node is kept, though nothing else is lost"
    nodes = Nodes.sized((2, 2, 1))
    for (rank, slot, name, offset), kept in onebit.residuals().items():
        (partition,) = (p for p in onebit.plan.by_name[name].partitions if p.offset == offset)
        if slot == "worker" and nodes.representative(partition.owner, nodes.of[rank]) != rank:
            assert not any(kept), "sent on, whole"


@all_nodes
@pytest.mark.parametrize("aggregator", [PLAIN, HALF], ids=lambda a: a.recipe())
def test_every_culprit_is_known_to_all(aggregator: Hierarchical, sizes: tuple[int, ...]) -> None:
    for culprit in range(sum(sizes)):
        made = world(aggregator, sizes, message_nbytes=1)
        made.run()
        before = made.residuals()
        grads = [gradients(rank, 1) for rank in range(sum(sizes))]
        grads[culprit]["gain"][0] = float("inf")
        delivered = made.run(grads)
        assert all(bool(values["gain"].isnan().all()) for values in delivered)
        assert all(bool(values["embed.weight"].isfinite().all()) for values in delivered)
        (flagged,) = (m for m in made.messages if m[0].layout.names == ("gain",))
        assert [m.nonfinite for m in flagged] == [{(culprit, "gain")}] * sum(sizes)
        after = made.residuals()
        assert all(after[place] == kept for place, kept in before.items() if place[2] == "gain")


def test_a_sum_that_overflows_inside_one_node_is_flagged_as_the_mean_on_all() -> None:
    """Only that node's representatives see it, and the owners they send to."""
    made = world(HALF, (2, 2, 1))
    made.run()
    before = made.residuals()
    grads = [gradients(rank, 1) for rank in range(5)]
    for rank in (2, 3):
        grads[rank]["layer.weight"].fill_(3e38)
    plain = world(dataclasses.replace(HALF, inner_dtype=None), (2, 2, 1))
    plain.run()
    kept = plain.residuals()
    delivered = plain.run([{n: g.clone() for n, g in own.items()} for own in grads])
    assert all(value.isnan().all() for values in delivered for value in values.values())
    assert [m.nonfinite for m in plain.messages[0]] == [{(MEAN, "layer.weight")}] * 5
    assert plain.residuals() == kept
    made.run(grads)  # too large for float16 already: those ranks are named that do not represent
    assert {who for who, _ in made.messages[0][0].nonfinite} <= {2, 3}
    assert [m.nonfinite for m in made.messages[0]] == [made.messages[0][0].nonfinite] * 5
    assert made.residuals() == before


def test_between_nodes_a_node_sends_what_one_rank_would() -> None:
    """Of two-shot exchanges a node of k ranks sends k times as much."""
    shapes = {f"w{i}": (64, 128) for i in range(16)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    plan = build_plan(tensors.items(), "hier:fp16/int8", 8, PlanOptions(min_nbytes=0, node_sizes=4))
    flat = build_plan(tensors.items(), "int8", 8, PlanOptions(min_nbytes=0))
    encoded = sum(flat.params[0].aggregator.up.nbytes(p.spec) for param in flat.params for p in param.partitions)
    assert plan.between_nodes_nbytes == pytest.approx(2 * encoded / 2, rel=0.01)  # half up, half down, of two nodes
    assert f"{plan.between_nodes_nbytes:,} of all leave the busiest node" in str(plan)
    assert flat.between_nodes_nbytes == 0
    assert "busiest node" not in str(flat)
    (layout,) = plan.messages(list(shapes))
    inside = [r.sent_nbytes(rank) for r in (layout.rounds[0], layout.rounds[3]) for rank in range(8)]
    total = sum(plan.sent_nbytes(rank) for rank in range(8))
    assert sum(inside) + sum(between_nodes_nbytes(layout)) == total
    for moves in layout.rounds[1:3]:
        assert all(source // 4 != target // 4 for source, target, *_ in moves.moves)
    for moves in (layout.rounds[0], layout.rounds[3]):
        assert all(source // 4 == target // 4 for source, target, *_ in moves.moves)
    for moves in layout.rounds:
        assert list(moves.moves) == sorted(moves.moves)


def test_a_schedule_for_4096_ranks_is_arithmetic_of_a_few_numbers_a_rank() -> None:
    aggregator = Hierarchical(up=BlockQuant(bits=8), down=BlockQuant(bits=8), node_sizes=8)
    partitions = [
        Partition(name="w", dtype=torch.float32, offset=i, numel=1000, owner=i, aggregator=aggregator)
        for i in range(4096)
    ]
    rounds = Hierarchical.schedule(partitions, 4096)
    encoded = aggregator.up.nbytes(partitions[0].spec)
    for one, peers in zip(rounds, (7, 511, 511, 7), strict=True):
        assert isinstance(one, NodeRound)
        assert len(one.sends(1234)) == len(one.receives(1234)) == peers
        assert one.sent_nbytes_by_rank()[1234] == one.sent_nbytes(1234) >= peers * encoded
        assert sum(one.sent_nbytes_by_rank()) == sum(one.received_nbytes_by_rank())


@all_nodes
def test_a_round_in_nodes_is_the_moves_that_it_stands_for(sizes: tuple[int, ...]) -> None:
    """What a rank sends and receives, one move at a time and as sums over all ranks."""
    world_size, nodes = sum(sizes), Nodes.sized(sizes)
    by_source, by_target = (tuple(factor * (rank + 1) for rank in range(world_size)) for factor in (1, 100))
    for way, own_first in itertools.product(("mates", "represented", "representatives"), (False, True)):
        for given in (by_target, None):
            one = NodeRound(nodes, way, by_source, given, own_first)
            listed = SendRecv(tuple(one.moves), world_size)
            assert list(listed.moves) == sorted(listed.moves)
            assert one.sent_nbytes_by_rank() == listed.sent_nbytes_by_rank()
            assert one.received_nbytes_by_rank() == [listed.received_nbytes(rank) for rank in range(world_size)]
            for rank in range(world_size):
                assert one.sends(rank) == listed.sends(rank)
                assert one.receives(rank) == listed.receives(rank)
                assert one.sent_nbytes(rank) == listed.sent_nbytes(rank)
                node = nodes.of[rank]
                targets = {
                    "mates": set(nodes.ranks(node)) - {rank},
                    "represented": {
                        owner
                        for owner in range(world_size)
                        if nodes.of[owner] != node and nodes.representative(owner, node) == rank
                    },
                    "representatives": {nodes.representative(rank, n) for n in range(len(sizes)) if n != node},
                }[way]
                assert {target for target, _, _ in one.sends(rank)} == targets
                if given is not None and one.sends(rank):
                    own = by_source[rank] + by_target[rank] if own_first else 0
                    assert one.sends(rank)[0][1] == own


def test_dense_parameters_take_the_same_way() -> None:
    tensors = {"a.weight": torch.zeros(64, 64), "a.bias": torch.zeros(64)}
    plan = build_plan(tensors.items(), "hier:fp16/int4", 4, PlanOptions(min_nbytes=0, node_sizes=(2, 2)))
    bias = plan.by_name["a.bias"].aggregator
    assert bias == Hierarchical(up=Identity(), down=Identity(), node_sizes=(2, 2))
    assert len(plan.messages(list(tensors))) == 1


def test_recipes() -> None:
    made = parse_recipe("hier:bf16/topk:0.01+int8")
    assert isinstance(made, Hierarchical)
    assert (made.inner_dtype, made.feedback, made.node_sizes) == (torch.bfloat16, EF, None)
    for text in ("hier/int8", "hier:fp16/int4", "hier:bf16/topk:0.01+int8", "hier/int8@ef"):
        assert parse_recipe(text).recipe() == text
    assert parse_recipe("hier/int8") == Hierarchical(up=BlockQuant(bits=8), down=BlockQuant(bits=8))
    with pytest.raises(RecipeError, match=r"expected 'hier', 'hier:fp16' or 'hier:bf16' before the slash"):
        parse_recipe("hier:int8/int4")
    with pytest.raises(RecipeError, match=r"expected a kind of compressor, got 'dense'"):
        parse_recipe("hier/dense")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: parse_recipe("hier/topk:0.01@dgc"), r"MomentumCorrection.*belong, are summed over its node"),
        (lambda: parse_recipe("hier/topk:0.01@ef21"), r"EF21.*belong, are summed over its node"),
        (lambda: Hierarchical(up=OneBit(), down=Identity()), "pass feedback=ErrorFeedback"),
        (lambda: Hierarchical(up=TernGrad(shared=True), down=Identity()), "representative, which encodes alone"),
        (lambda: parse_recipe("hier/sign"), "not majorities"),
        (
            lambda: dataclasses.replace(PLAIN, inner_dtype=torch.float64),
            r"got torch\.float64",
        ),
        (lambda: PLAIN.for_world(4), "which ranks share a node; pass attach"),
        (lambda: dataclasses.replace(PLAIN, node_sizes=(2, 2)).for_world(5), r"add up to the 5 ranks, got \(2, 2\)"),
        (lambda: dataclasses.replace(PLAIN, node_sizes=0).for_world(5), "positive node sizes.*got 0"),
        (lambda: dataclasses.replace(PLAIN, node_sizes=(5, 0)).for_world(5), "positive node sizes"),
    ],
)
def test_what_does_not_go(make, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        make()


def test_two_topologies_do_not_go() -> None:
    tensors = {name: torch.zeros(64, 64) for name in ("a", "b")}
    rules = {n: dataclasses.replace(PLAIN, node_sizes=size) for n, size in (("a", 2), ("b", (3, 1)))}
    with pytest.raises(PlanError, match="the same nodes for all parameters"):
        build_plan(tensors.items(), Patterns(rules), 4, PlanOptions(min_nbytes=0))


def test_nodes_of_one_size_may_end_in_a_smaller_one() -> None:
    assert dataclasses.replace(PLAIN, node_sizes=2).for_world(5).node_sizes == (2, 2, 1)
    assert dataclasses.replace(PLAIN, node_sizes=8).for_world(5).node_sizes == (5,)


def test_one_rank_a_node_delivers_what_two_shot_does() -> None:
    made, flat = world(ONE_BIT, (1, 1, 1)), World(TwoShot(up=OneBit(), down=OneBit(), feedback=EF), 3)
    for _ in range(3):
        assert bits(made.run()[0]) == bits(flat.run()[0])
    assert made.residuals() == flat.residuals()


@all_nodes
def test_buffers_hold_what_several_get_once(sizes: tuple[int, ...]) -> None:
    """The mean's bytes go from one buffer to all: it is stated as large as it is, not once for each of them."""
    made = world(ONE_BIT, sizes)
    for layout in made.plan.messages(list(SHAPES)):
        for rank in range(sum(sizes)):
            pulled, spread = layout.rounds[2:]
            assert buffer_sizes(pulled, rank)[0] <= layout.details.down_nbytes[rank]  # type: ignore[attr-defined]
            assert buffer_sizes(spread, rank)[0] <= sum(layout.details.down_nbytes)  # type: ignore[attr-defined]
