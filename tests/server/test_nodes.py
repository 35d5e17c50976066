"""Leaders of nodes at servers without sockets: the bits of `Hierarchical`, its flags, and what is refused."""

import dataclasses
import json

import pytest
import torch
from in_one_process import SESSION, ServedWorld
from world import World, bits, gradients

from thinwire import Hierarchical, Identity, NodePushPull, PlanOptions, parse_recipe
from thinwire.aggregators import MANY, MEAN, MessageLayout, between_nodes_nbytes
from thinwire.aggregators.push_pull_header import read_pull_header
from thinwire.comm.local import move
from thinwire.comm.rounds import Pull, Push
from thinwire.errors import WireError
from thinwire.feedback import Slot
from thinwire.plan import Plan, build_plan
from thinwire.server.content import parse_content
from thinwire.server.protocol import Failure, Kind
from thinwire.state import State
from thinwire.wire import FRAME_NBYTES, Frame

RECIPES = [
    "hier/identity", "hier/int8", "hier/int8:stochastic", "hier/topk:0.05", "hier/onebit", "hier/topk:0.1+int4",
    "hier/linear:5", "hier:fp16/int8@ef", "hier:bf16/onebit", "hier:fp16/int8",
]  # fmt: skip
NODES = [(3, 1), (1, 3), (2, 2, 1), (4,), (1, 1, 1), (2, 5, 1)]
all_nodes = pytest.mark.parametrize("sizes", NODES, ids=str)


def _settings(recipe: str, sizes: tuple[int, ...]) -> Hierarchical:
    settings = parse_recipe(recipe)
    assert isinstance(settings, Hierarchical)
    return dataclasses.replace(settings, node_sizes=sizes)


def _plain(settings: Hierarchical, sizes: tuple[int, ...]) -> World:
    """The same exchange between ranks, where the first rank of all owns, so that the first of each node represents."""
    plain = World(settings, sum(sizes))
    params = tuple(
        dataclasses.replace(p, partitions=tuple(dataclasses.replace(one, owner=0) for one in p.partitions))
        for p in plain.plan.params
    )
    plain.plan = Plan(params, sum(sizes), plain.plan.options)
    shapes = {name: torch.zeros(shape) for name, shape in plain.shapes.items()}
    plain.states = [State(plain.plan, shapes, rank) for rank in range(sum(sizes))]
    return plain


def _both(recipe: str, sizes: tuple[int, ...], **kwargs) -> tuple[World, ServedWorld]:
    settings = _settings(recipe, sizes)
    return _plain(settings, sizes), ServedWorld(settings, sum(sizes), 2, **kwargs)


def _between(layout: MessageLayout) -> tuple[Push, Pull]:
    push, pull = layout.rounds[1:3]
    assert isinstance(push, Push)
    assert isinstance(pull, Pull)
    return push, pull


def _kept(world: World) -> dict[tuple, bytes]:
    if isinstance(world, ServedWorld):
        owned = {place: tensor.numpy().tobytes() for place, tensor in world.owners()}
    else:
        owned = {
            (slot, *place): tensor.numpy().tobytes()
            for state in world.states
            for slot, own in state.owned.items()
            for place, tensor in own.items()
        }
    return owned | {key: data for key, data in world.residuals().items() if not Slot(key[1]).owned}


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [*((recipe, (2, 2, 1)) for recipe in RECIPES), *(("hier:fp16/topk:0.05+int4", sizes) for sizes in NODES)],
)
def test_the_bits_are_those_of_hierarchical(recipe: str, sizes: tuple[int, ...]) -> None:
    plain, served = _both(recipe, sizes, order=list(reversed(range(sum(sizes)))))
    for _ in range(3):
        assert [bits(values) for values in served.run()] == [bits(values) for values in plain.run()]
    assert _kept(served) == _kept(plain)


def test_without_rounding_inside_it_does_not_show_who_represents() -> None:
    for recipe in ("hier/topk:0.05", "hier/int8:stochastic"):
        spread, served = World(_settings(recipe, (2, 3)), 5), ServedWorld(_settings(recipe, (2, 3)), 5, 3)
        for _ in range(3):
            assert [bits(values) for values in served.run()] == [bits(values) for values in spread.run()]


@all_nodes
def test_residuals_lie_with_leaders_alone(sizes: tuple[int, ...]) -> None:
    """Where nothing is rounded inside a node."""
    served, leaders, first = ServedWorld(_settings("hier/onebit", sizes), sum(sizes)), set[int](), 0
    for size in sizes:
        leaders.add(first)
        first += size
    served.run()
    owing = {rank for (rank, *_), kept in served.residuals().items() if any(kept)}
    assert owing == leaders


