"""Schedules, momentum correction and EF21 over real processes."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Ledger, Tower, attached, batch, digest, gradients, loss, seeded

from thinwire import Schedule
from thinwire.errors import AttachError, PlanError
from thinwire.feedback import Slot
from thinwire.optim import NAG

SCHEDULE = "dense until 2 then topk:0.05@dgc:0.8 ramp 4"
RECIPES = [
    SCHEDULE,
    "topk:0.05@dgc:0.8:nesterov:clip=3",
    "gather/topk:0.05@dgc",
    "topk:0.05@ef21",
    "gather/onebit@ef21",
    "int8 until 3 then int4 until 5 then dense",
]
STEPS, CUT = 8, 4


def _kept(link):
    state = link.state_dict()
    return [tensor for slot in Slot for _, tensor in sorted(state[slot].items())]


def _run(rank, recipe, steps, folder, *, save=False, load=False, cap=0.01):
    model = DDP(seeded(Tower, 40, 3, seed=1 if load else 0), bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    saved = f"{folder}/{RECIPES.index(recipe)}-{rank}.pt"
    with attached(model, recipe, optimizer=optimizer) as link:
        if load:
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            link.load_state_dict(state["thinwire"])
        seen = []
        for step in steps:
            optimizer.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
            seen.append(digest(gradients(model)))
            optimizer.step()
        if save:
            torch.save({"model": model.state_dict(), "thinwire": link.state_dict()}, saved)
        return seen, digest(model.parameters()), digest(_kept(link))


def _whole(rank, world_size, folder):
    return [_run(rank, recipe, range(STEPS), folder) for recipe in RECIPES]


def _first_part(rank, world_size, folder):
    return [_run(rank, recipe, range(CUT), folder, save=True) for recipe in RECIPES]


def _second_part(rank, world_size, folder):
    return [_run(rank, recipe, range(CUT, STEPS), folder, load=True, cap=1) for recipe in RECIPES]


def test_replicas_agree_and_resume_is_bit_for_bit(ranks, tmp_path):
    """In the middle of a ramp, too, and with other buckets than before."""
    whole = ranks(3).run(_whole, str(tmp_path))
    first = ranks(3).run(_first_part, str(tmp_path))
    second = ranks(3).run(_second_part, str(tmp_path))
    for rank in range(3):
        for place, recipe in enumerate(RECIPES):
            seen, weights, kept = whole[rank][place]
            assert seen == first[rank][place][0] + second[rank][place][0], recipe
            assert (weights, kept) == second[rank][place][1:], recipe
            assert (seen, weights) == whole[0][place][:2], recipe


def _conserved(rank, world_size, recipe):
    model = DDP(seeded(Tower, 40, 3), bucket_cap_mb=0.01)
    with attached(model, recipe) as link:
        ledger = Ledger(model, link)
        for step in range(7):
            x = batch(rank, step, width=40)
            ledger.expect(loss(model.module, x))
            model.zero_grad()
            loss(model, x).backward()
            ledger.got()
        return ledger.error(), [str(start) for start, _ in link.phases.plans]


@pytest.mark.parametrize("recipe", ["topk:0.05 ramp 4", "topk:0.05 until 3 then dense", "int4 until 2 then onebit"])
def test_nothing_is_lost_between_phases(ranks, recipe):
    for error, _ in ranks(2).run(_conserved, recipe):
        assert error < 2e-6


# --- agreement ------------------------------------------------------------------------------------------------------


def _other_schedules(rank, world_size):
    model = DDP(seeded(Tower, 16, 2))
    with pytest.raises(PlanError) as raised, attached(model, f"int8 until {5 + rank} then int4"):
        pass
    return str(raised.value)


def test_ranks_with_other_schedules_all_raise(ranks):
    for message in ranks(2).run(_other_schedules):
        assert "from step 5" in message
        assert "from step 6" in message


def _other_steps(rank, world_size):
    """A rank that loaded the state of another step would send other bytes."""
    model = DDP(seeded(Tower, 16, 2))
    link = attached(model, "int8 until 5 then int4").__enter__()
    link.load_state_dict(link.state_dict() | {"step": 4 + rank})
    with pytest.raises(PlanError, match="ranks have different plans"):
        loss(model, batch(rank, 0, width=16)).backward()
    return str(link.error), isinstance(link.error, PlanError)


def test_ranks_at_other_steps_all_raise_before_the_first_byte(ranks):
    for message, is_plan_error in ranks(2).run(_other_steps):
        assert "step=4" in message
        assert is_plan_error


# --- the optimizer --------------------------------------------------------------------------------------------------


def _momentum_twice(rank, world_size, kind):
    model = DDP(seeded(Tower, 16, 2))
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AttachError, match=r"optimizer without momentum.*applied twice"):
        attached(model, "topk:0.1@dgc", optimizer=optimizer).__enter__()
    with attached(model, "topk:0.1@dgc", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)):
        pass


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_an_optimizer_with_momentum_is_refused(ranks, kind):
    ranks(2).run(_momentum_twice, kind)


def _counts_on_momentum(rank, world_size):
    """An optimizer that leaves momentum to the workers needs the recipe that applies it."""
    model = DDP(seeded(Tower, 16, 2))
    optimizer = NAG(model.parameters(), lr=0.1, momentum=0.8, worker_momentum=True)
    for recipe in ("topk:0.1", "topk:0.1@nag:0.9", "topk:0.1@dgc:0.8", "dense"):
        with pytest.raises(AttachError, match=r"NAG\(worker_momentum=True\).*expected a recipe with '@nag:0.8', got"):
            attached(model, recipe, optimizer=optimizer).__enter__()
    with pytest.raises(AttachError, match=r"optimizer without momentum, .*NAG with momentum 0.8.*applied twice"):
        attached(model, "topk:0.1@nag:0.8", optimizer=NAG(model.parameters(), momentum=0.8)).__enter__()
    with attached(model, "topk:0.1@nag:0.8", optimizer=optimizer):
        pass


def test_an_optimizer_that_counts_on_momentum_needs_a_recipe_that_applies_it(ranks):
    ranks(2).run(_counts_on_momentum)


def _like_nag(rank, world_size, recipe):
    """Momentum of workers, and of weight decay at the optimizer: Nesterov's SGD where nothing is lost on the way."""
    models = [DDP(seeded(Tower, 16, 2), bucket_cap_mb=0.01) for _ in range(2)]
    settings = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}
    optimizers = [NAG(m.parameters(), worker_momentum=i == 0, **settings) for i, m in enumerate(models)]
    with attached(models[0], recipe, optimizer=optimizers[0]):
        for step in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss(model, batch(rank, step, width=16)).backward()
                optimizer.step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("recipe", "tolerance"), [("identity@nag:0.8", 1e-5), ("linear:8@nag:0.8", 0.05)])
