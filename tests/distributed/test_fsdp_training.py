"""What training does around FSDP2's reductions: loss scales, schedules, accumulation, clipping, checkpointed layers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from training import ALL, batch, digest, loss, seeded

import thinwire
from thinwire.errors import AttachError, LossScaleError, PlanError, RecipeError

WIDTH = 32


def _model() -> Any:
    """Three groups, and of 3 ranks one gets less of a weight of 50 rows."""
    model = seeded(
        lambda: nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, WIDTH), nn.Linear(WIDTH, WIDTH))
    )
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _bits(model, link=None):
    """Return a hash of this rank's shards, and of what it owes."""
    state = {} if link is None else link.state_dict()
    return digest([*(p.to_local() for p in model.parameters()), *state.get("worker", {}).values()])


def _gradients(model):
    return digest(p.grad.to_local() for p in model.parameters())


def _backward(model, rank, step, factor=1.0):
    model.zero_grad()
    (loss(model, batch(rank, step, width=WIDTH)) * factor).backward()


# --- loss scales ------------------------------------------------------------------------------------------------------


def _steps(rank, recipe, steps, bad=None, with_scaler=True):
    """Train with a scale that doubles every second step; in step `bad` rank 1's loss is inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2, enabled=with_scaler)
    model = _model()
    link = thinwire.attach(model, recipe, options=ALL, scaler=scaler)
    optimizer = _sgd(model)
    for step in steps:
        optimizer.zero_grad()
        before = _bits(model, link)  # now: in between the root's parameters are whole
        value = loss(model, batch(rank, step, width=WIDTH))
        scaler.scale(value * (float("inf") if step == bad and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (_bits(model, link) == before) == (step == bad)
    state = link.state_dict()
    owed = digest(residual / state["loss_scale"] for residual in state["worker"].values())
    found = _bits(model), owed, link.state.step, link.skipped_steps
    assert link.stats()["skipped_steps"] == found[3]
    link.close()
    return found, scaler.get_scale()


def _scaled(rank, world_size, recipe):
    """Scales are powers of two, which round nothing: so the bits are those of training without one."""
    plain, _ = _steps(rank, recipe, range(6), with_scaler=False)
    scaled, scale = _steps(rank, recipe, range(6))
    assert scaled == plain
    assert scale > 2.0**6
    without, _ = _steps(rank, recipe, [0, 1, 3, 4, 5], with_scaler=False)
    skipping, _ = _steps(rank, recipe, range(6), bad=2)
    assert skipping[:3] == without[:3]
    assert (skipping[3], without[3]) == (1, 0)


@pytest.mark.parametrize("recipe", ["int4", "topk:0.1", "int8:stochastic"])
def test_a_skipped_step_leaves_everything_as_it_was(ranks, recipe):
    ranks(2).run(_scaled, recipe)


class _Products(nn.Module):
    """Two groups whose gradients are what is put in."""

    def __init__(self):
        super().__init__()
        self.a, self.b = _Product(), _Product()

    def forward(self, a, b):
        return self.a(a) + self.b(b)


class _Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64))

    def forward(self, x):
        return (self.weight * x).sum()


def _one_shard(rank, world_size, recipe, a, b):
    """One rank keeps what is not finite, and no message says so: all put their residuals back, as all skip."""
    model: Any = seeded(_Products)
    for layer in (model.a, model.b):
        fully_shard(layer)
    fully_shard(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = _sgd(model)
    link = thinwire.attach(model, recipe, options=ALL, scaler=scaler)
    for last in (False, True):
        optimizer.zero_grad()
        before = _bits(model, link)
        factors = [torch.randn(4, 64), torch.randn(4, 64)]
        if last:
            factors[0][3], factors[1][3] = a, b
        scaler.scale(model(*factors)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (_bits(model, link) == before) == last
    assert (link.state.step, link.skipped_steps, scaler.get_scale()) == (1, 1, 0.5)
    link.close()


@pytest.mark.parametrize(
    ("recipe", "a", "b"),
    [
        ("int4", 1.0, 3e38),  # a sum that overflows in one shard
        ({"a.*": "dense", "*": "int4"}, float("inf"), 1.0),  # in a group that FSDP2 goes on to reduce
    ],
)
def test_what_one_rank_alone_sees_is_skipped_by_all(ranks, recipe, a, b):
    ranks(2).run(_one_shard, recipe, a, b)


def _scales_differ(rank, world_size):
    with pytest.raises(PlanError, match="scaler=of scale"):
        thinwire.attach(_model(), "int4", scaler=torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank)))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = _model()
    link = thinwire.attach(model, "int4", options=ALL, scaler=scaler)
    _backward(model, rank, 0, scaler.get_scale())
    before = digest(link.state_dict()["worker"].values())
    if rank == 1:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
    with pytest.raises(LossScaleError, match="GradScalers of one scale"):
        _backward(model, rank, 1, scaler.get_scale())
    assert digest(link.state_dict()["worker"].values()) == before


def test_scales_that_differ_are_told_to_all(ranks):
    ranks(3).run(_scales_differ)


def _replicas_skip(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(seeded(nn.Linear, WIDTH, WIDTH), mesh=mesh["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = _sgd(model)
    link = thinwire.attach(
        model, "int4", replicate_group=mesh["replicate"], replicate_recipe="topk:0.1", scaler=scaler, options=ALL
    )

    def owed():
        state = link.state_dict()
        kept = [*state["worker"].values(), *state["replicas"]["worker"].values(), *state["replicas"]["owner"].values()]
        return digest(kept)

    for step in range(4):
        optimizer.zero_grad()
        before = owed()
        value = loss(model, batch(rank, step, width=WIDTH)) * (float("inf") if (step, rank) == (2, 3) else 1.0)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (owed() == before) == (step == 2)
    assert (link.state.step, link.skipped_steps) == (3, 1)
    assert link.state_dict()["loss_scale"] == link.state_dict()["replicas"]["loss_scale"] == 8.0
    shards = digest(p.to_local() for p in model.parameters())
    link.close()
    return shards


def test_replicas_skip_together(ranks):
    first, second, *others = ranks(4).run(_replicas_skip)
    assert others == [first, second]


# --- schedules --------------------------------------------------------------------------------------------------------


def _starts_dense(rank, world_size, start):
    """Dense phases are FSDP2's own, to the bit; then the recipe counts from there."""
    plain, ours = _model(), _model()
    link = thinwire.attach(ours, **start, options=ALL)
    sent = []
    for step in range(4):
        for model in (plain, ours):
            _backward(model, rank, step)
        assert (_gradients(plain) == _gradients(ours)) == (step < 2)
        stats = link.stats()
        sent.append(stats["wire_nbytes"] * stats["steps"])
    once = link.plan.sent_nbytes(rank)
    assert sent == [0, 0, once, 2 * once]
    assert link.state.step == 4
    assert "from step 2 on" in str(link.phases)
    link.close()
    assert once > 0