@all_nodes
@pytest.mark.parametrize("recipe", ["hier/topk:0.05", "hier:fp16/int4"])
def test_every_culprit_is_known_to_all_and_costs_nothing(recipe: str, sizes: tuple[int, ...]) -> None:
    world_size = sum(sizes)
    for culprit in range(world_size):
        plain, served = _both(recipe, sizes)
        for world in (plain, served):
            world.run()
        before = _kept(plain)
        grads = [gradients(rank, 1) for rank in range(world_size)]
        grads[culprit]["gain"][0] = float("inf")
        delivered = served.run([{n: g.clone() for n, g in own.items()} for own in grads])
        assert all(bool(values["gain"].isnan().all()) for values in delivered)
        assert [m.nonfinite for m in served.messages[0]] == [{(culprit, "gain")}] * world_size
        served.step -= 1  # as a GradScaler does: the step did not count
        again = served.run()
        plain_again = plain.run()
        assert [bits(values) for values in again] == [bits(values) for values in plain_again]
        assert _kept(served) == _kept(plain) != before


def test_several_culprits_of_one_node_and_of_two() -> None:
    for culprits in ((0, 1), (1, 2)):
        served = ServedWorld(_settings("hier/int8", (2, 2)), 4)
        grads = [gradients(rank, 0) for rank in range(4)]
        for rank in culprits:
            grads[rank]["gain"][0] = float("nan")
        served.run(grads)
        assert [m.nonfinite for m in served.messages[0]] == [{(MANY, "gain")}] * 4


def test_a_sum_that_overflows_inside_one_node_is_flagged_as_the_mean_on_all() -> None:
    served = ServedWorld(_settings("hier/int4", (2, 2, 1)), 5, 2)
    served.run()
    before = _kept(served)
    grads = [gradients(rank, 1) for rank in range(5)]
    for rank in (2, 3):
        grads[rank]["layer.weight"].fill_(3e38)
    delivered = served.run(grads)
    assert all(value.isnan().all() for values in delivered for value in values.values())
    assert [m.nonfinite for m in served.messages[0]] == [{(MEAN, "layer.weight")}] * 5
    served.step -= 1
    assert {k: v for k, v in _kept(served).items() if k[0] in range(5)} == {
        k: v for k, v in before.items() if k[0] in range(5)
    }


@pytest.mark.parametrize("other", [1, 2, 4])
def test_loss_scales_that_differ_inside_a_node_or_between_nodes_are_seen_by_all(other: int) -> None:
    served = ServedWorld(_settings("hier/topk:0.05", (2, 2, 1)), 5, 2)
    served.run()
    before = served.residuals()
    served.loss_scales = [2.0 if rank == other else 1.0 for rank in range(5)]
    served.run()
    assert all(message.scales_differ for message in served.messages[0])
    assert served.residuals() == before


def test_what_no_rank_of_any_node_used_stays_owed() -> None:
    plain, served = _both("hier/onebit", (2, 1))
    for world in (plain, served):
        world.run()
        world.run(unused={0: {"gain"}, 1: {"gain", "head.weight"}, 2: {"gain"}})
    assert all(message.unused == {"gain"} for message in served.messages[0])
    assert _kept(served) == _kept(plain)


def test_a_node_that_is_lost_takes_its_ranks_out_of_the_mean() -> None:
    served = ServedWorld(_settings("hier/identity", (2, 3)), 5, options={"on_worker_loss": "continue"})
    served.run()
    (service,), (messages,) = served.cluster.services, served.messages
    service.lose([0, 1], "are gone")
    grads = [gradients(rank, 1) for rank in range(5)]
    for rank, message in enumerate(messages):
        message.begin(1)
        for block in message.blocks:
            p = block.partition
            block.value.copy_(grads[rank][p.name][p.offset : p.offset + p.numel])
    exchanges = [NodePushPull.exchange(message) for message in messages]
    move([next(exchange) for exchange in exchanges])
    served.cluster.push(next(exchanges[2]), 2)
    pulled = next(exchanges[2])
    served.cluster.pull(pulled, 2)
    served.cluster.collect(pulled, 2)
    assert read_pull_header(pulled.receive, len(messages[2].layout.names)).num_present == 3
    next(exchanges[2])  # hands it on
    assert next(exchanges[2], None) is None
    assert messages[2].num_present == 3
    for block in messages[2].blocks:
        p = block.partition
        own = [grads[rank][p.name][p.offset : p.offset + p.numel] for rank in (2, 3, 4)]
        assert torch.equal(block.value, (own[0] + own[1] + own[2]).div_(3))


