"""Mistakes at attach: every rank raises, with the reason and the other rank's in the message; none hangs."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Tower, attached, batch, gradients, loss, seeded, train

import thinwire
from thinwire import BlockQuant, ErrorFeedback, PlanOptions, TopK, TwoShot
from thinwire.errors import AttachError, PlanError, RecipeError, ThinwireError

TIMEOUT = 30


def _nonsense(info):
    return 8


def _refused(rank, world_size, case):
    """Attach in the way of `case` and return the error; the world must be good for another model afterwards."""
    model, recipe, options = DDP(seeded(Tower, 16, 2)), "int8", {"options": ALL}
    only_rank_1 = rank == 1
    if case == "unknown recipe":
        recipe = "int9"
    elif case == "unknown recipe on rank 1":
        recipe = "int9" if only_rank_1 else "int8"
    elif case == "pattern matches nothing":
        recipe = {"layer.*": "int8"}
    elif case == "density":
        recipe = "topk:1.5"
    elif case == "density zero on rank 1":
        recipe = "topk:0" if only_rank_1 else "topk:0.1"
    elif case == "policy returns nonsense":
        recipe = _nonsense
    elif case == "no policy":
        recipe = None
    elif case == "hooked twice":
        thinwire.attach(model, "int8")
    elif case == "not DDP":
        model = model.module
    elif case == "not DDP on rank 1":
        model = model.module if only_rank_1 else model
    elif case == "unknown values":
        recipe = "topk:0.1:fp64"
    elif case == "start_after":
        options["start_after"] = -1
    elif case == "workers on rank 1":
        options["workers"] = -1 if only_rank_1 else 1
    elif case == "on_nonfinite":
        options["on_nonfinite"] = "panic"
    elif case == "optimizer":
        options["optimizer"] = "adam"
    elif case == "lr_correction without optimizer":
        top = TopK(density=0.1)
        recipe = TwoShot(up=top, down=top, feedback=ErrorFeedback(lr_correction=True))
    elif case == "sparse embedding":
        model = DDP(nn.Sequential(nn.Embedding(10, 4, sparse=True)))
    elif case == "other recipe on rank 1":
        recipe = "int4" if only_rank_1 else "int8"
    elif case == "other policy on rank 1":
        recipe = {"layers.1.weight": "int4" if only_rank_1 else "topk:0.1"}
    elif case == "other options on rank 1":
        options["options"] = PlanOptions(seed=rank)
    elif case == "other aggregator on rank 1":
        recipe = TwoShot(up=BlockQuant(bits=8, block=64 if only_rank_1 else 128), down=BlockQuant(bits=8))
    elif case == "other start_after on rank 1":
        options["start_after"] = rank
    elif case == "scaler on rank 1":
        options["scaler"] = torch.amp.GradScaler("cpu") if only_rank_1 else None
    else:
        raise AssertionError(case)
    with pytest.raises(ThinwireError) as raised:
        thinwire.attach(model, recipe, **options)
    fresh = DDP(seeded(Tower, 16, 2))
    with attached(fresh, "int8"):
        train(fresh, rank, range(1), width=16)
    return type(raised.value).__name__, str(raised.value)


CASES = {
    "unknown recipe": (RecipeError, ["int9", "did you mean 'int8'"], ["int9"]),
    "unknown recipe on rank 1": (None, ["rank 1", "int9"], ["int9"]),
    "pattern matches nothing": (PlanError, ["'layer.*'", "close names: layers."], ["'layer.*'"]),
    "density": (RecipeError, ["density", "1.5"], ["1.5"]),
    "density zero on rank 1": (None, ["rank 1", "density"], ["density"]),
    "policy returns nonsense": (PlanError, ["layers.0.weight", "got 8"], ["got 8"]),
    "no policy": (PlanError, ["expected a recipe", "None"], ["None"]),
    "hooked twice": (AttachError, ["already has a communication hook"], ["already"]),
    "not DDP": (AttachError, ["DistributedDataParallel", "Tower"], ["Tower"]),
    "not DDP on rank 1": (None, ["rank 1", "Tower"], ["Tower"]),
    "unknown values": (RecipeError, ["fp64"], ["fp64"]),
    "start_after": (AttachError, ["start_after", "-1"], ["-1"]),
    "workers on rank 1": (None, ["rank 1", "at least one", "-1"], ["at least one", "-1"]),
    "on_nonfinite": (AttachError, ["panic"], ["panic"]),
    "optimizer": (AttachError, ["optimizer", "str"], ["str"]),
    "lr_correction without optimizer": (RecipeError, ["optimizer=optimizer"], ["optimizer"]),
    "sparse embedding": (AttachError, ["all gradients are sparse"], ["sparse"]),
    "other recipe on rank 1": (PlanError, ["bits=8", "bits=4", "rank 1"], ["layers.0.weight"]),
    "other policy on rank 1": (PlanError, ["layers.1.weight", "rank 1"], ["layers.1.weight"]),
    "other options on rank 1": (PlanError, ["seed=0", "seed=1"], ["seed=1"]),
    "other aggregator on rank 1": (PlanError, ["block=128", "block=64"], ["block=64"]),
    "other start_after on rank 1": (PlanError, ["start_after", "rank 1"], ["start_after"]),
    "scaler on rank 1": (PlanError, ["scaler", "rank 1"], ["scaler"]),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_refuse(ranks, case):
    kind, words_on_0, words_on_1 = CASES[case]
    results = ranks(2).run(_refused, case, timeout=TIMEOUT)
    for (name, message), words in zip(results, (words_on_0, words_on_1), strict=True):
        assert kind is None or name == kind.__name__
        for word in words:
            assert word in message


def _policy_raises(rank, world_size):
    def policy(info):
        if rank == 1:
            raise KeyError("no such layer")

    model = DDP(seeded(Tower, 16, 2))
    with pytest.raises((KeyError, PlanError)) as raised:
        thinwire.attach(model, policy)
    return str(raised.value)


def test_a_policy_that_raises_on_one_rank(ranks):
    first, second = ranks(2).run(_policy_raises, timeout=TIMEOUT)
    assert "rank 1" in first
    assert "no such layer" in first
    assert "no such layer" in second


def _frozen(rank, world_size):
    model = DDP(seeded(Tower, 16, 2))
    model.requires_grad_(False)
    with pytest.raises(PlanError, match="parameters that require gradients"):
        thinwire.attach(model, "int8")


def test_a_model_that_does_not_train(ranks):
    ranks(2).run(_frozen, timeout=TIMEOUT)


def test_no_process_group():
    with pytest.raises(AttachError, match="init_process_group"):
        thinwire.attach(nn.Linear(2, 2), "int8")


def _lr_correction(rank, world_size):
    """With the optimizer given, the residual follows the learning rate: what is owed is in units of weight change."""
    top = TopK(density=0.02)
    recipe = TwoShot(up=top, down=top, feedback=ErrorFeedback(lr_correction=True))
    model = DDP(seeded(Tower, 32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(rank, 0, width=32)
    start = [p.detach().clone().double() for p in model.parameters()]
    direct = [torch.zeros_like(p) for p in start]
    with attached(model, recipe, optimizer=optimizer) as link:
        for lr in (0.1, 0.1, 0.02, 0.5):
            optimizer.param_groups[0]["lr"] = lr
            for total, grad in zip(
                direct, torch.autograd.grad(loss(model.module, x), list(model.parameters())), strict=True
            ):
                torch.distributed.all_reduce(grad)
                total -= lr * grad.double() / world_size
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        state = link.state_dict()
        worst = 0.0
        for (name, p), before, change in zip(model.module.named_parameters(), start, direct, strict=True):
            owed = state["worker"][name].double() / world_size
            if name in state["owner"]:
                owed = owed + state["owner"][name].double()
            torch.distributed.all_reduce(owed)
            gap = p.detach().double() - before - change - 0.5 * owed  # 0.5: the last learning rate
            worst = max(worst, float(gap.abs().max() / (change.abs().max() + 1e-12)))
        return worst, len(gradients(model))


def test_lr_correction_conserves_weight_change(ranks):
    assert max(worst for worst, _ in ranks(2).run(_lr_correction)) < 1e-5
