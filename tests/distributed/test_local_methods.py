"""Local SGD, post-local SGD, DiLoCo and Streaming DiLoCo in real processes, against references computed apart."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import ALL, Tower, batch, digest, loss, seeded

import thinwire
from thinwire.algorithms.planned import planned
from thinwire.errors import NonFiniteError

WIDTH, DEPTH = 24, 3


def _model(seed=0):
    return seeded(Tower, WIDTH, DEPTH, seed=seed)


def _inner(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def _step(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss(model, batch(rank, step, width=WIDTH)).backward()
    optimizer.step()


def _flat(model):
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).double().numpy()


def _load(model, flat):
    start = 0
    for p in model.parameters():
        p.data.copy_(torch.from_numpy(flat[start : start + p.numel()]).view(p.shape))
        start += p.numel()


def _theta(outer):
    return digest(outer.state_dict()["theta"].values())


# --- against NumPy ----------------------------------------------------------------------------------------------------


def _reference(world_size, steps, period, lr, momentum):
    """Train all ranks here, in turn, with an outer optimizer in float64; return the models after each step, by rank."""
    models = [_model() for _ in range(world_size)]
    inner = [_inner(model) for model in models]
    theta, u, seen = _flat(models[0]), np.zeros(1), []
    for step in range(1, steps + 1):
        for rank in range(world_size):
            _step(models[rank], inner[rank], rank, step)
        if step % period == 0:
            difference = np.mean([theta - _flat(model) for model in models], axis=0)
            u = momentum * u + difference
            theta = theta - lr * (difference + momentum * u)
            for model in models:
                _load(model, theta)
        seen.append([_flat(model) for model in models])
    return seen


def _train(rank, steps, outer_of, model=None):
    model = model or _model()
    inner = _inner(model)
    outer = outer_of(model, inner)
    seen = []
    for step in range(1, steps + 1):
        _step(model, inner, rank, step)
        seen.append(_flat(model))
    outer.close()
    return seen


def _as_numpy(rank, world_size):
    for period, lr, momentum in ((1, 1.0, 0.0), (4, 1.0, 0.0), (3, 0.7, 0.9)):
        expected = _reference(world_size, 9, period, lr, momentum)
        got = _train(
            rank,
            9,
            lambda model, inner, H=period, lr=lr, momentum=momentum: thinwire.DiLoCo(
                model, inner, sync_every=H, outer_lr=lr, outer_momentum=momentum
            ),
        )
        for step, (ours, theirs) in enumerate(zip(got, expected, strict=True), start=1):
            assert np.abs(ours - theirs[rank]).max() < 2e-5, (period, step)
            apart = np.abs(theirs[0] - theirs[-1]).max()
            assert (apart == 0) == (world_size == 1 or step % period == 0)  # the test can tell them apart


@pytest.mark.parametrize("world_size", [1, 3])
def test_outer_steps_are_those_of_numpy(ranks, world_size):
    """H = 1 with rate 1 and no momentum is parameter averaging in every step."""
    ranks(world_size).run(_as_numpy)


def _averages(rank, world_size):
    """Which steps end with equal models, for a period of 4, evaluations and skipped optimizers in between."""
    model = _model()
    inner = torch.optim.AdamW(
        [{"params": model.layers[:1].parameters()}, {"params": model.layers[1:].parameters(), "lr": 1e-2}], lr=1e-3
    )
    outer = thinwire.LocalSGD(model, inner, sync_every=4)
    equal = []
    for step in range(1, 11):
        for _ in range(2):  # two backward passes a step, as with accumulation, and an evaluation
            loss(model, batch(rank, 2 * step, width=WIDTH)).backward()
        with torch.no_grad():
            model(batch(rank, step, width=WIDTH))
        inner.step()
        inner.zero_grad()
        everyone = [None] * world_size
        dist.all_gather_object(everyone, [digest([p]) for p in model.parameters()])
        same = {len(set(column)) == 1 for column in zip(*everyone, strict=True)}
        assert len(same) == 1  # all groups, or none
        equal.append(same.pop())
    outer.close()
    inner.step()  # the hook is gone
    return [step for step, same in enumerate(equal, start=1) if same], outer.step


def test_a_period_of_four_averages_at_exactly_four_and_eight(ranks):
    assert ranks(2).run(_averages) == [([4, 8], 10)] * 2


def _alone(rank, world_size):
    plain = _model()
    inner = _inner(plain)
    expected = []
    for step in range(1, 8):
        _step(plain, inner, rank, step)
        expected.append(_flat(plain))
    for outer_of in (
        lambda model, inner: thinwire.LocalSGD(model, inner, "int4", sync_every=2),
        lambda model, inner: thinwire.PostLocalSGD(model, inner, "int4", sync_every=2, start_after=3),
        lambda model, inner: thinwire.DiLoCo(model, inner, "int4", sync_every=2, outer_lr=1, outer_momentum=0),
    ):
        got = _train(rank, 7, outer_of)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def test_alone_training_is_plain_training(ranks):
    ranks(1).run(_alone)


# --- what travels -----------------------------------------------------------------------------------------------------

RECIPES = [
    "dense",
    "int8",
    "int4",
    "e3m0",
    "gather/e3m0",
    "topk:0.1:chunked~int2",
    "topk:0.1@ef:decay=0.9",
    "powersgd:2",
    "global:8",
    "topk:0.2@ef21",
]


def _delivers(rank, world_size, recipes):
    """Replicas are equal to the bit after every outer step, and bytes counted are bytes planned."""
    for recipe in recipes:
        model = _model()
        inner = _inner(model)
        outer = thinwire.DiLoCo(model, inner, recipe, sync_every=2, options=ALL)
        for step in range(1, 7):
            _step(model, inner, rank, step)
            if step % 2 == 0:
                everyone = [None] * world_size
                dist.all_gather_object(everyone, (digest(model.parameters()), _theta(outer)))
                assert len(set(everyone)) == 1, recipe
        stats = outer.stats()
        assert (stats["steps"], stats["exchanges"]) == (6, 3)
        assert stats["wire_nbytes"] == outer.planned_nbytes() > 0
        foreseen = planned("", "diloco", recipe, list(model.named_parameters()), world_size, sync_every=2, options=ALL)
        rounds = [r for names in foreseen.parts for layout in foreseen.plan.messages(names) for r in layout.rounds]
        assert sum(r.sent_nbytes(rank) for r in rounds) == outer.planned_nbytes(), "what advise foresees"
        outer.close()


def test_every_kind_of_recipe_leaves_equal_replicas_and_the_bytes_planned(ranks):
    ranks(3).run(_delivers, RECIPES)


def _conserves(rank, world_size, recipe):
    """All differences there were are what theta has moved by, and what is still owed."""
    model, twin = _model(), _model()
    inner, twin_inner = _inner(model), _inner(twin)
    outer = thinwire.DiLoCo(model, inner, recipe, sync_every=3, outer_lr=1, outer_momentum=0, options=ALL)
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    due = {name: torch.zeros_like(value) for name, value in start.items()}
    for step in range(1, 10):
        if step % 3 == 0:  # what this rank will give: a twin takes the same step without the exchange
            twin.load_state_dict(model.state_dict())
            twin_inner.load_state_dict(copy.deepcopy(inner.state_dict()))
            _step(twin, twin_inner, rank, step)
            theta = outer.state_dict()["theta"]
            for name, p in twin.named_parameters():
                due[name] += theta[name].double() - p.detach().double()
        _step(model, inner, rank, step)
    state = outer.state_dict()
    for name, value in due.items():
        owed = state["exchange"]["worker"][name].double() / world_size + state["exchange"]["owner"][name].double()
        dist.all_reduce(owed)
        dist.all_reduce(value)
        moved = start[name] - state["theta"][name].double()
        gap = (value / world_size - moved - owed).abs().max()
        assert owed.any()
        assert gap < 1e-5 * max(float(value.abs().max()), 1e-3), (name, float(gap))
    outer.close()


@pytest.mark.parametrize("recipe", ["int4", "topk:0.05:chunked~int2"])
def test_what_is_not_sent_is_owed(ranks, recipe):
    ranks(3).run(_conserves, recipe)


# --- tensors that move otherwise, or not at all -----------------------------------------------------------------------


class _Odd(nn.Module):
    """BatchNorm, a parameter that no rank uses, one that only rank 0 uses, a frozen one, and a 16-bit one."""

    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)
        self.never, self.sometimes = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.register_buffer("table", torch.randn(100))
        self.register_buffer("places", torch.arange(5))

    def forward(self, x, use):
        y = self.frozen(torch.tanh(self.norm(self.into(x))))
        y = y + self.narrow(y.to(torch.bfloat16)).float()
        return y + self.sometimes(y) if use else y


def _odd(rank, world_size, recipe, buffers):
    model = seeded(_Odd)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outer = thinwire.DiLoCo(
        model, inner, recipe, sync_every=3, outer_lr=1, outer_momentum=0, buffers=buffers, options=ALL
    )
    names = [param.info.name for param in outer.plan.params]
    assert ("norm.running_mean" in names) == (buffers == "mean")
    assert "frozen.weight" not in names
    for step in range(1, 7):
        inner.zero_grad()
        x = batch(rank, step, width=WIDTH)
        model(x, use=rank == 0).square().mean().backward()
        if step % 3 == 0:
            local = model.norm.running_var.clone()
        inner.step()
    after = model.state_dict()
    everyone = [None] * world_size
    dist.all_gather_object(everyone, {name: digest([value]) for name, value in after.items()})
    differing = {name for name in after if len({one[name] for one in everyone}) > 1}
    local_too = {"norm.running_mean", "norm.running_var"} if buffers == "local" else set()
    assert differing == local_too
    same = {name for name in after if digest([after[name]]) == digest([before[name]])}
    assert same == {"never.weight", "never.bias", "frozen.weight", "frozen.bias", "table", "places"}
    assert int(after["norm.num_batches_tracked"]) == 6
    if buffers == "mean":  # uncompressed, and without momentum: their mean
        dist.all_reduce(local)
        assert torch.allclose(after["norm.running_var"], local / world_size, rtol=1e-5)
    outer.close()


@pytest.mark.parametrize(("recipe", "buffers"), [("int4", "mean"), ("dense", "local"), ("onebit", "mean")])
def test_odd_tensors(ranks, recipe, buffers):
    """What has no gradient anywhere stays as it is, to the bit; BatchNorm's buffers follow the setting."""
    ranks(2).run(_odd, recipe, buffers)


