"""FSDP2 with compressed all-gathers of weights, against plain FSDP2 and against what each rank holds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from training import ALL, batch, digest, loss, seeded

import thinwire
from thinwire import PlanOptions
from thinwire.compressors import BlockQuant
from thinwire.errors import AttachError, NonFiniteError, PlanError, RecipeError

WIDTH = 48


class _Seen(torch.autograd.Function):
    """Notes the weight that a layer computes with, in both passes."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        layer.seen.append(("forward", layer.weight.detach().clone()))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        ctx.layer.seen.append(("backward", ctx.layer.weight.detach().clone()))
        return grad, None


class _Linear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen: list[tuple[str, torch.Tensor]] = []

    def forward(self, input):
        return _Seen.apply(super().forward(input), self)


def _model(*, freeze=False, **kwargs):
    """50 rows: of 4 ranks one gets less of them; two groups and the root's."""
    model = seeded(
        lambda: nn.Sequential(_Linear(WIDTH, 50), nn.Tanh(), _Linear(50, WIDTH), nn.Tanh(), _Linear(WIDTH, WIDTH))
    )
    model[0].weight.requires_grad_(not freeze)
    for layer in (model[0], model[2]):
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def _seen(model):
    """Return (name, pass, weight) since the last call, in order of layers."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _Linear)]
    found = [(name, way, weight) for name, layer in layers for way, weight in layer.seen]
    for _, layer in layers:
        layer.seen.clear()
    return found


def _train(rank, steps, recipe: Any = None, weights: Any = None, lr=0.05, **kwargs: Any) -> Any:
    """Return the losses summed over ranks, the shards' hash, and the closed link."""
    model = _model(**kwargs)
    link = None if recipe is None else thinwire.attach(model, recipe, weights=weights, options=ALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, batch(rank, step, width=WIDTH))
        value.backward()
        optimizer.step()
        dist.all_reduce(total := value.detach().clone())
        losses.append(float(total))
    if link is not None:
        link.close()
    return losses, digest(p.to_local() for p in model.parameters()), link


def _exact(rank, world_size, kwargs):
    """Also "dense" alone: of a model in which nothing is compressed every collective stays FSDP2's own."""
    losses, shards, _ = _train(rank, 3, **kwargs)
    for weights in (None, "identity"):
        got, ours, link = _train(rank, 3, "dense", weights, **kwargs)
        assert (got, ours) == (losses, shards), weights
        assert (link.stats()["weight_gathers"] > 0) == (weights is not None)


@pytest.mark.parametrize(
    ("world_size", "kwargs"),
    [
        (2, {}),
        (3, {"reshard_after_forward": True}),
        (4, {"freeze": True}),
        (2, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}),
    ],
)
def test_exact_kinds_are_fsdp2_to_the_bit(ranks, world_size, kwargs):
    ranks(world_size).run(_exact, kwargs)


def _decoded(rank, world_size, kind):
    """What layers compute with is what each owner's rows decode to, on all ranks, in both passes."""
    model = _model(reshard_after_forward=True)
    link = thinwire.attach(model, "int8", weights=kind, options=PlanOptions(min_nbytes=0, partition_numel=1024))
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    loss(model, batch(rank, 0, width=WIDTH)).backward()
    seen = _seen(model)
    assert [one for _, one, _ in seen].count("backward") == 3
    forward = {name: weight for name, way, weight in seen if way == "forward"}
    for name, _, weight in seen:
        assert torch.equal(weight, forward[name])
        assert not torch.equal(weight, whole[f"{name}.weight"])  # it is compressed
    hashes = [None] * world_size
    dist.all_gather_object(hashes, digest(weight for _, _, weight in seen))
    assert len(set(hashes)) == 1
    if kind == "int4":
        for part in link.plan.weights.by_name["2.weight"].partitions:
            ours = forward["2"].reshape(-1)[part.offset :][: part.numel]
            true = whole["2.weight"].reshape(-1)[part.offset :][: part.numel]
            compressor = BlockQuant(bits=4)
            assert torch.equal(ours, compressor.decode(compressor.encode(true), part.spec))
    for param, (name, value) in zip(model.parameters(), whole.items(), strict=True):
        assert torch.equal(param.full_tensor(), value), name  # the shards stay exact
    link.close()