@pytest.mark.parametrize(
    "start",
    [{"recipe": "dense until 2 then int4"}, {"recipe": "topk:0.1", "start_after": 2}],
    ids=["text", "start_after"],
)
def test_compression_begins_where_the_schedule_says(ranks, start):
    ranks(3).run(_starts_dense, start)


def _delivers(rank, world_size):
    """What one phase owes the next delivers: due and delivered are then the same, and nothing is left."""
    plain, ours = _model(), _model()
    link = thinwire.attach(ours, "topk:0.05 until 2 then dense", options=ALL)
    due, delivered = {}, {}
    for step in range(3):
        for model, total in ((plain, due), (ours, delivered)):
            _backward(model, rank, step)
            for name, param in model.named_parameters():
                total[name] = total.get(name, 0) + param.grad.full_tensor().double()
        assert any(bool(one.any()) for one in link.state_dict()["worker"].values()) == (step < 2)
    for name in due:
        assert (due[name] - delivered[name]).abs().max() < 1e-5 * due[name].abs().max()
    link.close()


def test_a_phase_delivers_what_the_one_before_owes(ranks):
    ranks(2).run(_delivers)


def _ramps(rank, world_size, folder):
    """Bytes fall from stage to stage; and a run that is resumed in the middle repeats the other, bit for bit."""
    recipe = thinwire.Schedule([(0, thinwire.Ramp(recipe="topk:0.01", steps=4))])

    def steps(model, link, which):
        optimizer, sent = torch.optim.SGD(model.parameters(), lr=0.05), []
        for step in which:
            before = link.stats()["wire_nbytes"] * link.stats()["steps"]
            _backward(model, rank, step)
            optimizer.step()
            sent.append(round(link.stats()["wire_nbytes"] * link.stats()["steps"] - before))
        return sent, _bits(model, link)

    model = _model()
    link = thinwire.attach(model, recipe, options=ALL)
    first, _ = steps(model, link, range(3))
    torch.save(link.state_dict(), f"{folder}/{rank}.pt")
    shards = [p.to_local().clone() for p in model.parameters()]
    rest, bits = steps(model, link, range(3, 6))
    every = [*first, *rest]
    assert every == sorted(every, reverse=True)
    assert rest[1] == rest[2] < first[0] / 4
    link.close()
    model = _model()
    link = thinwire.attach(model, recipe, options=ALL)
    with torch.no_grad():
        for param, shard in zip(model.parameters(), shards, strict=True):
            param.to_local().copy_(shard)
    state = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    link.load_state_dict(state)
    assert steps(model, link, range(3, 6)) == (rest, bits)
    link.load_state_dict({**state, "step": state["step"] + rank})
    with pytest.raises(PlanError, match="step="):
        _backward(model, rank, 9)


def test_ramps_and_ranks_that_count_other_steps(ranks, tmp_path):
    ranks(2).run(_ramps, str(tmp_path))


