"""FSDP2 with compressed reduce-scatters, against plain FSDP2."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from training import ALL, batch, digest, loss, seeded

import thinwire
from thinwire.errors import AttachError, NonFiniteError, RecipeError, StateError

WIDTH = 48


def _model(**kwargs):
    """48 and 50 rows: of 4 ranks one gets less of the second; two groups and the root's."""
    model = seeded(
        lambda: nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    )
    for layer in (model[0], model[2]):
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def _gradients(model):
    return [p.grad.to_local().clone() for p in model.parameters()]


def _train(rank, steps, recipe=None, lr=0.05, **kwargs: Any) -> Any:
    model = _model(**kwargs)
    link = None if recipe is None else thinwire.attach(model, recipe, options=ALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    first, losses = [], []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, batch(rank, step, width=WIDTH))
        value.backward()
        first = first or _gradients(model)
        optimizer.step()
        dist.all_reduce(total := value.detach().clone())
        losses.append(float(total))
    if link is None:
        return first, losses, ({}, None)
    link.close()
    return first, losses, (link.stats(), link.plan)


def _same_mean(rank, world_size, policy):
    kwargs: dict[str, Any] = (
        {} if policy is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=policy)}
    )
    plain, _, _ = _train(rank, 1, **kwargs)
    ours, _, _ = _train(rank, 1, "identity", **kwargs)
    tolerance = 1e-6 if policy is None else 2e-2  # sums in another order; gloo rounds every partial one to bf16
    for expected, got in zip(plain, ours, strict=True):
        assert (
            (expected - got).abs().max() <= tolerance * max(1.0, float(expected.abs().max())) if got.numel() else True
        )


@pytest.mark.parametrize(
    ("world_size", "policy"), [(2, None), (3, None), (4, None), (2, torch.bfloat16), (2, torch.float16)]
)
def test_uncompressed_gradients_are_those_of_fsdp2(ranks, world_size, policy):
    """The mean is divided exactly once, for any number of ranks and for shards of unequal size.

    For float16 FSDP2 asks for sums, and divides before and after.
    """
    ranks(world_size).run(_same_mean, policy)


def _bytes(rank, world_size):
    for recipe, least in (("int8", 3.5), ("int4", 6.5), ("topk:0.05", 6.0), ("onebit", 15.0)):
        _, _, (stats, plan) = _train(rank, 2, recipe)
        assert stats["wire_nbytes"] == plan.sent_nbytes(rank)
        assert stats["residual_nbytes"] == plan.residual_nbytes
        assert plan.work_nbytes(rank) / 4 <= stats["work_nbytes"] <= 1.05 * plan.work_nbytes(rank)
        assert plan.compression_ratio > least, (recipe, plan.compression_ratio)


def test_bytes_are_those_of_the_plan(ranks):
    ranks(4).run(_bytes)


def _loss(rank, world_size):
    """200 steps; the rate is one at which gradients that come late do no harm."""
    _, plain, _ = _train(rank, 200, lr=0.002)
    found = {recipe: _train(rank, 200, recipe, lr=0.002)[1] for recipe in ("int8", "int4", "topk:0.05", "onebit")}
    ends = {recipe: sum(losses[-20:]) / sum(plain[-20:]) for recipe, losses in found.items()}
    assert sum(plain[-20:]) < 0.7 * sum(plain[:20])  # there is something to learn
    assert all(ratio < 1.05 for ratio in ends.values()), ends


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_loss_keeps_up(ranks):
    ranks(4).run(_loss, timeout=180)


def _conserves(rank, world_size):
    """What was delivered and what is owed are together what was due."""
    plain, ours = _model(), _model()
    link = thinwire.attach(ours, "topk:0.05", options=ALL)
    due, delivered = {}, {}
    for step in range(4):
        for model, total in ((plain, due), (ours, delivered)):
            model.zero_grad()
            loss(model, batch(rank, step, width=WIDTH)).backward()
            for name, param in model.named_parameters():
                total[name] = total.get(name, 0) + param.grad.full_tensor().double()
    assert link.stats()["steps"] == link.state.step == 4
    for name, residual in link.state_dict()["worker"].items():
        owed = residual.double()
        dist.all_reduce(owed)
        assert (due[name] - delivered[name] - owed / world_size).abs().max() < 1e-5 * due[name].abs().max()
    link.close()