@pytest.mark.parametrize(("world_size", "kind"), [(2, "int4"), (3, "int4"), (4, "int4"), (3, "int8:stochastic")])
def test_all_ranks_compute_with_what_was_sent(ranks, world_size, kind):
    ranks(world_size).run(_decoded, kind)


def _patterns(rank, world_size):
    """The first pattern that matches decides, for each weight; of what stays exact all groups may be FSDP2's own."""
    by_name = {"0.weight": "int4", "2.*": "dense", "*": BlockQuant(bits=8)}
    for policy in (by_name, lambda info: {"0.weight": "int4", "2.weight": None, "2.bias": None}.get(info.name, "int8")):
        model = _model()
        whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        link = thinwire.attach(model, "int8", weights=policy, options=ALL)
        recipes = {p.info.name: p.aggregator.recipe() for p in link.plan.weights.params if not p.reason}
        assert recipes == {"0.weight": "int4", "0.bias": "int8", "4.weight": "int8", "4.bias": "int8"}
        assert ("2.weight", "2.bias") not in link.plan.weight_groups
        loss(model, batch(rank, 0, width=WIDTH)).backward()
        errors = {name: float((weight - whole[f"{name}.weight"]).abs().max()) for name, _, weight in _seen(model)}
        assert errors["2"] == 0 < errors["4"] < errors["0"]
        assert link.stats()["weight_wire_nbytes"] > 0
        link.close()
    with pytest.raises(PlanError, match="matches no parameter"):
        thinwire.attach(_model(), "int8", weights={"nothing.*": "int8"}, options=ALL)
    for weights in ({"0.*": "onebit"}, {"0.*": "topk:0.1", "*": "int8"}, lambda info: "int2"):
        with pytest.raises(RecipeError, match=r"weights.*weights have none"):
            thinwire.attach(_model(), "int8", weights=weights, options=ALL)
    with pytest.raises(PlanError, match="expected a compressor, its recipe, patterns or a function"):
        thinwire.attach(_model(), "int8", weights=8, options=ALL)  # type: ignore[call-overload]


def test_every_weight_has_a_kind_of_its_own(ranks):
    ranks(2).run(_patterns)


def _draws(rank, world_size):
    """Another step rounds otherwise; the micro-batches of one step, and a second run, alike.

    Of many groups the last one is gathered for the backward pass, ahead as FSDP2 does it, when others are reduced.
    """
    runs = []
    for _ in range(2):
        model = seeded(lambda: nn.Sequential(*(_Linear(WIDTH, WIDTH) for _ in range(5))))
        for layer in model:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model)
        link = thinwire.attach(model, "int8", weights="int4:stochastic", options=ALL)
        forwards = []
        for last in (False, True, True):
            model.set_requires_gradient_sync(last)
            loss(model, batch(rank, 0, width=WIDTH)).backward()
            seen = _seen(model)
            assert len({digest([weight]) for name, _, weight in seen if name == "0"}) == 1  # in both passes
            forwards.append(digest(weight for _, way, weight in seen if way == "forward"))
        assert forwards[0] == forwards[1] != forwards[2]
        runs.append(forwards)
        link.close()
    assert runs[0] == runs[1]


def test_draws_belong_to_the_step(ranks):
    ranks(2).run(_draws)


