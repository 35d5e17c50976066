"""State: saved, loaded in fresh processes, and gone on with to the bit; or for another world size."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, loss, seeded

import thinwire
from thinwire.errors import StateError

STEPS, CUT = 8, 3


def _run(rank, recipe, steps, folder, *, save=False, load=False, cap=0.01, scaler=None):
    model = DDP(seeded(Tower, 40, 3, seed=1 if load else 0), bucket_cap_mb=cap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = f"{folder}/{recipe.replace('/', '-')}-{rank}.pt"
    with attached(model, recipe) as link:
        if load:
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            link.load_state_dict(state["thinwire"])
        for step in steps:
            optimizer.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
            optimizer.step()
        if save:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "thinwire": link.state_dict()}, saved
            )
        state = link.state_dict()
        return digest(
            [*model.parameters(), *(t for kind in ("worker", "owner") for _, t in sorted(state[kind].items()))]
        )


def _whole(rank, world_size, recipes, folder):
    return [_run(rank, recipe, range(STEPS), folder) for recipe in recipes]


def _first_part(rank, world_size, recipes, folder):
    return [_run(rank, recipe, range(CUT), folder, save=True) for recipe in recipes]


def _second_part(rank, world_size, recipes, folder):
    # Other buckets than before: a restart brings DDP's first layout back anyhow.
    return [_run(rank, recipe, range(CUT, STEPS), folder, load=True, cap=1) for recipe in recipes]


def test_resume_is_bit_for_bit(ranks, tmp_path):
    recipes = ["int8:stochastic", "int4", "topk:0.05", "onebit", "gather/onebit", "lowrank:2"]
    whole = ranks(3).run(_whole, recipes, str(tmp_path))
    ranks(3).run(_first_part, recipes, str(tmp_path))
    assert ranks(3).run(_second_part, recipes, str(tmp_path)) == whole


# --- another world size ---------------------------------------------------------------------------------------------


def _four(rank, world_size, recipe, folder):
    model = DDP(seeded(Tower, 40, 3))
    with attached(model, recipe) as link:
        for step in range(3):
            model.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
        torch.save(link.state_dict(), f"{folder}/four-{rank}.pt")
        return _owed(link.state_dict(), world_size)


def _two(rank, world_size, recipe, folder, partition_numel):
    states = [torch.load(f"{folder}/four-{old}.pt", weights_only=True) for old in range(4)]
    mine = thinwire.reshard_state(states, world_size, partition_numel=partition_numel)[rank]
    model = DDP(seeded(Tower, 40, 3))
    options = dataclasses.replace(ALL, partition_numel=partition_numel)
    with attached(model, recipe, options=options) as link:
        with pytest.raises(StateError, match="reshard_state"):
            link.load_state_dict(states[rank])
        link.load_state_dict(mine)
        owed = _owed(link.state_dict(), world_size)
        step = link.state.step
        ledger = Ledger(model, link)
        for name, value in owed.items():  # what was owed is due
            ledger._due[name] += value
        for step_now in range(3, 6):
            x = batch(rank, step_now, width=40)
            ledger.expect(loss(model.module, x))
            model.zero_grad()
            loss(model, x).backward()
            ledger.got()
        return owed, step, ledger.error(), digest(p.grad for p in model.parameters())


def _owed(state, world_size):
    owed = {}
    for name in sorted(state["worker"]):
        owed[name] = state["worker"][name].double() / world_size
        if name in state["owner"]:
            owed[name] = owed[name] + state["owner"][name].double()
        dist.all_reduce(owed[name])
    return owed


@pytest.mark.parametrize("partition_numel", [1024, 300])
@pytest.mark.parametrize(
    "recipe", ["topk:0.05", "lowrank:2", "powersgd:2", "powersgd:1:alternating", "topkc:0.2:chunk=8:fp32"]
)
def test_reshard_keeps_what_is_owed(ranks, tmp_path, recipe, partition_numel):
    before = ranks(4).run(_four, recipe, str(tmp_path))
    results = ranks(2).run(_two, recipe, str(tmp_path), partition_numel)
    for owed, step, error, bits in results:
        assert step == 3
        assert error < 2e-6
        assert bits == results[0][3]
        for name, value in before[0].items():
            # The new workers' mean is rounded to float32 once.
            assert torch.allclose(owed[name], value, rtol=1e-5, atol=1e-7 * float(value.abs().max())), name
            assert value.any()


def _misfits(rank, world_size):
    model = DDP(seeded(Tower, 16, 2))
    with attached(model, "topk:0.1") as link:
        loss(model, batch(rank, 0, width=16)).backward()
        good = link.state_dict()
        before = digest([*good["worker"].values(), *good["owner"].values()])
        for change, words in [
            ({"format": 99}, "format"),
            ({"rank": 1 - rank}, "rank"),
            ({"world_size": 7}, "world_size 7"),
            ({"worker": {}}, "no worker residual"),
            ({"worker": {**good["worker"], "more": torch.zeros(1)}}, "more"),
            ({"worker": {name: t.reshape(-1)[:1] for name, t in good["worker"].items()}}, "shape"),
        ]:
            with pytest.raises(StateError, match=words):
                link.load_state_dict({**good, **change})
        after = link.state_dict()
        return digest([*after["worker"].values(), *after["owner"].values()]) == before


def test_state_that_does_not_fit_changes_nothing(ranks):
    assert ranks(2).run(_misfits) == [True, True]
