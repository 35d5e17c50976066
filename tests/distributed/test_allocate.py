"""Recipes chosen anew while training goes on: by the right errors, alike on all ranks, and resumed to the bit."""

import dataclasses
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded

import thinwire
from thinwire import Allocate
from thinwire.allocate import choose
from thinwire.errors import PlanError, StateError
from thinwire.random import Key, parameter_key
from thinwire.spec import BlockSpec

BITS = Allocate(candidates=["int2", "int4", "int8"], default="int4", budget=1.5, every=4, samples=2)
RANKS = Allocate(candidates=["powersgd:1", "powersgd:2", "powersgd:4"], default="powersgd:2", every=4, samples=2)
DENSITIES = Allocate(candidates=["topk:0.01", "topk:0.1", "dense"], default="topk:0.1", every=4, samples=2)
# Were the rounding inside nodes not counted, it would be free, and chosen for all.
NODES = Allocate(candidates=["hier:bf16/int4", "hier/int4"], default="hier/int4", every=4, samples=2)
CHOICES = {"bits": BITS, "ranks": RANKS, "densities": DENSITIES, "nodes": NODES}


class Uneven(nn.Module):
    """Layers whose gradients compress very differently, and scale differently, too."""

    def __init__(self):
        super().__init__()
        self.tower = Tower(40, 3)
        self.flat = nn.Linear(40, 40, bias=False)
        self.spiky = nn.Linear(40, 40, bias=False)

    def forward(self, x):
        spikes = x * (torch.arange(40) % 10 == 0) * 3 + 0.01 * x
        return self.tower(x) + 0.03 * self.flat(x) + 0.3 * self.spiky(spikes)


def recipes_of(link):
    return {param.info.name: param.aggregator.recipe() for param in link.plan.params if not param.reason}


def _squared_error(recipe, name, grad, step, rank, seed):
    """Measure one parameter by the public compressors alone."""
    settings = thinwire.parse_recipe(recipe)
    error, flat = 0.0, grad.reshape(-1)
    whole = settings.up.unit == "matrix"
    for offset in range(0, flat.numel(), flat.numel() if whole else ALL.partition_numel):
        part = flat[offset : offset + (flat.numel() if whole else ALL.partition_numel)]
        spec = BlockSpec(shape=tuple(grad.shape) if whole else (part.numel(),))
        key = Key(parameter_key(seed, name), step, rank, offset)
        inner = [settings.inner] if getattr(settings, "inner_dtype", None) is not None else []
        for kind in [*inner, settings.up, *([settings.down] if settings.has_owners else [])]:
            sent = kind.decode(kind.encode(part.view(spec.shape), key), spec).view(-1)
            error += float((part.double() - sent.double()).square().sum())
    return error


