"""Replicas of a sharded model: FSDP2 over one dimension of a mesh and thinwire over the other, against FSDP2's HSDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import ALL, batch, digest, loss, seeded

import thinwire
from thinwire.errors import AttachError, NonFiniteError, PlanError, RecipeError, StateError

WIDTH = 48


def _mesh(num_replicas=2):
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _bare(seed=0) -> Any:
    """48 and 50 rows: of 3 ranks one gets less of the second."""
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        ),
        seed=seed,
    )


def _model(mesh, seed=0, **kwargs: Any) -> Any:
    """Two groups and the root's."""
    model = _bare(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def _attached(recipe, between, num_replicas=2, seed=0, options=ALL, **kwargs: Any) -> Any:
    mesh = _mesh(num_replicas)
    model = _model(mesh["shard"], seed)
    group = mesh["replicate"]
    return model, thinwire.attach(
        model, recipe, replicate_group=group, replicate_recipe=between, options=options, **kwargs
    )


def _gradients(model):
    return [p.grad.to_local().clone() for p in model.parameters()]


def _backward(model, rank, step, scale=1.0):
    model.zero_grad()
    (loss(model, batch(rank, step, width=WIDTH)) * scale).backward()


def _same_mean(rank, world_size, num_replicas, policy):
    kwargs: dict[str, Any] = {} if policy is None else {"mp_policy": MixedPrecisionPolicy(reduce_dtype=policy)}
    mesh = _mesh(num_replicas)
    plain, ours = _model(mesh, **kwargs), _model(mesh["shard"], **kwargs)
    link = thinwire.attach(ours, "dense", replicate_group=mesh["replicate"].get_group(), options=ALL)
    for model in (plain, ours):
        _backward(model, rank, 0)
    tolerance = 1e-6 if policy is None else 1e-2  # sums in another order; gloo rounds every partial one to 16 bits
    for expected, got in zip(_gradients(plain), _gradients(ours), strict=True):
        if got.numel():
            assert (expected - got).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    link.close()


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "policy"),
    [(4, 2, None), (6, 3, None), (6, 2, None), (4, 2, torch.bfloat16), (4, 2, torch.float16)],
)
def test_uncompressed_gradients_are_those_of_hsdp(ranks, world_size, num_replicas, policy):
    """The mean over shards and replicas is divided once by each."""
    ranks(world_size).run(_same_mean, num_replicas, policy)