def test_momentum_of_workers_is_nesterovs_sgd(ranks, recipe, tolerance):
    assert max(ranks(3).run(_like_nag, recipe)) < tolerance


def _like_momentum_sgd(rank, world_size):
    """Exact in all: the same weights as DDP with momentum SGD, but for the order of sums."""
    models = [DDP(seeded(Tower, 16, 2), bucket_cap_mb=0.01) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9 * i) for i, m in enumerate(models)]
    with attached(models[0], Schedule([(0, "dense"), (100, "topk:0.01@dgc")]), optimizer=optimizers[0]):
        for step in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss(model, batch(rank, step, width=16)).backward()
                optimizer.step()
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def test_dense_steps_with_momentum_are_momentum_sgd(ranks):
    assert max(ranks(2).run(_like_momentum_sgd)) < 1e-6


# --- units and skipped steps ----------------------------------------------------------------------------------------


class FakeScaler:
    def __init__(self):
        self.scale = 1.0

    def get_scale(self):
        return self.scale


def _scaled(rank, world_size, recipe, scales, bad_steps):
    model = DDP(seeded(Tower, 40, 3), bucket_cap_mb=0.01)
    scaler = FakeScaler()
    seen = []
    with attached(model, recipe, scaler=scaler) as link:
        for step, scale in enumerate(scales):
            scaler.scale = scale
            before = digest(_kept(link)), link.state.step, link.state.loss_scale
            model.zero_grad()
            x = batch(rank, step - sum(bad < step for bad in bad_steps), width=40)
            total = loss(model, x)
            if step in bad_steps:
                total = total + (float("inf") if rank else 0.0) * model.module.layers[1].weight[0, 0]
            (total * scale).backward()
            if step in bad_steps:
                assert (digest(_kept(link)), link.state.step, link.state.loss_scale) == before
            else:
                seen.append(digest(g / scale for g in gradients(model)))
        return seen, digest(tensor / link.state.loss_scale for tensor in _kept(link))


