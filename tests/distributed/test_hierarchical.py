"""Nodes of several ranks, over real sockets: what lock step delivers, what is said of them, and restarts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Tower, attached, batch, digest, gradients, loss, seeded, train

import thinwire
from thinwire import ErrorFeedback, Hierarchical, OneBit
from thinwire.bench.lock_step import LockStep
from thinwire.errors import AttachError, PlanError, RecipeError


def _nodes(nodes):
    return init_device_mesh("cpu", nodes[1:]) if nodes[0] == "mesh" else nodes


def _against_lock_step(rank, world_size, recipe, nodes):
    model = DDP(seeded(Tower, 40, 3), bucket_cap_mb=0.01)
    names = [name for name, _ in model.module.named_parameters()]
    exact = True
    with attached(model, recipe, nodes=_nodes(nodes)) as link:
        lock_step = LockStep(link.plan, {n: tuple(p.shape) for n, p in model.module.named_parameters()})
        for step in range(3):
            x = batch(rank, step, width=40)
            local = torch.autograd.grad(loss(model.module, x), list(model.parameters()))
            everyone = [None] * world_size
            dist.all_gather_object(everyone, dict(zip(names, local, strict=True)))
            expected = lock_step.run(everyone)
            model.zero_grad()
            loss(model, x).backward()
            exact = exact and all(
                torch.equal(p.grad.view(-1), expected[name]) for name, p in model.module.named_parameters()
            )
        counted = link.stats()["wire_nbytes"]
        claimed = sum(r.sent_nbytes(rank) for m in link.plan.messages(names[::-1]) for r in m.rounds)
        assert link.codec_seconds() > 0
        sizes = {param.aggregator.node_sizes for param in link.plan.params}
    return digest(gradients(model)), exact, counted, claimed, sizes


@pytest.mark.parametrize("recipe", ["hier/int8", "hier:fp16/int4", "hier/topk:0.1+int8"])
@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [(("mesh", 2, 2), (2, 2)), ((2, 1), (2, 1)), ((1, 1, 1), (1, 1, 1)), ((3,), (3,))],
    ids=str,
)
def test_real_processes_deliver_what_lock_step_does(ranks, recipe, nodes, sizes):
    results = ranks(sum(sizes)).run(_against_lock_step, recipe, nodes)
    assert len({hashed for hashed, *_ in results}) == 1
    for _, exact, counted, claimed, found in results:
        assert exact
        assert found == {sizes}
        assert claimed <= counted < claimed + 4096  # each message has its headers


def _resume(rank, world_size):
    settings = Hierarchical(
        up=OneBit(), down=OneBit(), feedback=ErrorFeedback(), inner_dtype=torch.float16, node_sizes=(2, 1)
    )
    model = DDP(seeded(Tower))
    with attached(model, settings) as link:
        train(model, rank, range(3))
        saved = link.state_dict()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        expected = train(model, rank, range(3, 6))
    again = DDP(seeded(Tower))
    again.load_state_dict(weights)
    with attached(again, settings) as link:
        link.load_state_dict(saved)
        return train(again, rank, range(3, 6)) == expected


def test_resumed_bit_for_bit(ranks):
    assert ranks(3).run(_resume) == [True] * 3


def _refused(rank, world_size):
    model, found = DDP(seeded(Tower)), []

    def refuse(recipe, **settings):
        with pytest.raises((AttachError, PlanError, RecipeError)) as raised:
            thinwire.attach(model, recipe, options=ALL, **settings)
        found.append(str(raised.value))

    refuse("hier/int8")
    refuse("int8", nodes=2)
    refuse("hier/int8", nodes=(2, 2))
    refuse("hier/int8", nodes=(2, 1) if rank else (1, 2))
    refuse("hier/int8", nodes="auto")
    refuse("hier/int8", nodes="two")
    refuse("hier/int8", nodes=init_device_mesh("cpu", (3,)))
    return found


def test_what_is_wrong_with_nodes_is_said_on_all_ranks(ranks):
    expected = [
        "which ranks share a node; pass attach",
        "a recipe that knows of nodes",
        "add up to the 3 ranks, got (2, 2)",
        "ranks have different plans: rank 0 has `options ",
        "expected LOCAL_WORLD_SIZE, as torchrun sets it",
        "or 'auto', got 'two'",
        "a mesh of two dimensions",
    ]
    for found in ranks(3).run(_refused):
        assert all(part in text for part, text in zip(expected, found, strict=True)), found


def _auto(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        model = DDP(seeded(Tower))
        with attached(model, "dense until 1 then hier/int8", nodes="auto") as link:
            train(model, rank, range(2))
            return digest(gradients(model)), "leave the busiest node" in str(link.plan)


def test_nodes_as_the_launcher_says_in_a_later_phase(ranks):
    results = ranks(4).run(_auto)
    assert results == [(results[0][0], True)] * 4
