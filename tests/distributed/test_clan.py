"""CLAN over real processes: nothing is lost, replicas stay equal, and a resumed run goes on to the bit."""

import dataclasses

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Ledger, Tower, batch, digest, loss, seeded

import thinwire
from thinwire.errors import AttachError, RecipeError
from thinwire.optim import LANS, no_decay_groups

SMALL = dataclasses.replace(thinwire.CLAN_OPTIONS, min_nbytes=0, partition_numel=301)  # uneven partitions
SETTINGS = list(thinwire.CLAN_SETTINGS)


def _lans(model):
    return LANS(no_decay_groups(model.named_parameters()), lr=0.01, normalize_grad=False)


def _train(model, optimizer, rank, steps, ledger=None):
    for step in steps:
        x = batch(rank, step)
        if ledger is not None:
            ledger.expect(loss(model.module, x))
        optimizer.zero_grad()
        loss(model, x).backward()
        if ledger is not None:
            ledger.got()
        optimizer.step()


def _conserved(rank, world_size, name):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    optimizer = _lans(model)
    link = thinwire.clan(model, name, optimizer=optimizer, options=SMALL)
    ledger = Ledger(model, link)
    _train(model, optimizer, rank, range(6), ledger)
    error = ledger.error()
    link.close()
    return error, digest(model.parameters())


@pytest.mark.parametrize(
    ("name", "world_size"), [*(("onebit", n) for n in (1, 2, 3, 4, 5)), ("topk", 5), ("randomk", 5), ("topk", 2)]
)
def test_algorithm_4_is_exact(ranks, name, world_size):
    """Sum of delivered = sum of mean gradients - mean of the workers' residuals - the owners' residuals."""
    results = ranks(world_size).run(_conserved, name)
    assert max(error for error, _ in results) < 2e-6
    assert len({bits for _, bits in results}) == 1


def _all_settings(rank, world_size, folder):
    """Train 6 steps, or 3 and, after a restart from files, 3 more."""
    found = {}
    for name in SETTINGS:
        ends = []
        for cut in (6, 3):
            model = DDP(seeded(Tower), bucket_cap_mb=0.01)
            optimizer = _lans(model)
            link = thinwire.clan(model, name, optimizer=optimizer, options=SMALL)
            _train(model, optimizer, rank, range(cut))
            if cut < 6:
                state = {"model": model.module, "optimizer": optimizer, "link": link}
                torch.save({key: one.state_dict() for key, one in state.items()}, f"{folder}/{rank}")
                link.close()
                model = DDP(seeded(Tower), bucket_cap_mb=0.01)
                optimizer = _lans(model)
                link = thinwire.clan(model, name, optimizer=optimizer, options=SMALL)
                saved = torch.load(f"{folder}/{rank}")
                for key, one in {"model": model.module, "optimizer": optimizer, "link": link}.items():
                    one.load_state_dict(saved[key])
                _train(model, optimizer, rank, range(cut, 6))
            ends.append(digest([*model.parameters(), *(m for s in optimizer.state.values() for m in s.values())]))
            link.close()
        found[name] = ends
    return found


def test_replicas_are_equal_and_resume_is_bit_for_bit(ranks, tmp_path):
    results = ranks(3).run(_all_settings, str(tmp_path))
    for name in SETTINGS:
        whole, resumed = results[0][name]
        assert whole == resumed, name
        assert {result[name][0] for result in results} == {whole}, name
    assert len({results[0][name][0] for name in SETTINGS}) == len(SETTINGS), "settings do differ"


def _refused(rank, world_size):
    model = DDP(seeded(Tower))
    with pytest.raises(AttachError, match=r"CLAN trains with LANS: expected a thinwire.optim.LANS, got AdamW"):
        thinwire.clan(model, "topk", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(RecipeError, match=r"plain error feedback, or none, got 'topk:0.001@nag'"):
        thinwire.clan(model, {"*": "topk:0.001@nag"})
    link = thinwire.clan(model, {"*.bias": "dense", "*": "topk"}, options=SMALL)
    recipes = {param.info.name: param.aggregator.recipe() for param in link.plan.params if not param.reason}
    link.close()
    return recipes


def test_what_is_refused_and_patterns(ranks):
    for recipes in ranks(2).run(_refused):
        assert recipes
        assert {name.rpartition(".")[2] for name in recipes} == {"weight"}
        assert set(recipes.values()) == {"topk:0.001"}
