"""What is delivered: DDP's own bits for `dense`; for all else, bit for bit what the compressors alone would give."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Tower, attached, batch, digest, gradients, loss, seeded, train

from thinwire import BlockQuant, ErrorFeedback, Gather, TopK, TwoShot
from thinwire.random import OWNER_STREAM, Key

RECIPES = [
    "int8",
    "int8:stochastic",
    "int4",
    "topk:0.01",
    "topk:0.05:fp32",
    "onebit",
    "fp16",
    "bf16",
    "gather/onebit",
    "gather/topk:0.1",
    "gather/int8",
    "lowrank:2",
    "gather/lowrank:1:fp32",
]


# --- dense ----------------------------------------------------------------------------------------------------------


def _dense_and_plain(rank, world_size, dtype):
    pairs = []
    for cap in (0.01, 0.03, 25):
        for view in (False, True):
            torch.manual_seed(0)
            ours = DDP(seeded(Tower, dtype=dtype), bucket_cap_mb=cap, gradient_as_bucket_view=view)
            plain = DDP(seeded(Tower, dtype=dtype), bucket_cap_mb=cap, gradient_as_bucket_view=view)
            with attached(ours, "dense"):
                pairs.append([_train_as(model, rank, dtype) for model in (ours, plain)])
    return pairs


def _train_as(model, rank, dtype):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        loss(model, batch(rank, step).to(dtype)).backward()
        seen += gradients(model)
        optimizer.step()
    return digest([*seen, *model.parameters()])


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, torch.float32), (2, torch.float32), (3, torch.float32), (4, torch.bfloat16)]
)
def test_dense_is_ddp_to_the_bit(ranks, world_size, dtype):
    results = ranks(world_size).run(_dense_and_plain, dtype)
    for ours, plain in results[0]:
        assert ours == plain
    assert results == [results[0]] * world_size


# --- the oracle -----------------------------------------------------------------------------------------------------


def _oracle(plan, step, grads, worker, owner):
    """Return the mean per parameter from compressors alone, and update the residuals, one list entry per rank."""
    means = {}
    for param in plan.params:
        aggregator, name = param.aggregator, param.info.name
        mean = torch.empty(param.info.numel)
        for p in param.partitions:
            span = slice(p.offset, p.offset + p.numel)
            feedback = aggregator.feedback is not None
            data = [
                aggregator.up.encode(
                    grad[name][span].view(p.spec.shape),
                    Key(p.key, step, rank, p.offset),
                    residual=worker[rank][name][span] if feedback else None,
                )
                for rank, grad in enumerate(grads)
            ]
            total = aggregator.up.decode(data[0], p.spec)
            for more in data[1:]:
                aggregator.up.accumulate_(total, more, p.spec)
            total /= len(grads)
            if isinstance(aggregator, TwoShot):
                back = aggregator.down.encode(
                    total,
                    Key(p.key, step, OWNER_STREAM, p.offset),
                    residual=owner[name][span] if feedback else None,
                )
                total = aggregator.down.decode(back, p.spec)
            mean[span] = total.view(-1)
        means[name] = mean.view(param.info.shape)
    return means


def _against_oracle(rank, world_size, recipe):
    model = DDP(seeded(Tower, 40, 3), bucket_cap_mb=0.01)
    names = [name for name, _ in model.module.named_parameters()]
    worker = [{n: torch.zeros(p.numel()) for n, p in model.module.named_parameters()} for _ in range(world_size)]
    owner = {n: torch.zeros(p.numel()) for n, p in model.module.named_parameters()}
    wrong = []
    with attached(model, recipe) as link:
        for step in range(3):
            x = batch(rank, step, width=40)
            local = torch.autograd.grad(loss(model.module, x), list(model.parameters()))
            everyone = [None] * world_size
            dist.all_gather_object(everyone, {n: g.reshape(-1) for n, g in zip(names, local, strict=True)})
            expected = _oracle(link.plan, step, everyone, worker, owner)
            model.zero_grad()
            loss(model, x).backward()
            for name, param in model.module.named_parameters():
                if not torch.equal(param.grad, expected[name]):
                    wrong.append((step, name, float((param.grad - expected[name]).abs().max())))
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_mean_is_what_the_compressors_alone_give(ranks, world_size, recipe):
    assert ranks(world_size).run(_against_oracle, recipe) == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [5, 8])
def test_larger_worlds(ranks, world_size):
    for recipe in ("int8", "topk:0.05:fp32", "gather/onebit"):
        assert ranks(world_size).run(_against_oracle, recipe) == [[]] * world_size


def _dense_16_bit(rank, world_size, recipe, dtype):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    x = batch(rank, 0)
    mean = [g / world_size for g in torch.autograd.grad(loss(model.module, x), list(model.parameters()))]
    for grad in mean:
        dist.all_reduce(grad)
    with attached(model, recipe):
        loss(model, x).backward()
    bound = 2 * world_size * torch.finfo(dtype).eps
    return (
        max(float((p.grad - m).abs().max() / m.abs().max()) for p, m in zip(model.parameters(), mean, strict=True))
        < bound
    )


@pytest.mark.parametrize(("recipe", "dtype"), [("dense:fp16", torch.float16), ("dense:bf16", torch.bfloat16)])
def test_dense_in_16_bits_is_near_the_mean(ranks, recipe, dtype):
    assert ranks(3).run(_dense_16_bit, recipe, dtype) == [True] * 3


# --- replicas stay equal --------------------------------------------------------------------------------------------


def _policy(info):
    if info.index % 3 == 0:
        return None
    return Gather(up=BlockQuant(bits=8)) if info.index % 3 == 1 else _TOP_K


_TOP_K = TwoShot(up=TopK(density=0.1), down=BlockQuant(bits=8), feedback=ErrorFeedback())
POLICIES = {
    "patterns": {"layers.0.*": "dense", "layers.1.weight": "topk:0.05", "*.bias": "fp16", "*": "int4"},
    "some match none": {"layers.1.*": "gather/onebit"},
    "function": _policy,
    "two dense dtypes": {"*.bias": "dense", "*": "dense:fp16"},
}


def _ten_steps(rank, world_size, recipe):
    model = DDP(seeded(Tower), bucket_cap_mb=0.02)
    before = digest(model.parameters())
    with attached(model, POLICIES.get(recipe, recipe)):
        after = train(model, rank, range(10), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    return digest(model.parameters()) != before, after


@pytest.mark.parametrize("recipe", [*RECIPES, "dense:fp16", *POLICIES])
def test_replicas_stay_equal_to_the_bit(ranks, recipe):
    results = ranks(3).run(_ten_steps, recipe)
    assert results[0][0]
    assert results == [results[0]] * 3


# --- nothing but the plan decides the bits --------------------------------------------------------------------------


def _variants(rank, world_size, recipe):
    results = {}
    for cap, view, message_nbytes, workers, threads in [
        (0.01, False, 1 << 20, 1, 1),
        (0.1, True, 1 << 20, 1, 1),
        (1, False, 1, 1, 1),
        (25, True, 5000, 3, 1),
        (0.01, True, 3000, 4, 2),
    ]:
        model = DDP(seeded(Tower), bucket_cap_mb=cap, gradient_as_bucket_view=view)
        options = dataclasses.replace(ALL, message_nbytes=message_nbytes)
        with attached(model, POLICIES.get(recipe, recipe), options=options, workers=workers, threads=threads):
            results[cap, view, message_nbytes, workers, threads] = train(model, rank, range(4))
    return results


@pytest.mark.parametrize(
    "recipe", ["int8:stochastic", "int4", "topk:0.01", "onebit", "gather/onebit", "bf16", "lowrank:2", *POLICIES]
)
def test_buckets_messages_and_threads_do_not_show_in_the_bits(ranks, recipe):
    results = ranks(3).run(_variants, recipe)
    assert len(set(results[0].values())) == 1, results[0]
    assert results == [results[0]] * 3


def _defaults(rank, world_size):
    """The options users get, with parameters above and below the thresholds."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)))
    with attached(model, "topk:0.01", options=None) as link:
        for step in range(3):
            model.zero_grad()
            model(torch.randn(4, 256, generator=torch.Generator().manual_seed(rank + step))).square().mean().backward()
        return digest(gradients(model)), link.stats()["dense"]


def test_default_options_compress_the_large_matrix_alone(ranks):
    results = ranks(2).run(_defaults)
    assert results[0] == results[1]
    assert results[0][1] == {
        "0.bias": "one-dimensional",
        "2.weight": "below 65,536 bytes",
        "2.bias": "one-dimensional",
    }