def test_a_rank_that_leaves_its_leader_while_another_node_waits_is_named() -> None:
    served = ServedWorld(_settings("hier/int8", (2, 2)), 4)
    served.run()
    messages = served.messages[0]
    for message in messages:
        message.begin(1)
    exchanges = [NodePushPull.exchange(message) for message in messages]
    move([next(exchange) for exchange in exchanges])
    served.cluster.push(next(exchanges[2]), 2)
    cluster, (service,) = served.cluster, served.cluster.services
    cluster.send(0, 3, Frame(kind=Kind.BYE, session=SESSION, sender=3))  # its leader has its part
    assert service.clocks() == [0, 0, 0, 0]
    cluster.send(0, 1, Frame(kind=Kind.BYE, session=SESSION, sender=1))
    (failure,) = (Failure.parse(frame.payload) for frame in cluster.inbox[0, 2])
    assert failure.message == "worker 1 closed its link while others go on (seen by server 0 of 1)"


def test_ranks_that_lead_no_node_may_not_push() -> None:
    served = ServedWorld(_settings("hier/int8", (2, 1)), 3)
    served.run()
    push, _ = _between(served.messages[0][0].layout)
    (text,) = push.contents
    cluster = served.cluster
    cluster.send(0, 1, cluster.frame(Kind.PUSH, 1, text, 1, b""))
    assert cluster.services[0].refused == {"content": 1}
    (failure,) = (Failure.parse(frame.payload) for frame in cluster.inbox[0, 0])
    assert "is for leaders of nodes, not for 1" in failure.message


@pytest.mark.parametrize("nodes", [[2, 2], [3, 0], [], "x", [2.0, 1], [True, 2], 2])
def test_nodes_of_a_content_are_checked(nodes) -> None:
    plan = build_plan(
        [("w", torch.zeros(3, 5))],
        lambda _: NodePushPull(up=Identity(), down=Identity(), node_sizes=(2, 1)),
        3,
        PlanOptions(min_nbytes=0, compress_1d=True),
    )
    (layout,) = plan.messages(["w"])
    (text,) = _between(layout)[0].contents
    assert parse_content(text, 3).stands_for == {0: 2, 2: 1}
    with pytest.raises(WireError, match="sizes of nodes"):
        parse_content(json.dumps({**json.loads(text), "nodes": nodes}), 3)


def test_a_node_sends_the_model_once_however_many_ranks_it_has() -> None:
    """And ranks that lead none send inside it alone."""
    shapes = {f"w{i}": (64, 128) for i in range(16)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    sent = {}
    for ranks in (1, 4):
        options = PlanOptions(min_nbytes=0, node_sizes=ranks, num_servers=2)
        plan = build_plan(tensors.items(), "hier:fp16/int8", 2 * ranks, options)
        encoded = sum(p.aggregator.up.nbytes(p.spec) for param in plan.params for p in param.partitions)
        (layout,) = plan.messages(list(shapes))
        (push, pull), gather, spread = _between(layout), layout.rounds[0], layout.rounds[3]
        sent[ranks] = between_nodes_nbytes(layout)
        header = sum(push.nbytes) - encoded
        assert sent[ranks] == [encoded + header + 2 * FRAME_NBYTES] * 2
        assert [r.sent_nbytes(1) for r in (push, pull)] == [push.sent_nbytes(0) if ranks == 1 else 0, 0]
        assert [gather.sent_nbytes(0), spread.sent_nbytes(0)] == [0, (ranks - 1) * sum(pull.nbytes)]
        assert f"{plan.between_nodes_nbytes:,} of all leave the busiest node" in str(plan)
    assert sent[1] == sent[4]


def test_dense_parameters_take_the_same_way() -> None:
    tensors = {"a.weight": torch.zeros(64, 64), "a.bias": torch.zeros(64)}
    options = PlanOptions(min_nbytes=0, node_sizes=(2, 2), num_servers=2)
    plan = build_plan(tensors.items(), "hier:fp16/int4", 4, options)
    exact = NodePushPull(up=Identity(), down=Identity(), node_sizes=(2, 2), num_servers=2)
    assert plan.by_name["a.bias"].aggregator == exact
    assert len(plan.messages(list(tensors))) == 1
