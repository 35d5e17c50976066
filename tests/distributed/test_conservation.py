"""Nothing is lost: what was delivered plus what is owed is what was due, whatever DDP does in between."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded

from thinwire.errors import StateError

WITH_FEEDBACK = [
    "int4",
    "topk:0.01",
    "topk:0.05:fp32",
    "onebit",
    "gather/onebit",
    "gather/topk:0.05",
    "lowrank:2",
    "powersgd:2",
    "sum/randomk:0.25:fp32",
]
TOLERANCE = 2e-6  # of the largest gradient: float32 sums over a few steps


def _step(model):
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.05 * param.grad


# --- bucket rebuild -------------------------------------------------------------------------------------------------


def _rebuild(rank, world_size, recipe):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    layouts = []
    with attached(model, recipe, options=dataclasses.replace(ALL, message_nbytes=4000)) as link:
        ledger = Ledger(model, link)
        for step in range(5):
            x = batch(rank, step)
            ledger.expect(loss(model.module, x))
            model.zero_grad()
            loss(model, x).backward()
            ledger.got()
            layouts.append({bucket.names for bucket in link._buckets.kept.values()})
            _step(model)
        return ledger.error(), layouts


@pytest.mark.parametrize("recipe", WITH_FEEDBACK)
def test_conservation_through_the_bucket_rebuild(ranks, recipe):
    for error, layouts in ranks(3).run(_rebuild, recipe):
        assert error < TOLERANCE
        assert layouts[-1] != layouts[0]  # the buckets did change
        assert layouts[-1] == layouts[-2]


# --- accumulation ---------------------------------------------------------------------------------------------------


def _accumulate(rank, world_size, recipe, static_graph):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01, static_graph=static_graph)
    calls = []
    with attached(model, recipe) as link:
        ledger = Ledger(model, link)
        for window in range(3):
            model.zero_grad()
            link.stats(reset=True)
            # With a static graph DDP wants its first backward to be a synchronised one.
            for micro in [2] if static_graph and window == 0 else [0, 1, 2]:
                x = batch(rank, 3 * window + micro)
                ledger.expect(loss(model.module, x))
                with model.no_sync() if micro < 2 else nullcontext():
                    loss(model, x).backward()
            stats = link.stats()
            messages = sum(len(bucket.plan.layouts) for bucket in link._buckets.kept.values())
            calls.append((stats["steps"], stats["num_collectives"], messages))
            ledger.got()
            _step(model)
        return ledger.error(), calls, link.state.step


@pytest.mark.parametrize("static_graph", [False, True])
def test_no_sync_exchanges_once_per_window(ranks, static_graph):
    for error, calls, step in ranks(2).run(_accumulate, "topk:0.05", static_graph):
        assert error < TOLERANCE
        assert step == 3
        assert len(calls) == 3
        assert all((steps, num) == (1, 2 * messages) for steps, num, messages in calls)


# --- unused parameters ----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three branches; a call says which it uses. `never` is used by none."""

    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.never = nn.Linear(width, width)

    def forward(self, x, use):
        x = torch.tanh(self.stem(x))
        for place in use:
            x = x + self.branches[place](x)
        return x


# Per step and rank: which branches are used. Branch 2 rests for steps 1 and 2 on all ranks, branch 1 is rank 1's alone.
USES = [
    [(0, 1, 2), (0, 1, 2)],
    [(0,), (0, 1)],
    [(), (1,)],
    [(0, 2), (1, 2)],
    [(0, 1, 2), (0,)],
]


def _unused(rank, world_size, recipe, cap, view):
    model = DDP(seeded(Branches), find_unused_parameters=True, bucket_cap_mb=cap, gradient_as_bucket_view=view)
    with attached(model, recipe) as link:
        ledger = Ledger(model, link)
        for step, uses in enumerate(USES):
            x = batch(rank, step, width=24)
            ledger.expect(model.module(x, uses[rank]).square().mean())
            model.zero_grad()
            model(x, uses[rank]).square().mean().backward()
            ledger.got()
            _step(model)
        owed = link.state_dict()["worker"].get("never.weight")
        idle = [p.grad is None or not p.grad.any() for p in model.module.never.parameters()]
        return ledger.error(), digest(model.parameters()), owed is None or not owed.any(), idle


@pytest.mark.parametrize("recipe", WITH_FEEDBACK)
@pytest.mark.parametrize(("cap", "view"), [(25, False), (0.002, True)])
def test_what_ddp_discards_for_unused_parameters_stays_owed(ranks, recipe, cap, view):
    results = ranks(2).run(_unused, recipe, cap, view)
    for error, _, nothing_owed, idle in results:
        assert error < TOLERANCE
        assert nothing_owed
        assert all(idle)
    assert results[0][1] == results[1][1]


def _unused_in_window(rank, world_size):
    """A parameter used in an accumulation's first pass alone is used as far as the exchange is concerned."""
    model = DDP(seeded(Branches), find_unused_parameters=True)
    with attached(model, "topk:0.1") as link:
        ledger = Ledger(model, link)
        for window in range(3):
            model.zero_grad()
            for micro, use in enumerate([(0, 1), (2,) if window else ()]):
                x = batch(rank, 2 * window + micro, width=24)
                ledger.expect(model.module(x, use).square().mean())
                with model.no_sync() if micro == 0 else nullcontext():
                    model(x, use).square().mean().backward()
            ledger.got()
            _step(model)
        return ledger.error()