def test_what_is_not_sent_is_owed(ranks):
    ranks(3).run(_conserves)


def _resumes(rank, world_size, folder):
    def steps(model, link, which):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in which:
            optimizer.zero_grad()
            loss(model, batch(rank, step, width=WIDTH)).backward()
            optimizer.step()
        return digest([*(p.to_local() for p in model.parameters()), *link.state_dict()["worker"].values()])

    model = _model()
    link = thinwire.attach(model, {"0.*": "int8:stochastic", "*": "int4"}, options=ALL)
    steps(model, link, range(3))
    torch.save(link.state_dict(), f"{folder}/{rank}.pt")
    shards = [p.to_local().clone() for p in model.parameters()]
    whole = steps(model, link, range(3, 6))
    link.close()
    model = _model()
    link = thinwire.attach(model, {"0.*": "int8:stochastic", "*": "int4"}, options=ALL)
    with torch.no_grad():
        for param, shard in zip(model.parameters(), shards, strict=True):
            param.to_local().copy_(shard)
    link.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
    assert steps(model, link, range(3, 6)) == whole
    with pytest.raises(StateError):
        link.load_state_dict({})
    link.close()


def test_resume_is_bit_for_bit(ranks, tmp_path):
    ranks(2).run(_resumes, str(tmp_path))


def _other_recipe(rank, world_size):
    """A layer that had a residual and has none now, and one that had none."""
    model = _model()
    link = thinwire.attach(model, {"0.*": "onebit", "*": "int8"}, options=ALL)
    loss(model, batch(rank, 0, width=WIDTH)).backward()
    saved = link.state_dict()
    link.close()
    link = thinwire.attach(model, {"2.*": "onebit", "*": "int8"}, options=ALL)
    with pytest.raises(StateError):
        link.load_state_dict(saved)
    assert link.state.step == 0
    link.load_state_dict(saved, strict=False)
    assert link.state.step == 1
    now = link.state_dict()["worker"]
    assert now.keys() == {"2.weight", "2.bias"}
    assert not any(bool(residual.any()) for residual in now.values())
    loss(model, batch(rank, 1, width=WIDTH)).backward()
    assert link.stats()["steps"] == 1
    link.close()


def test_a_state_of_another_recipe(ranks):
    ranks(2).run(_other_recipe)


def _dcp(rank, world_size, folder):
    """Plain tensors under one key are saved once for all ranks, so that each rank's state has a key of its own."""
    model = _model()
    link = thinwire.attach(model, "int4", options=ALL)
    loss(model, batch(rank, 0, width=WIDTH)).backward()
    saved = link.state_dict()
    dcp.save({"model": model.state_dict(), "thinwire": {f"rank{rank}": saved}}, checkpoint_id=folder)
    link.close()
    model = _model()
    link = thinwire.attach(model, "int4", options=ALL)
    loaded = {"model": model.state_dict(), "thinwire": {f"rank{rank}": link.state_dict()}}
    dcp.load(loaded, checkpoint_id=folder)
    link.load_state_dict(loaded["thinwire"][f"rank{rank}"])
    assert link.state.step == saved["step"] == 1
    residuals = digest(link.state_dict()["worker"].values())
    assert residuals == digest(saved["worker"].values())
    link.close()
    return residuals


def test_checkpoints_by_torch_distributed_checkpoint(ranks, tmp_path):
    assert len(set(ranks(2).run(_dcp, str(tmp_path)))) == 2


def _tied(rank, world_size):
    """Two layers of one group that share a weight: it is sharded, and sent, once."""

    def gradient(recipe):
        model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        model[1].weight = model[0].weight
        fully_shard(model)
        link = None if recipe is None else thinwire.attach(model, recipe, options=ALL)
        loss(model, batch(rank, 0, width=WIDTH)).backward()
        if link is not None:
            link.close()
        return model[0].weight.grad.full_tensor()

    plain = gradient(None)
    assert (gradient("identity") - plain).abs().max() <= 1e-6 * plain.abs().max()


def test_weights_tied_in_one_group(ranks):
    ranks(2).run(_tied)


