"""Local methods between hosts, with DDP or FSDP2 inside each; what does not go together is refused on all ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Tower, batch, digest, loss, seeded

import thinwire
from thinwire.errors import AttachError, PlanError, ReplicaError, ThinwireError

WIDTH, STEPS, PERIOD = 24, 7, 3


def _model():
    return seeded(Tower, WIDTH, 3)


def _inner(params):
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def _reference(hosts, local_size):
    """Train one model per host on the mean gradient of its ranks, with DiLoCo between them; return theta at the end."""
    models = [_model() for _ in range(hosts)]
    optimizers = [_inner(model.parameters()) for model in models]
    theta = [p.detach().double().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(t) for t in theta]
    for step in range(1, STEPS + 1):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(host * local_size, (host + 1) * local_size):
                (loss(model, batch(rank, step, width=WIDTH)) / local_size).backward()
            optimizer.step()
        if step % PERIOD == 0:
            for t, u, *params in zip(theta, velocity, *(model.parameters() for model in models), strict=True):
                difference = sum(t - p.detach().double() for p in params) / hosts
                u.mul_(0.9).add_(difference)
                t.sub_(0.7 * (difference + 0.9 * u))
                for p in params:
                    p.data.copy_(t)
    return theta


def _close(got, expected):
    return all((a.double() - b).abs().max() < 2e-5 for a, b in zip(got, expected, strict=True))


def _train(model, optimizer, rank):
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss(model, batch(rank, step, width=WIDTH)).backward()
        optimizer.step()


def _ddp_inside(rank, world_size, recipe, how):
    """Two hosts of two ranks: one exchange per local rank, or one that knows of nodes."""
    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DDP(_model(), process_group=hosts[rank // 2], bucket_cap_mb=0.01)
    optimizer = _inner(model.parameters())
    between = {"process_group": columns[rank % 2]} if how == "columns" else {"nodes": 2}
    outer = thinwire.DiLoCo(model, optimizer, recipe, sync_every=PERIOD, options=ALL, **between)
    _train(model, optimizer, rank)
    theta = outer.state_dict()["theta"]
    if recipe == "dense":
        assert _close(theta.values(), _reference(2, 2))
    stats = outer.stats()
    assert stats["wire_nbytes"] == outer.planned_nbytes()
    leaving = outer.plan.between_nodes_nbytes
    outer.close()
    return digest(theta.values()), digest(model.parameters()), leaving, stats["wire_nbytes"]


@pytest.mark.parametrize(
    ("recipe", "how"), [("dense", "columns"), ("int4", "columns"), ("hier/int4", "nodes"), ("hier/identity", "nodes")]
)
def test_ddp_inside_a_host(ranks, recipe, how):
    results = ranks(4).run(_ddp_inside, recipe, how)
    assert len({theta for theta, *_ in results}) == 1
    assert results[0][1] == results[1][1]  # a host trains one model
    assert results[2][1] == results[3][1] != results[0][1]
    if how == "nodes":  # one model leaves a host, not one per rank
        raw = 3 * (WIDTH + 1) * WIDTH * 4
        assert 0 < results[0][2] < raw * (1.3 if recipe == "hier/identity" else 0.3)


def _same_as_numbers_of_ddp(rank, world_size):
    """An exchange between nodes without compression is the plain mean over all ranks."""
    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DDP(_model(), process_group=hosts[rank // 2])
    optimizer = _inner(model.parameters())
    outer = thinwire.DiLoCo(model, optimizer, "hier/identity", sync_every=PERIOD, nodes=2, options=ALL)
    _train(model, optimizer, rank)
    assert _close(outer.state_dict()["theta"].values(), _reference(2, 2))
    outer.close()


def test_nodes_deliver_the_mean(ranks):
    ranks(4).run(_same_as_numbers_of_ddp)


def _fsdp_inside(rank, world_size, recipe):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = _inner(model.parameters())
    with pytest.raises(AttachError, match="hold different shards"):
        thinwire.DiLoCo(model, optimizer, recipe, sync_every=PERIOD)
    group = mesh["replicate"].get_group()
    with pytest.raises(AttachError, match="on_nonfinite='warn'"):
        thinwire.DiLoCo(model, optimizer, recipe, sync_every=PERIOD, process_group=group, on_nonfinite="warn")
    outer = thinwire.StreamingDiLoCo(
        model,
        optimizer,
        recipe,
        sync_every=PERIOD,
        fragments=1,
        overlap=0,
        merge_alpha=0,
        outer_lr=0.7,
        process_group=group,
        options=ALL,
    )
    _train(model, optimizer, rank)
    with outer.averaged():
        whole = [p.full_tensor().detach().clone() for p in model.parameters()]
    if recipe == "dense":
        assert _close(whole, _reference(2, 2))
    saved = outer.state_dict()
    outer.load_state_dict(saved)
    outer.sync()
    after = digest(p.full_tensor() for p in model.parameters())
    outer.close()
    return digest(whole), after


@pytest.mark.parametrize("recipe", ["dense", "int4"])
def test_fsdp2_inside_a_host(ranks, recipe):
    assert len(set(ranks(4).run(_fsdp_inside, recipe))) == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def _raises(rank, make, words, error=ThinwireError):
    with pytest.raises(error, match=words):
        make()


def _refusals(rank, world_size):
    def outer(recipe="int8", model=None, inner=None, kind=thinwire.DiLoCo, **kwargs):
        model = model or _model()
        inner = _inner(model.parameters()) if inner is None else inner
        return kind(model, inner, recipe, **{"sync_every": 4, "options": ALL, **kwargs})

    here = f"rank {1 - rank} could not be planned"
    # Wrong on all ranks, then on one: the other hears of it at once.
    _raises(rank, lambda: outer("int9"), "int9")
    _raises(rank, lambda: outer("topk:0.1@dgc"), "outer_momentum", PlanError)
    _raises(rank, lambda: outer("topk:0.1@ef:lr"), "outer_momentum", PlanError)
    _raises(rank, lambda: outer("dense until 5 then int8"), "expected one recipe, got 'dense until 5 then int8'")
    _raises(rank, lambda: outer(thinwire.Schedule([(0, "dense"), (5, "int8")])), "expected one recipe, got Schedule")
    choice = thinwire.Allocate(candidates=["int2", "int4"], default="int4")
    _raises(rank, lambda: outer(choice), "local methods choose nothing", AttachError)
    worker = thinwire.optim.NAG(_model().parameters(), lr=0.1, worker_momentum=True)
    _raises(rank, lambda: outer(inner=worker), "worker_momentum: expected an optimizer with its own", AttachError)
    _raises(rank, lambda: outer(sync_every=0), "sync_every", AttachError)
    _raises(rank, lambda: outer(outer_lr=-1.0), "outer_lr", AttachError)
    _raises(rank, lambda: outer(buffers="some"), "buffers: expected 'mean' or 'local', got 'some'", AttachError)
    _raises(rank, lambda: outer(threads=0), "at least one thread", AttachError)
    _raises(rank, lambda: outer(inner=[]), "got none", AttachError)
    _raises(rank, lambda: outer(inner=[_model()]), "expected a torch optimizer", AttachError)
    _raises(rank, lambda: outer(inner=5), "expected a torch optimizer, or several, got int", AttachError)
    streaming = thinwire.StreamingDiLoCo
    _raises(rank, lambda: outer(kind=streaming, fragments=5), "1 to sync_every=4", AttachError)
    _raises(rank, lambda: outer(kind=streaming, fragments=2, merge_alpha=1.0), "merge_alpha", AttachError)
    _raises(rank, lambda: outer(kind=streaming, fragments=2, overlap=4), "overlap", AttachError)
    _raises(rank, lambda: outer("int9" if rank else "int8"), "int9" if rank else here, (PlanError, ThinwireError))
    _raises(rank, lambda: outer(sync_every=3 + rank), "ranks have different plans: rank 0 has `DiLoCo.*sync_every=3")
    _raises(rank, lambda: outer(outer_lr=0.5 + rank), "ranks have different plans")
    _raises(rank, lambda: outer(kind=streaming, fragments=2 + rank), "ranks have different plans")
    _raises(rank, lambda: outer("int8" if rank else "int4"), "ranks have different plans")
    model = DDP(_model())
    _raises(rank, lambda: outer(model=model), r"DistributedDataParallel averages gradients over ranks \[0, 1\]")


def test_what_does_not_go_together_is_refused_on_all_ranks(ranks):
    ranks(2).run(_refusals)


def _mismatch(rank, world_size):
    model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    model[0].bias.requires_grad_(False)
    inner = _inner([p for p in model.parameters() if p.requires_grad])
    names = ("0.weight", "0.bias", "1.running_var")
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in names:  # trained, frozen, a buffer
        kept = held[name].detach().clone()
        held[name].detach().view(-1)[0] += rank
        with pytest.raises(ReplicaError, match=f"same model on all ranks at the start, got '{name}'"):
            thinwire.LocalSGD(model, inner, sync_every=2)
        held[name].detach().copy_(kept)
    torch.manual_seed(rank)
    for tensor in held.values():
        if tensor.is_floating_point():
            tensor.detach().normal_()
    model[1].num_batches_tracked.fill_(rank)
    outer = thinwire.LocalSGD(model, inner, sync_every=2, replicas="broadcast")
    outer.close()
    return digest(model.state_dict().values())


def test_other_models_at_the_start_raise_or_become_rank_0s(ranks):
    assert len(set(ranks(3).run(_mismatch))) == 1


def _changes(rank, world_size):
    """A parameter that thaws, or comes to the optimizer later, would be left out."""
    for how in ("thaws", "comes"):
        model = _model()
        model.layers[0].requires_grad_(False)
        inner = _inner(model.parameters() if how == "thaws" else model.layers[1:].parameters())
        outer = thinwire.LocalSGD(model, inner, sync_every=2)
        model.layers[0].requires_grad_(True)
        if how == "comes":
            inner.add_param_group({"params": model.layers[0].parameters()})
        inner.step()
        with pytest.raises(AttachError, match="2 parameters train now"):
            inner.step()
        outer.close()


def test_parameters_that_come_later_are_no_silent_loss(ranks):
    ranks(2).run(_changes)


def test_the_reference_has_something_to_tell_apart():
    assert np.abs(_reference(2, 2)[0].numpy() - _reference(1, 4)[0].numpy()).max() > 1e-4