@pytest.mark.parametrize(
    "recipe",
    [
        "topk:0.05:fp32@dgc:clip=2",
        "topk:0.05:fp32@ef21",
        "gather/onebit@ef21",
        "dense until 2 then topk:0.05:fp32@dgc ramp 4",
    ],
)
def test_loss_scales_and_skipped_steps_leave_no_trace(ranks, recipe):
    """Powers of two change no bit; what a skipped step would have done is undone."""
    plain = ranks(2).run(_scaled, recipe, [1.0] * 8, [])
    scaled = ranks(2).run(_scaled, recipe, [4.0, 4.0, 2.0, 2.0, 8.0, 8.0, 8.0, 1.0, 1.0, 1.0], [2, 5])
    assert plain == scaled
    assert plain[0][0] == plain[1][0]


def _idle(rank, world_size):
    """What a phase leaves alone still follows the loss scale."""
    model = DDP(seeded(Tower, 40, 3), bucket_cap_mb=0.01)
    scaler = FakeScaler()
    with attached(
        model, "topk:0.1:fp32@ef21 until 2 then dense until 4 then topk:0.1:fp32@ef21", scaler=scaler
    ) as link:
        before = ""
        for step, scale in enumerate([1.0, 1.0, 8.0, 2.0]):
            scaler.scale = scale
            (loss(model, batch(rank, step, width=40)) * scale).backward()
            if step == 1:
                before = digest(_kept(link))
        return before == digest(tensor / 2.0 for tensor in _kept(link)), link.state.loss_scale


def test_idle_memory_follows_the_loss_scale(ranks):
    assert ranks(2).run(_idle) == [(True, 2.0)] * 2


# --- clipping -------------------------------------------------------------------------------------------------------


def _clipped(rank, world_size, cap, clip):
    model = DDP(seeded(Tower, 40, 2), bucket_cap_mb=cap)
    with attached(model, f"identity@dgc:0:clip={clip}"):
        loss(model, batch(0, 0, width=40)).backward()  # equal on all ranks
        delivered = gradients(model)
    whole = torch.autograd.grad(loss(model.module, batch(0, 0, width=40)), list(model.module.parameters()))
    norms = [(float(ours.norm()), float(g.norm())) for ours, g in zip(delivered, whole, strict=True)]
    return norms, digest(delivered)


def test_gradients_are_clipped_by_parameter(ranks):
    few, many = (ranks(4).run(_clipped, cap, 0.5) for cap in (25, 0.001))
    assert few == many
    norms, _ = few[0]
    assert any(whole > 1.0 for _, whole in norms)
    for ours, whole in norms:
        assert ours == pytest.approx(min(whole, 0.5 * 4**0.5), rel=1e-5)


# --- another world size ---------------------------------------------------------------------------------------------


def _save(rank, world_size, folder, recipe):
    model = DDP(seeded(Tower, 40, 3))
    with attached(model, recipe) as link:
        for step in range(3):
            model.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
        torch.save(link.state_dict(), f"{folder}/{rank}.pt")


def _load(rank, world_size, folder, recipe):
    import thinwire

    states = [torch.load(f"{folder}/{old}.pt", weights_only=True) for old in range(4)]
    model = DDP(seeded(Tower, 40, 3))
    with attached(model, recipe) as link:
        link.load_state_dict(thinwire.reshard_state(states, world_size, partition_numel=1024)[rank])
        loss(model, batch(rank, 3, width=40)).backward()
        return digest(gradients(model)), link.state_dict()


@pytest.mark.parametrize("recipe", ["topk:0.05@dgc", "topk:0.05@ef21"])
def test_resharded_ranks_go_on_together(ranks, tmp_path, recipe):
    ranks(4).run(_save, str(tmp_path), recipe)
    results = ranks(2).run(_load, str(tmp_path), recipe)
    assert results[0][0] == results[1][0]
    if "ef21" in recipe:
        for name, mean in results[0][1]["mean"].items():
            total = mean + results[1][1]["mean"][name]
            estimates = (results[0][1]["estimate"][name] + results[1][1]["estimate"][name]) / 2
            torch.testing.assert_close(total, estimates, rtol=1e-4, atol=1e-5)
            assert torch.equal(results[0][1]["delivered"][name], results[1][1]["delivered"][name])