def _unused(rank, world_size):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.used(x)

    model = fully_shard(seeded(Half))
    link = thinwire.attach(model, "int8", options=ALL)
    model.set_reduce_scatter_unused_params(True)
    loss(model, batch(rank, 0, width=WIDTH)).backward()
    assert model.unused.weight.grad.full_tensor().abs().max() == 0
    link.close()
    model = fully_shard(seeded(Half))
    thinwire.attach(model, "int8", options=ALL)
    with pytest.raises(AttachError, match="set_reduce_scatter_unused_params"):
        loss(model, batch(rank, 0, width=WIDTH)).backward()


def test_unused_parameters_need_fsdp2s_switch(ranks):
    ranks(2).run(_unused)


def _accumulates(rank, world_size):
    model = _model()
    link = thinwire.attach(model, "int8", options=ALL)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss(model, batch(rank, int(last), width=WIDTH)).backward()
    assert link.stats()["steps"] == 1
    assert link.stats()["wire_nbytes"] == link.plan.sent_nbytes(rank)
    link.close()
    before = link.stats()["steps"]
    loss(model, batch(rank, 2, width=WIDTH)).backward()  # FSDP2's own again
    assert link.stats()["steps"] == before


def test_accumulation_sends_once(ranks):
    ranks(2).run(_accumulates)


def _nonfinite(rank, world_size):
    model = _model()
    link = thinwire.attach(model, "int4", options=ALL, on_nonfinite="warn")
    loss(model, batch(rank, 0, width=WIDTH)).backward()
    before = digest(link.state_dict()["worker"].values())
    model.zero_grad()
    (loss(model, batch(rank, 1, width=WIDTH)) * (float("inf") if rank == 1 else 1.0)).backward()
    assert all(bool(grad.isnan().all()) for grad in _gradients(model))
    assert digest(link.state_dict()["worker"].values()) == before
    link.close()
    model = _model()
    thinwire.attach(model, "int4", options=ALL)
    with pytest.raises(NonFiniteError, match="rank 1"):
        (loss(model, batch(rank, 1, width=WIDTH)) * (float("inf") if rank == 1 else 1.0)).backward()


def test_inf_on_one_rank_is_nan_on_all(ranks):
    ranks(2).run(_nonfinite)


def _divides(rank, world_size):
    """FSDP2 asks for a sum and divides it, or for a factor that no sum can have."""
    for sums in (True, False):
        model = _model()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(6.0)
                module.set_force_sum_reduction_for_comms(sums)
        link = thinwire.attach(model, "identity", options=ALL)
        value = loss(model, batch(rank, 0, width=WIDTH))
        if not sums:
            with pytest.raises(AttachError, match="set_force_sum_reduction_for_comms"):
                value.backward()
            break
        value.backward()
        plain = _train(rank, 1)[0]
        for expected, got in zip(plain, _gradients(model), strict=True):
            if got.numel():
                assert torch.allclose(
                    got, expected * world_size / 6, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
                )
        link.close()


def test_who_divides(ranks):
    ranks(3).run(_divides)


def _alone(rank, world_size):
    model = _model()
    link = thinwire.attach(model, "int4", options=ALL)
    loss(model, batch(rank, 0, width=WIDTH)).backward()
    assert "1 ranks" in str(link.plan)
    assert link.stats()["steps"] == 0  # FSDP2 has nothing to send
    link.close()


def test_one_rank(ranks):
    ranks(1).run(_alone)


def _refused(rank, world_size):
    for recipe in ("lowrank:2", "globalexp", "gather/onebit", "topk:0.01@dgc", "int8+int4"):
        with pytest.raises(RecipeError):
            thinwire.attach(_model(), recipe, options=ALL)
    model = _model()
    link = thinwire.attach(model, "int8", options=ALL)
    with pytest.raises(AttachError, match="already"):
        thinwire.attach(model, "int8", options=ALL)
    link.close()
    mesh = dist.init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(AttachError, match="2 dimensions"):
        thinwire.attach(fully_shard(nn.Linear(8, 8), mesh=mesh), "int8")
    with pytest.raises(AttachError, match="check_replicas_every"):
        thinwire.attach(_model(), "int8", check_replicas_every=1)
    with pytest.raises(AttachError, match="Allocate"):
        thinwire.attach(_model(), thinwire.Allocate(candidates=["int2", "int4"], default="int4"))
    with pytest.raises(AttachError, match="Auto"):
        thinwire.attach(_model(), "auto")


def test_what_cannot_be_served_is_refused(ranks):
    ranks(2).run(_refused)