def _no_progress(rank, world_size):
    """A 16-bit model cannot be theta, and what it lacks of it is not taken for progress."""
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = thinwire.LocalSGD(model, inner, sync_every=1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.003 * (rank + 1))  # the mean of models is no bfloat16
    inner.step()
    theta, bits = _theta(outer), digest(model.parameters())
    inner.zero_grad()
    inner.step()  # no gradient: nothing moves
    assert (theta, bits) == (_theta(outer), digest(model.parameters()))
    outer.close()


def test_rounding_of_16_bit_models_is_no_progress(ranks):
    ranks(3).run(_no_progress)


def _two_optimizers(rank, world_size):
    model = _model()
    one = torch.optim.SGD(model.layers[:2].parameters(), lr=0.02)
    two = torch.optim.AdamW(model.layers[2:].parameters(), lr=1e-3)
    outer = thinwire.LocalSGD(model, [one, two], "int8", sync_every=2)
    for step in range(1, 5):
        model.zero_grad()
        loss(model, batch(rank, step, width=WIDTH)).backward()
        one.step()
        two.step()
    assert outer.step == 4
    outer.close()
    return digest(model.parameters())


def test_several_optimizers_step_as_one(ranks):
    assert len(set(ranks(2).run(_two_optimizers))) == 1