def _counted(rank, world_size):
    found = []
    for recipe in ("int4", "topk:0.05", "onebit", "gather/int8", "powersgd:2"):
        model, link = _attached("dense", recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            _backward(model, rank, step)
            optimizer.step()
        plan, replica = link.plan.replicas, link.state_dict()["replicas"]["rank"]
        rounds = [r for names in link.plan.groups for m in plan.messages(names) for r in m.rounds]
        assert link.stats()["replicas"]["wire_nbytes"] == sum(r.sent_nbytes(replica) for r in rounds)
        assert "between replicas" in str(link.plan)
        found.append((plan.compression_ratio, digest(p.to_local() for p in model.parameters())))
        link.close()
    return found


def test_replicas_stay_equal_to_the_bit_and_bytes_are_those_of_the_plan(ranks):
    of_rank = ranks(4).run(_counted)
    for (ratio, first), (_, second) in zip([*of_rank[0], *of_rank[1]], [*of_rank[2], *of_rank[3]], strict=True):
        assert first == second
        assert ratio > 3


def _conserves(rank, world_size):
    """What was delivered, what shards are owed and what replicas are owed are together what was due."""
    mesh = _mesh()
    plain = _model(mesh)
    model, link = _attached("int4", "topk:0.1", weights="identity")
    due, delivered = {}, {}
    for step in range(4):
        for one, total in ((plain, due), (model, delivered)):
            _backward(one, rank, step)
            for name, param in one.named_parameters():
                total[name] = total.get(name, 0) + param.grad.to_local().double()
    state = link.state_dict()
    shard = mesh["shard"].get_local_rank()
    for name, gap in ((name, due[name] - delivered[name]) for name in due):
        owed = state["worker"][name].double()
        dist.all_reduce(owed)
        owed = owed.chunk(2)[shard] / world_size
        between = state["replicas"]["worker"][name].double() / 2 + state["replicas"]["owner"][name].double()
        dist.all_reduce(between, group=mesh["replicate"].get_group())
        assert (gap - owed - between).abs().max() < 1e-5 * due[name].abs().max()
    link.close()


def test_what_is_not_sent_is_owed(ranks):
    ranks(4).run(_conserves)


def _resumes(rank, world_size, folder):
    def steps(model, link, which):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in which:
            _backward(model, rank, step)
            optimizer.step()
        state = link.state_dict()
        owed = [*state["worker"].values(), *state["replicas"]["worker"].values(), *state["replicas"]["owner"].values()]
        return digest([*(p.to_local() for p in model.parameters()), *owed])

    model, link = _attached("int8:stochastic", "int4")
    steps(model, link, range(3))
    torch.save(link.state_dict(), f"{folder}/{rank}.pt")
    shards = [p.to_local().clone() for p in model.parameters()]
    whole = steps(model, link, range(3, 6))
    with pytest.raises(StateError, match="one file a rank"):
        thinwire.Checkpointable(link).state_dict()
    link.close()
    model, link = _attached("int8:stochastic", "int4")
    with torch.no_grad():
        for param, shard in zip(model.parameters(), shards, strict=True):
            param.to_local().copy_(shard)
    saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    link.load_state_dict(saved)
    assert steps(model, link, range(3, 6)) == whole
    before = digest(link.state_dict()["replicas"]["worker"].values())
    for wrong in ({**saved["replicas"], "shard_rank": 7}, {**saved["replicas"], "rank": 7}):
        with pytest.raises(StateError):
            link.load_state_dict({**saved, "replicas": wrong})
    with pytest.raises(StateError):
        link.load_state_dict({**saved, "rank": 7})
    with pytest.raises(StateError, match="replicate_group"):
        link.load_state_dict({key: value for key, value in saved.items() if key != "replicas"})
    with pytest.raises(StateError, match="re-sharded"):
        thinwire.reshard_state([saved], 2)
    assert digest(link.state_dict()["replicas"]["worker"].values()) == before
    assert link.state.step == 6
    link.load_state_dict({key: value for key, value in saved.items() if key != "replicas"}, strict=False)
    assert link.state.step == 3
    assert not any(bool(residual.any()) for residual in link.state_dict()["replicas"]["worker"].values())
    link.close()


def test_resume_is_bit_for_bit(ranks, tmp_path):
    ranks(4).run(_resumes, str(tmp_path))


def _nonfinite(rank, world_size):
    model, link = _attached("int4", "topk:0.1", on_nonfinite="warn")
    _backward(model, rank, 0)

    def owed():
        state = link.state_dict()
        return digest([*state["worker"].values(), *state["replicas"]["worker"].values()])

    before = owed()
    _backward(model, rank, 1, float("inf") if rank == 1 else 1.0)
    assert all(bool(grad.isnan().all()) for grad in _gradients(model))
    assert owed() == before
    _backward(model, rank, 2)
    assert all(bool(grad.isfinite().all()) for grad in _gradients(model))
    link.close()
    model, _ = _attached("int4", "topk:0.1")
    with pytest.raises(NonFiniteError, match="rank 1" if rank < 2 else "replicas as ranks, of .* on rank 0"):
        _backward(model, rank, 1, float("inf") if rank == 1 else 1.0)


def test_inf_in_one_replica_is_nan_in_all_and_owed_to_none(ranks):
    ranks(4).run(_nonfinite)


class _Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64))

    def forward(self, x):
        return (self.weight * x).sum()


