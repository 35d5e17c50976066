"""Embeddings with sparse gradients: summed as DDP does it, beside compressed ones, in one step with them."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import attached, digest

import thinwire
from thinwire import hooks
from thinwire.errors import AttachError, PlanError


class Words(nn.Module):
    """A large sparse embedding, a bag of words, and a dense layer."""

    def __init__(self, sparse=True):
        super().__init__()
        self.embed = nn.Embedding(200, 16, sparse=sparse, padding_idx=0)
        self.bag = nn.EmbeddingBag(50, 16, sparse=sparse, mode="sum")
        self.head = nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.embed(tokens).mean(dim=1) + self.bag(tokens % 50)
        return (self.head(x) - x.roll(1, dims=1)).square().sum()


def tokens_of(rank, step):
    """Return the words of a rank in a step; in step 2 rank 1 has padding only, of which no gradient comes."""
    if (rank, step) == (1, 2):
        return torch.zeros(4, 6, dtype=torch.int64)
    return torch.randint(1, 200, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def _two_models():
    torch.manual_seed(0)
    model = Words()
    return DDP(copy.deepcopy(model), bucket_cap_mb=0.001), DDP(model, bucket_cap_mb=0.001)


def _beside_ddp(rank, world_size, how):
    model, plain = _two_models()
    if how == "stateless":
        model.register_comm_hook(None, hooks.int8_hook)
        return _compared(model, plain, rank), {}, None, True
    with attached(model, "topk:0.1") as link:
        same = _compared(model, plain, rank)
        stats = link.stats()
        names = {param.info.name for param in link.plan.params}
        owed = any(bool(residual.any()) for residual in link.state.worker.values())
        return same, stats["dense"], names, owed


def _compared(model, plain, rank):
    same = []
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            each(tokens_of(rank, step)).backward()
        pairs = [(getattr(each.module, name).weight.grad for each in (model, plain)) for name in ("embed", "bag")]
        same.append([a.is_sparse and torch.equal(a.coalesce().to_dense(), b.coalesce().to_dense()) for a, b in pairs])
    return same, digest([model.module.head.weight.grad])


@pytest.mark.parametrize("how", ["attach", "stateless"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sparse_gradients_are_ddps_own_to_the_bit(ranks, world_size, how):
    results = ranks(world_size).run(_beside_ddp, how)
    for (same, head), dense, names, owed in results:
        assert same == [[True, True]] * 4
        assert head == results[0][0][1]
        if how == "attach":
            assert dense == {"embed.weight": "sparse gradient", "bag.weight": "sparse gradient"}
            assert names == {"head.weight", "head.bias"}
            assert owed


def _counted(rank, world_size):
    model, _ = _two_models()
    with attached(model, "int8") as link:
        tokens = tokens_of(rank, 0)
        model(tokens).backward()
        indices = tokens.numel()  # of either embedding, before they are coalesced
        expected = 2 * indices * (8 + 4 * 16) * (world_size - 1)
        return link.stats()["wire_nbytes"] - link.planned_nbytes(), expected, link.stats()["num_collectives"]


def test_what_they_send_is_counted(ranks):
    for counted, expected, _ in ranks(3).run(_counted):
        assert counted == expected


def _not_finite(rank, world_size):
    model, _ = _two_models()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with attached(model, "topk:0.1", scaler=scaler) as link:
        for step in (0, 1):
            optimizer.zero_grad()
            before = digest(link.state.worker.values())
            value = model(tokens_of(rank, step))
            if step == 1 and rank == 0:  # the sparse gradient alone is bad
                value = value + float("inf") * model.module.embed(torch.tensor([7]))[0, 0]
            scaler.scale(value).backward()
            weights = digest(model.parameters())
            scaler.step(optimizer)
            scaler.update()
            kept = digest(link.state.worker.values()) == before
            seen.append((kept, digest(model.parameters()) == weights, link.skipped_steps, link.state.step))
    return seen, scaler.get_scale(), digest(model.parameters())


def test_one_that_is_not_finite_skips_the_step_for_all(ranks):
    results = ranks(2).run(_not_finite)
    for seen, scale, bits in results:
        assert seen == [(False, False, 0, 1), (True, True, 1, 1)]
        assert scale == 2.0
        assert bits == results[0][2]


def _sparse_alone(rank, world_size):
    with pytest.raises(AttachError, match="all gradients are sparse"):
        thinwire.attach(DDP(nn.Sequential(nn.Embedding(10, 4, sparse=True))), "int8")
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="sparse gradients"):
        thinwire.attach(DDP(Words(sparse=True)) if rank == 0 else DDP(Words(sparse=False)), "int8")


def test_models_for_which_there_is_nothing_to_do(ranks):
    ranks(2).run(_sparse_alone)


def _said(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("thinwire")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with attached(_two_models()[0], "int8"):
            return [line for line in lines if "sparse" in line]
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def test_the_log_names_them_once(ranks):
    (line,), others = ranks(2).run(_said)
    assert "bag.weight, embed.weight" in line
    assert others == []