def _bytes(rank, world_size):
    for weights, least in (("fp16", 1.9), ("int8", 3.6), ("int4", 6.5)):
        _, _, link = _train(rank, 2, "int8", weights, reshard_after_forward=True)
        stats = link.stats()
        assert stats["weight_gathers"] == 2 * 2 * 3  # steps, passes, groups
        assert stats["weight_wire_nbytes"] == 4 * link.plan.sent_weight_nbytes(rank)
        assert stats["weight_raw_nbytes"] == 4 * link.plan.weights.raw_nbytes
        assert stats["wire_nbytes"] == link.plan.sent_nbytes(rank)  # gradients apart
        assert link.plan.weight_compression_ratio > least, (weights, link.plan.weight_compression_ratio)
        assert "bytes of weights" in str(link.plan)


def test_bytes_are_those_of_the_plan(ranks):
    ranks(4).run(_bytes)


def _loss(rank, world_size):
    plain, _, _ = _train(rank, 60, lr=0.002)
    assert sum(plain[-10:]) < 0.9 * sum(plain[:10])  # there is something to learn
    for kwargs in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}):
        losses, _, _ = _train(rank, 60, "int8", "int8", lr=0.002, **kwargs)
        assert sum(losses[-10:]) < 1.02 * sum(plain[-10:])


def test_the_loss_keeps_up(ranks):
    ranks(2).run(_loss)


def _closes(rank, world_size):
    model = _model()
    link = thinwire.attach(model, "dense", weights="int4", options=ALL)
    model(batch(rank, 0, width=WIDTH))
    gathers = link.stats()["weight_gathers"]
    assert gathers == 3
    link.close()
    model.reshard()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    plain, ours = (m(batch(rank, 0, width=WIDTH)) for m in (_model(), model))
    assert torch.equal(plain, ours)
    assert link.stats()["weight_gathers"] == gathers


def test_close_gives_the_all_gathers_back(ranks):
    ranks(2).run(_closes)


def _nonfinite(rank, world_size):
    for on_nonfinite in ("warn", "raise"):
        model = _model()
        thinwire.attach(model, "int8", weights="int8", options=ALL, on_nonfinite=on_nonfinite)
        with torch.no_grad():
            if rank == 1:
                model[2].weight.to_local()[0, 0] = float("inf")
        if on_nonfinite == "warn":
            assert bool(model(batch(rank, 0, width=WIDTH)).isnan().all())
            continue
        with pytest.raises(NonFiniteError, match=r"weight of '2.weight' on rank 1"):
            model(batch(rank, 0, width=WIDTH))


def test_inf_on_one_rank_is_named_on_all(ranks):
    ranks(2).run(_nonfinite)


def _refused(rank, world_size):
    for weights in ("onebit", "topk:0.01", "topk:0.9", "randomk:0.5", "int2", "sign", "lowrank:2", "global:8", "int9"):
        with pytest.raises(RecipeError, match=f"weights='{weights}'"):
            thinwire.attach(_model(), "int8", weights=weights, options=ALL)
    with pytest.raises(RecipeError, match="draws random numbers"):
        thinwire.attach(_model(), "dense", weights="int4:stochastic", options=ALL)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with pytest.raises(PlanError, match="second time"):
        thinwire.attach(_model(mp_policy=policy), "int8", weights="fp16", options=ALL)
    with pytest.raises(PlanError, match="different plans: rank 0 has `weights: "):
        thinwire.attach(_model(), "int8", weights="int8" if rank else "int4", options=ALL)
    model = _model()
    link = thinwire.attach(model, "dense", weights="int8", options=ALL)
    with pytest.raises(AttachError, match="custom all-gather already"):
        thinwire.attach(model, "dense", weights="int8", options=ALL)
    link.close()
    with pytest.raises(AttachError, match="fully_shard"):
        thinwire.attach(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), "int8", weights="int8")
    if world_size == 4:
        with pytest.raises(AttachError, match="fewer ranks"):
            thinwire.attach(_model(reshard_after_forward=2), "int8", weights="int8", options=ALL)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_cannot_be_served_is_refused(ranks, world_size):
    ranks(world_size).run(_refused)