def _replicas_start(rank, world_size):
    """Both exchanges wait; replicas get the exact mean until then."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = fully_shard(seeded(nn.Linear, WIDTH, WIDTH), mesh=mesh)
    ours = fully_shard(seeded(nn.Linear, WIDTH, WIDTH), mesh=mesh["shard"])
    link = thinwire.attach(
        ours,
        "int8",
        replicate_group=mesh["replicate"],
        replicate_recipe="dense until 3 then int4",
        options=ALL,
        start_after=1,
    )
    assert [start for start, _ in link.phases.plans] == [0, 1, 4]
    for step, close in enumerate((1e-6, 2e-2, 2e-2, 2e-2, 0.5)):
        for model in (plain, ours):
            _backward(model, rank, step)
        expected, got = plain.weight.grad.to_local(), ours.weight.grad.to_local()
        error = float((expected - got).abs().max() / expected.abs().max())
        assert close / 300 < error < close if step else error < close
    link.close()


def test_both_exchanges_have_schedules(ranks):
    ranks(4).run(_replicas_start)


def _refused(rank, world_size):
    with pytest.raises(PlanError, match="cannot deliver"):
        thinwire.attach(_model(), "int4 until 2 then int8:stochastic", options=ALL)
    with pytest.raises(RecipeError, match="has no reduce-scatter"):
        thinwire.attach(_model(), "dense until 2 then gather/onebit", options=ALL)
    with pytest.raises(AttachError, match="start_after"):
        thinwire.attach(_model(), "int4", start_after=-1)


def test_schedules_that_cannot_be_served_are_refused(ranks):
    ranks(2).run(_refused)


# --- several backward passes, clipping, checkpointed layers -----------------------------------------------------------


def _window(rank, world_size, recipe):
    """Of four micro-batches one exchange is made, with `accumulate`; without, four."""
    results = []
    for saving in (True, False):
        model = _model()
        link = thinwire.attach(model, recipe, options=ALL)
        touched = []
        for micro in range(4):
            before = digest(link.state_dict()["worker"].values())
            with thinwire.accumulate(model, sync=micro == 3 or not saving):
                loss(model, batch(rank, micro, width=WIDTH)).backward()
            touched.append(digest(link.state_dict()["worker"].values()) != before)
        stats = link.stats()
        assert stats["steps"] * stats["wire_nbytes"] == (1 if saving else 4) * link.plan.sent_nbytes(rank)
        assert touched == ([False, False, False, True] if saving else [True] * 4)
        results.append([p.grad.full_tensor() for p in model.parameters()])
        link.close()
    plain = _model()
    for micro in range(4):
        loss(plain, batch(rank, micro, width=WIDTH)).backward()
    for saved, param in zip(results[0], plain.parameters(), strict=True):
        exact = param.grad.full_tensor()
        assert (saved - exact).norm() < 0.2 * exact.norm()  # of the sum of all four


def test_accumulation_sends_a_quarter(ranks):
    ranks(2).run(_window, "int4")


def _clipped(rank, world_size):
    """The norm is that of the delivered mean, and clipping changes nothing that is owed."""
    model, norms = _model(), []
    link = thinwire.attach(model, "int4", options=ALL)
    for step in range(2):
        _backward(model, rank, step)
        owed = digest(link.state_dict()["worker"].values())
        delivered = [p.grad.full_tensor() for p in model.parameters()]
        norm = torch.stack([g.norm() for g in delivered]).norm()
        got: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 4)
        norms.append(got.full_tensor())
        assert torch.allclose(norms[-1], norm, rtol=1e-5)
        for param, whole in zip(model.parameters(), delivered, strict=True):
            assert torch.allclose(param.grad.full_tensor(), whole / 4, rtol=1e-4, atol=1e-6)
        assert digest(link.state_dict()["worker"].values()) == owed
    link.close()
    return digest(norms)


def test_clipping_sees_the_delivered_mean(ranks):
    assert len(set(ranks(3).run(_clipped))) == 1


class _Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass, inside a pass of their own if `reentrant`."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x.requires_grad_() if not x.requires_grad else x, use_reentrant=self.reentrant)
            assert isinstance(x, torch.Tensor)
        return x


def _checkpoints(rank, world_size):
    """Every backward pass is one step, however layers are computed again."""
    seen = []
    for reentrant in (False, True):
        model: Any = seeded(_Checkpointed, reentrant)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        link = thinwire.attach(model, "int8:stochastic", options=ALL)
        for step in range(2):
            _backward(model, rank, step)
        assert (link.stats()["steps"], link.state.step) == (2, 2)
        assert link.stats()["wire_nbytes"] == link.plan.sent_nbytes(rank)
        seen.append(_gradients(model))
        link.close()
    assert seen[0] == seen[1]


def test_checkpointed_layers_are_reduced_in_one_step(ranks):
    ranks(2).run(_checkpoints)