def _chosen(rank, world_size, which):
    allocate = CHOICES[which]
    options = dataclasses.replace(ALL, compress_1d=which != "ranks", node_sizes=2)
    model = DDP(seeded(Uneven), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    with attached(model, allocate, options=options) as link:
        assert set(recipes_of(link).values()) == {allocate.names[allocate.default_index]}
        ledger, seen, tables = Ledger(model, link), [], {}
        for step in range(10):
            x = batch(rank, step, width=40)
            value = loss(model.module, x)
            ledger.expect(value)
            if step % 4 >= 2:  # of these steps errors are measured
                grads = torch.autograd.grad(loss(model.module, x), list(model.module.parameters()))
                for (name, _), grad in zip(model.module.named_parameters(), grads, strict=True):
                    found = [_squared_error(r, name, grad, step, rank, options.seed) for r in allocate.names]
                    tables.setdefault(step // 4, {}).setdefault(name, torch.zeros(len(found), dtype=torch.float64))
                    tables[step // 4][name] += torch.tensor(found, dtype=torch.float64)
            optimizer.zero_grad()
            loss(model, x).backward()
            ledger.got()
            optimizer.step()
            seen.append(recipes_of(link))
        assert ledger.error() < 3e-6
        for step in (4, 8):  # the choices are those of the errors that were measured here, by other means
            rows = tables[step // 4 - 1]
            for errors in rows.values():
                dist.all_reduce(errors)
            names = list(seen[step])
            budget = allocate.budget * sum(float(rows[name][allocate.default_index]) ** 0.5 for name in names)
            assert link.phases.choices is not None
            plans = link.phases.choices.plans
            sizes = [[_sent(plan.by_name[name]) for plan in plans] for name in names]
            table = [rows[name].sqrt().tolist() for name in names]
            found = choose(table, sizes, budget)
            got = [seen[step][name] for name in names]
            assert got == [plans[c].by_name[n].aggregator.recipe() for n, c in zip(names, found, strict=True)]
            assert sum(row[c] for row, c in zip(table, found, strict=True)) <= budget * (1 + 1e-9)
        assert seen[0] == seen[3]
        assert seen[4] == seen[7]
        assert (seen[3] == seen[4]) == (which == "nodes")
        return seen, digest(model.parameters())


def _sent(param):
    """Return the bytes of all ranks together."""
    rounds = type(param.aggregator).schedule(param.partitions, dist.get_world_size())
    return sum(sum(one.sent_nbytes(rank) for rank in range(dist.get_world_size())) for one in rounds)


@pytest.mark.parametrize("which", ["bits", "ranks", "nodes"])
def test_the_choice_follows_from_all_ranks_gradients(ranks, which):
    """Beside errors measured by compressors alone; nothing is lost on the way, and replicas stay equal."""
    results = ranks(3).run(_chosen, which)
    assert all(result == results[0] for result in results)


# --- the counted bytes ----------------------------------------------------------------------------------------------


def _bytes(rank, world_size):
    model = DDP(seeded(Uneven), bucket_cap_mb=1)
    with attached(model, BITS) as link:
        for step in range(12):
            model.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
            if step:  # DDP makes its buckets anew after the first
                assert link.stats()["wire_nbytes"] == link.planned_nbytes(), step
            link.stats(reset=True)
        return link.plan.sent_nbytes(rank), str(link.plan)


def test_bytes_are_those_of_the_plan_in_force(ranks):
    (_, table), *_ = ranks(2).run(_bytes)
    assert "int2" in table
    assert "int4" in table


# --- resume ---------------------------------------------------------------------------------------------------------


def _run(rank, which, steps, folder, *, save=False, load=False):
    model = DDP(seeded(Uneven, seed=1 if load else 0), bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = dataclasses.replace(ALL, compress_1d=which != "ranks")
    with attached(model, CHOICES[which], options=options, start_after=1) as link:
        if load:
            state = torch.load(f"{folder}/{which}-{rank}.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            link.load_state_dict(state["thinwire"])
        for step in steps:
            optimizer.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
            optimizer.step()
        state = link.state_dict()
        if save:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "thinwire": state}
            torch.save(saved, f"{folder}/{which}-{rank}.pt")
        kept = [t for slot in ("worker", "owner", "factor") for _, t in sorted(state[slot].items())]
        return digest([*model.parameters(), *kept]), state["allocation"], recipes_of(link)


def _whole(rank, world_size, which, cut, folder):
    return _run(rank, which, range(12), folder)


def _first(rank, world_size, which, cut, folder):
    return _run(rank, which, range(cut), folder, save=True)


def _second(rank, world_size, which, cut, folder):
    return _run(rank, which, range(cut, 12), folder, load=True)


@pytest.mark.parametrize(("which", "cut"), [("bits", 4), ("bits", 5), ("bits", 7), ("densities", 8), ("ranks", 6)])
def test_resume_is_bit_for_bit(ranks, tmp_path, which, cut):
    """From between two samples, from the very step of a choice, and from after it. Two ranks: sums have one order."""
    whole = ranks(2).run(_whole, which, cut, str(tmp_path))
    first = ranks(2).run(_first, which, cut, str(tmp_path))
    assert ranks(2).run(_second, which, cut, str(tmp_path)) == whole
    assert whole[0][2] == whole[1][2]
    assert cut != 8 or first[0][1]["chosen"] != whole[0][1]["chosen"] or first[0][1]["last"] < whole[0][1]["last"]


# --- steps that do not count ----------------------------------------------------------------------------------------


class FixedScaler:
    """A scaler whose scale the test sets."""

    def __init__(self):
        self.scale = 4.0

    def get_scale(self):
        return self.scale


def _skipped(rank, world_size):
    model = DDP(seeded(Uneven), bucket_cap_mb=0.01)
    scaler = FixedScaler()
    with attached(model, BITS, scaler=scaler) as link:
        chosen = []
        for step, bad in ((0, 0), (1, 0), (2, 0), (3, 1), (3, 0), (4, 1), (4, 1), (4, 0), (5, 0)):
            model.zero_grad()
            before = link.state_dict()["allocation"]
            value = loss(model, batch(rank, step, width=40)) * scaler.scale
            (value * float("inf") if bad and rank == 1 else value).backward()
            after = link.state_dict()["allocation"]
            if bad:  # not measured, and chosen for once only
                assert after["errors"] == ({} if step == 4 else before["errors"])
            scaler.scale *= 2.0  # the errors are in units of the gradient
            chosen.append(dict(after["chosen"]))
        assert link.skipped_steps == 3
        return chosen


def _unskipped(rank, world_size):
    model = DDP(seeded(Uneven), bucket_cap_mb=0.01)
    with attached(model, BITS) as link:
        chosen = []
        for step in range(6):
            model.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
            chosen.append(dict(link.state_dict()["allocation"]["chosen"]))
        return chosen


def test_skipped_steps_are_not_measured(ranks):
    skipped, plain = ranks(2).run(_skipped), ranks(2).run(_unskipped)
    assert skipped[0] == skipped[1]
    assert [skipped[0][place] for place in (0, 1, 2, 4, 7, 8)] == plain[0]


# --- states ---------------------------------------------------------------------------------------------------------


def _states(rank, world_size, folder):
    model = DDP(seeded(Uneven), bucket_cap_mb=0.01)
    with attached(model, BITS) as link:
        fresh = link.state_dict()
        for step in range(7):
            model.zero_grad()
            loss(model, batch(rank, step, width=40)).backward()
        state = link.state_dict()
        torch.save(state, f"{folder}/{rank}.pt")
        with pytest.raises(StateError, match="saved without Allocate"):
            link.load_state_dict({key: value for key, value in state.items() if key != "allocation"})
        with pytest.raises(StateError, match=r"saved with the candidates \['int2'\]"):
            link.load_state_dict({**state, "allocation": {**state["allocation"], "candidates": ["int2"]}})
        chosen = {name: recipe.removesuffix("@ef") for name, recipe in recipes_of(link).items()}
        assert chosen == state["allocation"]["chosen"]  # int8 has error feedback here, since others leave something
        link.load_state_dict(state if rank else fresh)  # rank 0 counts other steps then
        with pytest.raises(PlanError, match="step"):
            loss(model, batch(rank, 0, width=40)).backward()
    with attached(DDP(seeded(Uneven)), "int4") as link, pytest.raises(StateError, match="saved with Allocate"):
        link.load_state_dict(state)
    return state["allocation"]


def _fewer(rank, world_size, folder, every):
    states = [torch.load(f"{folder}/{old}.pt", weights_only=True) for old in range(3)]
    mine = thinwire.reshard_state(states, world_size, partition_numel=ALL.partition_numel)[rank]
    with pytest.raises(StateError, match="rank 2 and rank 0 have not chosen the same recipes"):
        thinwire.reshard_state([*states[:2], {**states[2], "allocation": {"chosen": {}}}], world_size)
    model = DDP(seeded(Uneven), bucket_cap_mb=0.01)
    with attached(model, BITS) as link:
        link.load_state_dict(mine)
        chosen = link.state_dict()["allocation"]["chosen"]
        for step in range(7, 9):
            loss(model, batch(rank, step, width=40)).backward()
        return chosen, recipes_of(link), digest(gradients(model))


def test_choices_go_to_other_world_sizes(ranks, tmp_path):
    saved = ranks(3).run(_states, str(tmp_path))
    assert saved[0]["chosen"] == saved[1]["chosen"]
    assert saved[0]["errors"] != saved[1]["errors"]  # each rank's own
    results = ranks(2).run(_fewer, str(tmp_path), 4)
    assert results[0] == results[1]
    assert results[0][0] == saved[0]["chosen"]


def _said(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = DDP(seeded(Uneven))
        with attached(model, BITS):
            for step in range(5):
                loss(model, batch(rank, step, width=40)).backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return [line for line in lines if "chose" in line]


def test_the_log_says_what_was_chosen(ranks):
    first, second = ranks(2).run(_said)
    assert len(first) == 1
    assert second == []
    assert "int2 for" in first[0]