def test_use_counts_over_the_whole_accumulation(ranks):
    assert max(ranks(2).run(_unused_in_window)) < TOLERANCE


def _static_unused(rank, world_size):
    model = DDP(seeded(Branches), static_graph=True, bucket_cap_mb=0.002)
    with attached(model, "topk:0.1") as link:
        ledger = Ledger(model, link)
        for step in range(4):
            x = batch(rank, step, width=24)
            ledger.expect(model.module(x, (0, 2)).square().mean())
            model.zero_grad()
            model(x, (0, 2)).square().mean().backward()
            ledger.got()
            _step(model)
        return ledger.error(), link.state.step, digest(model.parameters())


def test_static_graph_with_a_parameter_that_is_never_used(ranks):
    results = ranks(2).run(_static_unused)
    assert max(error for error, _, _ in results) < TOLERANCE
    assert [step for _, step, _ in results] == [4, 4]
    assert results[0][2] == results[1][2]


# --- odd parameters -------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of no, one and zero elements, a frozen one, and two names for one matrix."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, image):
        x = self.frozen(self.embed(tokens)) * self.scale + self.one + self.empty.sum()
        return self.head(torch.tanh(x)).square().mean() + self.conv(image).tanh().sum() / 10


def _odd(rank, world_size, recipe, view):
    model = DDP(seeded(Odd), gradient_as_bucket_view=view, bucket_cap_mb=0.005)
    frozen = digest(model.module.frozen.parameters())
    generator = torch.Generator().manual_seed(rank)
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    with attached(model, recipe) as link:
        assert [param.info.name for param in link.plan.params] == names
        ledger = Ledger(model, link)
        for _ in range(4):
            tokens = torch.randint(50, (6, 4), generator=generator)
            image = torch.randn(2, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
            ledger.expect(model.module(tokens, image))
            model.zero_grad()
            model(tokens, image).backward()
            ledger.got()
            _step(model)
        assert digest(model.module.frozen.parameters()) == frozen
        return ledger.error(), digest(model.parameters())


@pytest.mark.parametrize("recipe", WITH_FEEDBACK)
@pytest.mark.parametrize("view", [False, True])
def test_odd_parameters(ranks, recipe, view):
    results = ranks(3).run(_odd, recipe, view)
    assert max(error for error, _ in results) < TOLERANCE
    assert len({bits for _, bits in results}) == 1


def _odd_without_feedback(rank, world_size):
    model = DDP(seeded(Odd))
    with attached(model, "int8"):
        model(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 3, 8, 8)).backward()
    return digest(gradients(model))


def test_zero_gradients_and_no_feedback(ranks):
    assert len(set(ranks(2).run(_odd_without_feedback))) == 1


class IdleFirst(nn.Module):
    """Nobody uses the layer that was registered first, whose bucket is the last."""

    def __init__(self, width=24):
        super().__init__()
        self.never = nn.Linear(width, width)
        self.rest = Branches(width)

    def forward(self, x, use):
        return self.rest(x, use)


def _skipped_buckets(rank, world_size, kind):
    kind = {"Branches": Branches, "IdleFirst": IdleFirst}[kind]
    model = DDP(seeded(kind), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.002)
    with attached(model, "topk:0.1") as link:
        ledger = Ledger(model, link)
        for step in range(3):
            x = batch(rank, step, width=24)
            ledger.expect(model.module(x, (0,)).square().mean())
            model.zero_grad()
            model(x, (0,)).square().mean().backward()
            ledger.got()
            _step(model)
        return ledger.error(), link.state.step


@pytest.mark.parametrize("kind", ["Branches", "IdleFirst"])
def test_buckets_that_ddp_skips(ranks, kind):
    for error, step in ranks(2).run(_skipped_buckets, kind):
        assert error < TOLERANCE
        assert step == 3


def _skipped_nan(rank, world_size):
    model = DDP(seeded(IdleFirst), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.002)
    with attached(model, "topk:0.1") as link:
        x = batch(rank, 0, width=24)
        with pytest.raises(RuntimeError, match="NonFiniteError"):
            (model(x, (0,)).square().mean() * (float("nan") if rank == 1 else 1.0)).backward()
        return type(link.error).__name__, link.state.step


def test_nan_in_a_pass_whose_last_bucket_ddp_skips(ranks):
    assert ranks(2).run(_skipped_nan) == [("NonFiniteError", 1)] * 2


# --- passes that end early ------------------------------------------------------------------------------------------


class Boom(torch.autograd.Function):
    """Raises in backward when told to."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if Boom.armed:
            raise ValueError("boom")
        return g


class Breaking(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(Boom.apply(self.first(x)))


def _aborted(rank, world_size):
    model = DDP(seeded(Breaking), bucket_cap_mb=0.001)
    with attached(model, "topk:0.1") as link:
        for step in range(3):
            Boom.armed = step == 2
            model.zero_grad()
            with pytest.raises(ValueError, match="boom") if Boom.armed else nullcontext():
                model(batch(rank, step, width=24)).square().mean().backward()
            if step == 1:
                before = link.state_dict()
        Boom.armed = False
        with pytest.raises(StateError, match="did not come to its end"):
            link.state_dict()
        link.load_state_dict(before)
        again = link.state_dict()
        return all(torch.equal(again["worker"][name], r) for name, r in before["worker"].items()), again["step"]


def test_no_state_is_saved_in_the_middle_of_a_pass(ranks):
    assert ranks(2).run(_aborted) == [(True, 2)] * 2
