"""A server without sockets: the bits of `TwoShot`, whatever arrives when; and frames that it must not take."""

import dataclasses
import itertools
import json
import struct
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from in_one_process import ServedWorld
from world import World, bits, gradients

from thinwire import BlockQuant, ErrorFeedback, TopK, TwoShot, parse_recipe
from thinwire.aggregators.undo import Undo
from thinwire.errors import WireError
from thinwire.feedback import Slot
from thinwire.server import service as service_module
from thinwire.server.mean import Store, Units
from thinwire.server.protocol import Failure, Kind, Residuals
from thinwire.wire import digest_of

RECIPES = [
    "identity", "fp16", "bf16", "int8", "int8:stochastic", "int4", "int2", "int8:rotation=32", "e4m3", "e3m0",
    "linear:5", "linear:7:l2", "natural:3", "qsgd:4", "cnat:8", "terngrad", "minmax:8", "minmax:4:bagua", "onebit",
    "topk:0.05", "topk:0.001", "topk:0.05:fp32", "topk:0.05~int8", "randomk:0.1", "randomk:0.25@ef", "onebit:rms",
    "scaled:linear:3", "lowrank:2", "topk:0.1+int8", "onebit+fp16", "int8@ef:decay=0.9",
    "topk:0.05@dgc:0.9", "int4@ef", "randomk:0.1:rotating",
]  # fmt: skip


def _same(two_shot: TwoShot, world_size: int, num_servers: int, order=None, dtype=torch.float32) -> None:
    plain = World(two_shot, world_size, dtype=dtype)
    served = ServedWorld(two_shot, world_size, num_servers, order=order, dtype=dtype)
    for _ in range(4):
        expected, got = plain.run(), served.run()
        assert [bits(values) for values in got] == [bits(values) for values in expected]
    _same_residuals(plain, served)