def _overflows(rank, world_size):
    """The sum of one shard of one replica: those who keep the other shard see nothing of it by themselves."""
    for on_nonfinite in ("warn", "raise"):
        mesh = _mesh()
        model = fully_shard(seeded(_Product), mesh=mesh["shard"])
        link = thinwire.attach(model, "int4", replicate_group=mesh["replicate"], options=ALL, on_nonfinite=on_nonfinite)
        model(torch.randn(4, 64)).backward()

        def owed(link=link):
            state = link.state_dict()
            return digest([*state["worker"].values(), *state["replicas"]["worker"].values()])

        before = owed()
        model.zero_grad()
        factors = torch.ones(4, 64)
        factors[3] = 3e38 if rank < 2 else 1.0
        if on_nonfinite == "raise":
            with pytest.raises(NonFiniteError, match="replicas as ranks"):
                model(factors).backward()
            continue
        model(factors).backward()
        assert all(bool(grad.isnan().all()) for grad in _gradients(model))
        assert owed() == before
        link.close()


def test_a_sum_that_overflows_is_nan_on_all_ranks(ranks):
    ranks(4).run(_overflows)


def _refused(rank, world_size):
    mesh = _mesh()
    with pytest.raises(AttachError, match="different weights"):
        _attached("int8", None, seed=rank // 2)
    with pytest.raises(PlanError, match="different plans"):
        _attached("int8", "int8" if rank < 2 else "int4")
    # One rank asks for another seed: whoever is told, all raise.
    with pytest.raises((AttachError, PlanError), match=r"different plans|could not"):
        _attached("int8", None, options=thinwire.PlanOptions(seed=int(rank == 3)))
    with pytest.raises(RecipeError, match="ErrorFeedback"):
        _attached("int8", "topk:0.1@dgc")
    with pytest.raises(PlanError, match="without parameter servers"):
        _attached("int8", thinwire.PushPull(up=thinwire.BlockQuant(bits=8), down=thinwire.BlockQuant(bits=8)))
    with pytest.raises(AttachError, match="share ranks"):
        thinwire.attach(_model(mesh["shard"]), "int8", replicate_group=mesh["shard"])
    with pytest.raises(AttachError, match="one dimension"):
        thinwire.attach(_model(mesh["shard"]), "int8", replicate_group=mesh)
    with pytest.raises(AttachError, match="replicate_group"):
        thinwire.attach(_model(mesh["shard"]), "int8", replicate_recipe="int8")
    with pytest.raises(AttachError, match="DistributedDataParallel"):
        _attached("int8", None, num_replicas=4)
    with pytest.raises(AttachError, match="2 dimensions"):
        thinwire.attach(_model(mesh), "int8")
    model = _model(mesh["shard"])
    with torch.no_grad():
        model(batch(rank, 0, width=WIDTH))
    with pytest.raises(AttachError, match="reshard"):
        thinwire.attach(model, "int8")


def test_what_cannot_be_served_is_refused_on_all_ranks(ranks):
    ranks(4).run(_refused)


def _ends(model, link, rank):
    """Train for 200 steps; return the sums of the first and the last 20 losses over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    losses = []
    for step in range(200):
        optimizer.zero_grad()
        value = loss(model, batch(rank, step, width=WIDTH))
        value.backward()
        optimizer.step()
        dist.all_reduce(total := value.detach().clone())
        losses.append(float(total))
    link.close()
    return sum(losses[:20]), sum(losses[-20:])


def _loss(rank, world_size):
    """Two-way top-k is behind dense after 200 steps, under DDP too: DDP with the same recipe is what counts."""
    ends, ddp = {}, {}
    for recipe in ("dense", "int4", "topk:0.05"):
        model, link = _attached("dense", recipe)
        first, ends[recipe] = _ends(model, link, rank)
        assert ends[recipe] < 0.7 * first  # there is something to learn
        model = nn.parallel.DistributedDataParallel(_bare())
        _, ddp[recipe] = _ends(model, thinwire.attach(model, recipe, options=ALL), rank)
    assert all(ends[recipe] < 1.03 * ddp[recipe] for recipe in ends), (ends, ddp)
    assert ends["int4"] < 1.05 * ends["dense"], ends


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_loss_keeps_up(ranks):
    ranks(4).run(_loss, timeout=180)