# --- post-local SGD ---------------------------------------------------------------------------------------------------


def _post_local(rank, world_size):
    """As one process on the mean gradient, for five steps; then as NumPy's local SGD from there."""
    single = _model()
    inner = _inner(single)
    model = _model()
    mine = _inner(model)
    outer = thinwire.PostLocalSGD(model, mine, sync_every=3, start_after=5)
    for step in range(1, 6):
        inner.zero_grad()
        for other in range(world_size):
            (loss(single, batch(other, step, width=WIDTH)) / world_size).backward()
        inner.step()
        _step(model, mine, rank, step)
        assert np.abs(_flat(model) - _flat(single)).max() < 1e-5
        with outer.averaged():
            assert np.abs(_flat(model) - _flat(single)).max() < 1e-5
        everyone = [None] * world_size
        dist.all_gather_object(everyone, digest(model.parameters()))
        assert len(set(everyone)) == 1
    equal = []
    for step in range(6, 13):
        _step(model, mine, rank, step)
        dist.all_gather_object(everyone, digest(model.parameters()))
        equal.append(len(set(everyone)) == 1)
    outer.close()
    return [step for step, same in enumerate(equal, start=6) if same]


def test_post_local_sgd_averages_gradients_then_models(ranks):
    assert ranks(2).run(_post_local) == [[8, 11]] * 2


def _post_local_odd(rank, world_size):
    """Gradients that only one rank has are averaged; those that none has stay None."""
    model = seeded(_Odd)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = thinwire.PostLocalSGD(model, inner, sync_every=3, start_after=4)
    for step in range(1, 3):
        inner.zero_grad()
        model(batch(rank, step, width=WIDTH), use=rank == 0).square().mean().backward()
        inner.step()
        assert model.never.weight.grad is None
        assert model.sometimes.weight.grad is not None
    bits = digest(model.parameters())
    model.into.weight.grad.fill_(float("nan") if rank == 1 else 1.0)
    with pytest.raises(NonFiniteError, match=r"'into\.weight' on rank 1"):
        inner.step()
    assert digest(model.parameters()) == bits
    outer.close()
    return bits


def test_post_local_sgd_knows_what_has_no_gradient_or_is_not_finite(ranks):
    assert len(set(ranks(2).run(_post_local_odd))) == 1