def _same_residuals(plain: World, served: ServedWorld) -> None:
    theirs = {key: data for key, data in plain.residuals().items() if not Slot(key[1]).owned}
    assert served.residuals() == theirs
    owners = {place: tensor.numpy().tobytes() for place, tensor in served.owners()}
    assert owners == {
        (slot, *place): t.numpy().tobytes()
        for state in plain.states
        for slot, own in state.owned.items()
        for place, t in own.items()
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_are_those_of_two_shot(recipe):
    two_shot = parse_recipe(recipe)
    assert isinstance(two_shot, TwoShot)
    _same(two_shot, world_size=3, num_servers=2, order=[2, 0, 1])


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_any_number_of_workers_and_servers(world_size, num_servers):
    two_shot = TwoShot(up=TopK(density=0.1), down=BlockQuant(bits=4), feedback=ErrorFeedback())
    _same(two_shot, world_size, num_servers, order=list(reversed(range(world_size))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits(dtype):
    _same(parse_recipe("topk:0.05"), 3, 2, dtype=dtype)


def test_whatever_the_messages_are():
    """Contents change with DDP's buckets; what a server owes belongs to partitions."""
    two_shot = parse_recipe("topk:0.05")
    plain, served = World(two_shot, 3), ServedWorld(two_shot, 3, 2)
    for nbytes, order in (
        (1 << 20, None),
        (100, None),
        (3000, ["gain", "head.weight", "embed.weight", "layer.bias", "layer.weight"]),
    ):
        for _ in range(2):
            for world in (plain, served):
                world.plan = dataclasses.replace(
                    world.plan, options=dataclasses.replace(world.plan.options, message_nbytes=nbytes)
                )
                world.order = order
            assert [bits(v) for v in served.run()] == [bits(v) for v in plain.run()]
        for service in served.cluster.services:  # values are kept for the contents of now alone
            held = sum(one.mean is not None for one in service._served.values())
            now = {
                text
                for layout in served.plan.messages(order or list(served.shapes))
                for text in layout.rounds[0].contents
            }
            assert held <= len(now)
    _same_residuals(plain, served)


@pytest.mark.parametrize("recipe", ["topk:0.05", "onebit", "topk:0.05@dgc", "int4@ef:decay=0.5"])
def test_a_change_of_loss_scale_and_an_unused_parameter(recipe):
    plain, served = World(parse_recipe(recipe), 2), ServedWorld(parse_recipe(recipe), 2, 2)
    scale = 1.0
    for ratio in (1.0, 4.0, 0.5):
        scale *= ratio
        unused = {0: {"layer.weight", "gain"}, 1: {"layer.weight"}}
        expected = plain.run(unit_ratio=ratio, unused=unused)
        got = served.run(unit_ratio=ratio, unused=unused, loss_scale=scale)
        assert [bits(v) for v in got] == [bits(v) for v in expected]
        assert served.messages[0][0].unused == {"layer.weight"}
    _same_residuals(plain, served)


def _spoilt(served: ServedWorld, rank: int, name: str) -> list[dict[str, torch.Tensor]]:
    grads = [gradients(r, served.step) for r in range(served.world_size)]
    grads[rank][name][0] = float("inf")
    return grads


def test_a_step_that_is_not_finite_changes_nothing_and_names_the_rank():
    served = ServedWorld(parse_recipe("topk:0.05"), 3, 2)
    served.run()
    before, owners = served.residuals(), {place: t.clone() for place, t in served.owners()}
    delivered = served.run(_spoilt(served, 1, "layer.weight"))
    assert all(bool(v.isnan().all()) for values in delivered for v in values.values())
    assert {bad for message in served.messages[0] for bad in message.nonfinite} == {(1, "layer.weight")}
    assert served.residuals() == before
    assert all(torch.equal(t, owners[place]) for place, t in served.owners())


def test_a_skipped_step_is_taken_back_by_servers():
    """With a GradScaler, workers come again with the same step: the mean of one message may have been fine."""
    plain, served = World(parse_recipe("topk:0.05"), 3), ServedWorld(parse_recipe("topk:0.05"), 3, 2)
    for world in (plain, served):
        world.run()
    before = served.residuals()
    served.run([{name: 2 * g for name, g in gradients(r, 77).items()} for r in range(3)])
    for messages in served.messages:
        for message in messages:
            message.restore()
    served.step -= 1
    assert served.residuals() == before
    assert [bits(v) for v in served.run()] == [bits(v) for v in plain.run()]
    _same_residuals(plain, served)


@pytest.mark.parametrize("recipe", ["topk:0.05", "int4@ef"])
@pytest.mark.parametrize("spoilt", ["not finite", "the mean overflows", "loss scales differ"])
def test_a_step_that_came_to_nothing_leaves_units_as_they_are(recipe, spoilt):
    """A GradScaler halves its scale after it: residuals are still in units of the scale before."""
    plain, served = World(parse_recipe(recipe), 2), ServedWorld(parse_recipe(recipe), 2, 2)
    for ratio, scale in ((1.0, 1.0), (4.0, 4.0)):
        plain.run(unit_ratio=ratio)
        served.run(unit_ratio=ratio, loss_scale=scale)
    for _ in range(2):  # twice in a row: nothing is taken back a second time
        grads = _spoilt(served, 1, "layer.weight") if spoilt == "not finite" else None
        if spoilt == "the mean overflows":
            grads = [{name: torch.full_like(g, 3e38) for name, g in gradients(r, 9).items()} for r in range(2)]
        served.loss_scales = [4.0, 2.0] if spoilt == "loss scales differ" else []
        got = served.run(grads, loss_scale=4.0)
        assert all(bool(v.isnan().all()) for values in got for v in values.values())
        served.step, served.loss_scales = served.step - 1, []
    assert [bits(v) for v in served.run(unit_ratio=0.5, loss_scale=2.0)] == [bits(v) for v in plain.run(unit_ratio=0.5)]
    _same_residuals(plain, served)


def test_residuals_come_in_the_units_that_are_wished_for():
    """After a step that came to nothing a worker's state is in units of that step already, a server is not."""
    store, out, place = Store(), torch.empty(3), ("w", 0)
    values = torch.tensor([1.0, -2.0, 3.0])
    store.write(place, values, Units(step=3, loss_scale=2.0, rate=0.5))
    for scale, rate, factor in ((2.0, 0.5, 1.0), (2.0, 0.25, 2.0), (4.0, 0.5, 2.0), (1.0, None, 0.5)):
        store.read(place, out, loss_scale=scale, rate=rate, step=4)
        assert torch.equal(out, factor * values)
    with pytest.raises(WireError, match="w: expected a step from 3 on, got 2"):
        store.read(place, out, loss_scale=1.0, step=2)


def test_one_worker_asks_for_residuals_while_another_begins_a_step(monkeypatch):
    """Both take the last round back; neither may copy from memory that the other has given back."""
    served = ServedWorld(parse_recipe("int4@ef"), 1, shapes={"w": (200,)})
    served.run()
    (service,) = served.cluster.services
    (content,) = service._served.values()
    pushed: list[torch.Tensor] = []
    add = content.mean.add
    content.mean.add = lambda rank, data: (pushed.append(data.clone()), add(rank, data))
    before = service.store.items()["w", 0].tensors[Slot.OWNER].clone()
    served.run()
    saved, inside, begun = Undo.saved, threading.Event(), threading.Event()

    def slow(self: Undo) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = list(saved(self))
        if not inside.is_set():
            inside.set()
            begun.wait(0.3)
        return found

    monkeypatch.setattr(Undo, "saved", slow)
    out = torch.empty_like(before)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(service.store.read, ("w", 0), out, loss_scale=1.0, step=1)
        inside.wait()
        add(0, pushed[0])
        service._buffers.take(before.nbytes).fill_(7)
        begun.set()
        asked.result()
    assert torch.equal(out, before)
    assert torch.equal(service.store.items()["w", 0].tensors[Slot.OWNER], before)


@pytest.mark.parametrize("alone", ["the same step", "asks for an earlier step"])
def test_what_one_worker_says_alone_takes_nothing_back(alone):
    """Of a round that all have ended; it says so in a push of another content with the same partitions, or asks."""
    plain, served = World(parse_recipe("onebit"), 2), ServedWorld(parse_recipe("onebit"), 2)
    for world in (plain, served):
        world.run()
        world.run()
    (one,), cluster = served.cluster.services[0]._served.values(), served.cluster
    if alone == "asks for an earlier step":
        p = one.content.layout.partitions[0]
        about = Residuals([p.name], [p.offset], [p.numel], [0.0], 1.0, 0)
        cluster.send(0, 0, cluster.frame(Kind.GET, 0, "", payload=about.pack()))
        (frame,) = cluster.inbox[0, 1]
        assert (
            "what worker 0 sent: embed.weight: expected a step from 1 on, got 0" in Failure.parse(frame.payload).message
        )
        return
    text = json.loads(served.plan.messages(list(served.shapes))[0].rounds[0].contents[0])
    text = json.dumps({**text, "num_names": text["num_names"] + 1})
    cluster.send(0, 0, cluster.frame(Kind.DECLARE, 0, text, payload=text.encode()))
    push = struct.pack("<IIf", 1, 0, 1.0).ljust(one.content.push_nbytes, b"\0")
    cluster.send(0, 0, cluster.frame(Kind.PUSH, 0, text, payload=push))
    assert not cluster.services[0].refused
    assert [bits(v) for v in served.run()] == [bits(v) for v in plain.run()]
    _same_residuals(plain, served)


def test_contents_count_for_as_long_as_they_have_memory(monkeypatch):
    """Phases and buckets that are over must not add up to the limit of a run; one that comes back replaces others."""
    served = ServedWorld(parse_recipe("int8"), 1)
    served.run()
    cluster, service = served.cluster, served.cluster.services[0]
    (first,) = service._served.values()
    nbytes, loads = first.content.raw_nbytes, list(service.loads)
    monkeypatch.setattr(service_module, "MAX_RAW_NBYTES", 2 * nbytes)
    text, rounds = json.loads(served.plan.messages(list(served.shapes))[0].rounds[0].contents[0]), Counter()
    for number in (1, 2, 3, 1, 1, 3, 2):
        other = json.dumps({**text, "num_names": text["num_names"] + number})
        cluster.send(0, 0, cluster.frame(Kind.DECLARE, 0, other, payload=other.encode()))
        assert service._failure is None
        content = service._served[digest_of(other)].content
        push = struct.pack("<IIf", 1, 0, 1.0).ljust(content.push_nbytes, b"\0")
        cluster.send(0, 0, cluster.frame(Kind.PUSH, 0, other, rounds[number], push))
        cluster.send(0, 0, cluster.frame(Kind.PULL, 0, other, rounds[number]))
        rounds[number] += 1
        assert (service._failure, service.refused) == (None, {})
        assert [one.content is content for one in service._served.values() if one.mean is not None] == [True]
        assert (service._raw_nbytes, service.loads) == (nbytes, loads)
    monkeypatch.setattr(service_module, "MAX_RAW_NBYTES", nbytes)  # the next to come back has no room
    cluster.inbox[0, 0].clear()
    back = json.dumps({**text, "num_names": text["num_names"] + 1})
    push = push[: service._served[digest_of(back)].content.push_nbytes]
    cluster.send(0, 0, cluster.frame(Kind.PUSH, 0, back, rounds[1], push))
    (frame,) = cluster.inbox[0, 0]
    message = Failure.parse(frame.payload).message
    assert f"at most {nbytes} bytes of gradients in all, got {nbytes} beside {nbytes}" in message


def test_workers_of_different_loss_scales_get_nothing():
    served = ServedWorld(parse_recipe("topk:0.05"), 2)
    before = served.residuals()
    served.loss_scales = [1.0, 2.0]
    delivered = served.run()
    assert all(bool(v.isnan().all()) for values in delivered for v in values.values())
    assert all(message.scales_differ for message in served.messages[0])
    assert served.residuals() == before


def test_what_is_delivered_and_owed_is_what_was_given():
    """Algorithm 4: sum of delivered = sum of mean gradients - mean worker residual - server residual."""
    for world_size, recipe in itertools.product((1, 2, 5), ("onebit", "topk:0.01")):
        served = ServedWorld(parse_recipe(recipe), world_size, 2)
        due, got = {}, {}
        for step in range(6):
            delivered = served.run()[0]
            for name, value in delivered.items():
                mean = sum(gradients(r, step)[name].double() for r in range(world_size)) / world_size
                due[name] = due.get(name, 0) + mean
                got[name] = got.get(name, 0) + value.double()
        owed = served.owed()
        for (_, name, offset), tensor in served.owners():
            owed[name][offset : offset + tensor.numel()] += tensor
        for name, value in due.items():
            torch.testing.assert_close(got[name] + owed[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["onebit", "topk:0.01", "identity"])
def test_a_worker_moves_as_many_bytes_whatever_the_number_of_workers(recipe):
    found = set()
    for world_size in (2, 4, 8):
        served = ServedWorld(parse_recipe(recipe), world_size, 2)
        (layout,) = served.plan.messages(list(served.shapes))
        push, pull = layout.rounds
        found.add((push.sent_nbytes(0), sum(pull.nbytes)))
    assert len(found) == 1


def test_arrival_order_delivers_the_same_to_all():
    served = ServedWorld(parse_recipe("int4"), 4, order=[3, 1, 0, 2], options={"order": "arrival"})
    delivered = served.run()
    assert all(bits(values) == bits(delivered[0]) for values in delivered)
    mean = sum(gradients(r, 0)["head.weight"] for r in range(4)) / 4
    torch.testing.assert_close(delivered[0]["head.weight"], mean, rtol=0.3, atol=0.5)
