"""Models and programs as they come: several dtypes, several models, other collectives, other defaults."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded, train

import thinwire
from thinwire.errors import AttachError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ManyDtypes(nn.Module):
    """One matrix of each dtype, and a complex vector."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterDict(
            {"of_" + str(dtype).removeprefix("torch."): nn.Parameter(torch.randn(24, 24).to(dtype)) for dtype in DTYPES}
        )
        self.wave = nn.Parameter(torch.randn(24, dtype=torch.complex64))

    def forward(self, x):
        total = torch.zeros((), dtype=torch.float64)
        for part in self.parts.values():
            total = total + (x.to(part.dtype) @ part).double().square().mean()
        return total + (x.to(torch.complex64) * self.wave).abs().square().mean().double()


def _many_dtypes(rank, world_size, recipe, view):
    model = DDP(seeded(ManyDtypes), gradient_as_bucket_view=view)
    plain = DDP(copy.deepcopy(model.module), gradient_as_bucket_view=view)
    with attached(model, recipe) as link:
        assert str(link.plan)
        assert link.codec_seconds() > 0
        reasons = link.stats()["dense"]
        for step in range(3):
            x = batch(rank, step, width=24)
            model.zero_grad()
            plain.zero_grad()
            model(x).backward()
            plain(x).backward()
        near = {
            name: float((p.grad - q.grad).abs().max() / q.grad.abs().max())
            for (name, p), q in zip(model.module.named_parameters(), plain.module.parameters(), strict=True)
        }
        same_dtype = all(p.grad.dtype == p.dtype for p in model.parameters())
        return (
            near,
            digest(torch.view_as_real(g) if g.is_complex() else g for g in gradients(model)),
            reasons,
            same_dtype,
        )


@pytest.mark.parametrize("view", [False, True])
def test_many_dtypes(ranks, view):
    results = ranks(2).run(_many_dtypes, "int8", view)
    for near, bits, reasons, same_dtype in results:
        assert near["parts.of_float64"] == near["wave"] == 0.0
        assert max(near.values()) < 0.02
        assert bits == results[0][1]
        assert reasons == {"parts.of_float64": "dtype float64", "wave": "dtype complex64"}
        assert same_dtype


def test_many_dtypes_with_feedback(ranks):
    results = ranks(3).run(_many_dtypes, "onebit", False)
    assert len({bits for _, bits, _, _ in results}) == 1


# --- what a program does beside ---------------------------------------------------------------------------------------


class Summed(torch.autograd.Function):
    """A sum over ranks, forward and backward, as synchronised batch normalisation does."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Synchronised(nn.Module):
    """Towers with collectives of their own between them, and buffers that DDP broadcasts."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(Tower(24, 2) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x):
        for tower in self.towers:
            x = x - Summed.apply(self.norm(tower(x)).mean(dim=0, keepdim=True)) / dist.get_world_size()
        return x


def _own_collectives(rank, world_size, recipe):
    results = []
    for what in (recipe, None):
        model = DDP(seeded(Synchronised), bucket_cap_mb=0.002)
        with attached(model, what or "dense"):
            sums = []
            for step in range(4):
                model.zero_grad()
                value = loss(model, batch(rank, step, width=24))
                value.backward()
                mine = torch.tensor([float(rank + step)])
                dist.all_reduce(mine)
                sums.append(float(mine))
            results.append((digest(gradients(model)), sums, value.item(), digest(model.buffers())))
    return results


@pytest.mark.parametrize("recipe", ["int8", "gather/onebit"])
def test_collectives_in_backward_stay_exact(ranks, recipe):
    results = ranks(3).run(_own_collectives, recipe)
    for ours, plain in results:
        assert ours[0] == results[0][0][0]
        assert ours[1] == plain[1] == [3.0 * step + 3.0 for step in range(4)]
        # Same weights throughout, so the forward passes, with their own sums, agree to the bit.
        assert ours[2:] == plain[2:]


class SyncNorm(nn.Module):
    """Normalises by the batches of all ranks, as SyncBatchNorm does: sums on DDP's own group, forward and backward."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        sums = Summed.apply(torch.stack([x.sum(0), x.square().sum(0), torch.full_like(x[0], len(x))]))
        mean = sums[0] / sums[2]
        return (x - mean) * torch.rsqrt(sums[1] / sums[2] - mean.square() + 1e-5) * self.weight + self.bias


def _sync_norm(rank, world_size, recipe):
    """Return hashes of what forward and backward see of the sums in the first step, and of what training comes to."""
    model = DDP(seeded(lambda: nn.Sequential(Tower(24, 2), SyncNorm(24), Tower(24, 2))), bucket_cap_mb=0.002)
    seen = []
    norm = model.module[1]
    norm.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    norm.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_in[0].clone()))
    link = None if recipe is None else thinwire.attach(model, recipe, options=ALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = ""
    for step in range(3):
        optimizer.zero_grad()
        loss(model, batch(rank, step, width=24, rows=6 + rank)).backward()
        optimizer.step()
        first = first or digest(seen)
    if link is not None:
        link.close()
    return first, digest(model.parameters())


def test_statistics_of_all_ranks_are_untouched(ranks):
    plain = ranks(3).run(_sync_norm, None)
    assert ranks(3).run(_sync_norm, "dense") == plain
    ours = ranks(3).run(_sync_norm, "int4")
    assert [first for first, _ in ours] == [first for first, _ in plain]
    assert len({trained for _, trained in ours}) == 1 != len({first for first, _ in ours})
    assert ours[0][1] != plain[0][1]


def _sync_batch_norm(rank, world_size):
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DDP(layer)
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        layer(batch(rank, 0, width=24))
    assert layer.eval()(batch(rank, 0, width=24)).shape == (8, 24)


def test_torch_itself_refuses_sync_batch_norm_on_the_cpu(ranks):
    ranks(2).run(_sync_batch_norm)


def _two_models(rank, world_size, view):
    """As a GAN: the critic's loss trains it alone, the maker's backward runs through the critic."""
    maker, critic = DDP(seeded(Tower, 24, 3), gradient_as_bucket_view=view), DDP(seeded(Tower, 24, 2, seed=1))
    with attached(maker, "topk:0.1") as first, attached(critic, "int4") as second:
        for step in range(4):
            x = batch(rank, step, width=24)
            critic.zero_grad()
            (loss(critic, x) - loss(critic, maker.module(x).detach())).square().backward()
            maker.zero_grad()
            for param in critic.parameters():
                param.requires_grad_(False)
            loss(lambda y: critic.module(maker(y)), x).backward()
            for param in critic.parameters():
                param.requires_grad_(True)
        both = loss(maker, x) + loss(critic, x)  # and both in one backward
        maker.zero_grad()
        critic.zero_grad()
        both.backward()
        return digest([*gradients(maker), *gradients(critic)]), first.state.step, second.state.step


@pytest.mark.parametrize("view", [False, True])
def test_two_models_in_one_process(ranks, view):
    results = ranks(2).run(_two_models, view)
    assert results[0] == results[1]
    assert results[0][1:] == (5, 5)


def _ignored(rank, world_size):
    inner = seeded(Tower, 24, 3)
    DDP._set_params_and_buffers_to_ignore_for_model(inner, ["layers.1.weight", "layers.1.bias"])
    model = DDP(inner)
    with attached(model, "int8") as link:
        loss(model, batch(rank, 0, width=24)).backward()
        return [param.info.name for param in link.plan.params], digest(
            p.grad for name, p in model.module.named_parameters() if "layers.1" not in name
        )


def test_ignored_parameters_are_no_business_of_the_plan(ranks):
    results = ranks(2).run(_ignored)
    assert results[0] == results[1]
    assert results[0][0] == ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]


def _thawed(rank, world_size):
    inner = seeded(Tower, 24, 3)
    inner.layers[1].requires_grad_(False)
    model = DDP(inner)
    with attached(model, "topk:0.1") as link:
        loss(model, batch(rank, 0, width=24)).backward()
        saved = link.state_dict()
        inner.layers[1].requires_grad_(True)
        with pytest.raises(AttachError, match=r"'layers\.1\.weight' requires a gradient now"):
            loss(model, batch(rank, 1, width=24)).backward()
    # As the message says. What was owed goes on; the thawed layer owes nothing yet.
    model = DDP(inner)
    with attached(model, "topk:0.1") as link:
        for name, param in inner.layers[1].named_parameters(prefix="layers.1"):
            saved["worker"][name], saved["owner"][name] = torch.zeros_like(param), torch.zeros_like(param)
        states = [None] * world_size
        dist.all_gather_object(states, saved)
        link.load_state_dict(thinwire.reshard_state(states, world_size, partition_numel=ALL.partition_numel)[rank])
        ledger = Ledger(model, link)
        for name in saved["worker"]:  # what was owed is due; `saved` counts once on each rank
            ledger._due[name] += saved["worker"][name].double() + world_size * saved["owner"][name].double()
        x = batch(rank, 1, width=24)
        ledger.expect(loss(inner, x))
        model.zero_grad()
        loss(model, x).backward()
        ledger.got()
        return ledger.error(), digest(gradients(model)), len(gradients(model))


def test_layers_that_thaw(ranks):
    results = ranks(2).run(_thawed)
    assert results[0][1:] == results[1][1:]
    assert results[0][2] == 6
    assert max(error for error, _, _ in results) < 2e-6


def _warm_up(rank, world_size, cap):
    model = DDP(seeded(Tower), bucket_cap_mb=cap)
    plain = DDP(seeded(Tower), bucket_cap_mb=0.01)
    same, residuals = [], []
    with attached(model, "onebit", start_after=3) as link:
        for step in range(5):
            for each in (model, plain):
                each.zero_grad()
                loss(each, batch(rank, step)).backward()
            same.append(digest(gradients(model)) == digest(gradients(plain)))
            residuals.append(any(bool(r.any()) for r in link.state_dict()["worker"].values()))
    return same, residuals, digest(gradients(model))


def test_the_warm_up_of_two_ranks_is_ddp_to_the_bit(ranks):
    results = ranks(2).run(_warm_up, 0.01)
    for same, residuals, bits in results:
        assert same == [True, True, True, False, False]
        assert residuals == [False, False, False, True, True]
        assert bits == results[0][2]


def test_buckets_do_not_show_in_the_bits_of_the_warm_up(ranks):
    """Three ranks: DDP's own sums would differ."""
    small, large = (ranks(3).run(_warm_up, cap) for cap in (0.01, 25))
    for (_, residuals, bits), (_, _, others) in zip(small, large, strict=True):
        assert residuals == [False, False, False, True, True]
        assert bits == others == large[0][2]


class FixedScale:
    """A GradScaler whose scale stays."""

    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale


def _dense_after_loading(rank, world_size):
    model = DDP(seeded(Tower), bucket_cap_mb=25)
    with attached(model, "onebit", scaler=FixedScale(1024.0), start_after=1) as link:
        saved = link.state_dict()
        for residual in saved["worker"].values():
            residual.fill_(65536.0)  # 1 in units of the gradient
        saved["loss_scale"] = 65536.0
        link.load_state_dict(saved)
        (1024.0 * loss(model, batch(rank, 0))).backward()  # dense
        after = link.state_dict()
        return after["step"], {float(r.max()) / after["loss_scale"] for r in after["worker"].values()}


def test_dense_steps_keep_what_is_owed(ranks):
    """Another loss scale than the one the residuals were saved with, and a step that does not touch them."""
    assert ranks(2).run(_dense_after_loading) == [(1, {1.0})] * 2


def _dense_bf16(rank, world_size):
    model = DDP(seeded(Tower).to(torch.bfloat16), bucket_cap_mb=25)
    with attached(model, "dense") as link:
        loss(model, batch(rank, 0).to(torch.bfloat16)).backward()
        return link.stats()["work_nbytes"]


def test_a_dense_plan_keeps_no_copy_of_16_bit_buckets(ranks):
    assert ranks(2).run(_dense_bf16) == [0, 0]


def _globals(rank, world_size, recipe):
    model = DDP(seeded(Tower))
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    before = (digest([torch.get_rng_state()]), random.getstate(), str(np.random.get_state()))
    with attached(model, recipe):
        train(model, rank, range(3))
        model.eval()
        with torch.no_grad():
            model(batch(rank, 0))
        model.train()
        train(model, rank, range(2))
    after = (digest([torch.get_rng_state()]), random.getstate(), str(np.random.get_state()))
    return before == after, torch.get_default_dtype() == torch.float32, torch.get_num_threads() == 1


@pytest.mark.parametrize("recipe", ["int8:stochastic", "topk:0.1"])
def test_global_state_is_left_alone(ranks, recipe):
    assert ranks(2).run(_globals, recipe) == [(True, True, True)] * 2


@pytest.mark.parametrize("recipe", ["int4", "onebit", "topk:0.05"])
def test_the_default_dtype_does_not_matter(ranks, recipe):
    plain = ranks(2).run(_fixed_data, recipe, torch.float32)
    for dtype in (torch.float64, torch.bfloat16):
        assert ranks(2).run(_fixed_data, recipe, dtype) == plain


def _fixed_data(rank, world_size, recipe, dtype):
    """Exchange the same float32 gradients under another default dtype."""
    model = DDP(seeded(Tower, dtype=torch.float32))
    with torch.no_grad():
        for place, param in enumerate(model.parameters()):
            param.copy_(torch.linspace(-1, 1 + place, param.numel(), dtype=torch.float32).view_as(param))
    x = batch(rank, 0)
    torch.set_default_dtype(dtype)
    try:
        with attached(model, recipe) as link:
            for _ in range(3):
                model.zero_grad()
                loss(model, x).backward()
            assert link.codec_seconds() > 0
            state = link.state_dict()
            assert {t.dtype for kind in ("worker", "owner") for t in state[kind].values()} == {torch.float32}
        return digest(gradients(model))
    finally:
        torch.set_default_dtype(torch.float32)


def _joined(rank, world_size):
    """Uneven inputs: ranks that are done keep the others company with zeros."""
    model = DDP(seeded(Tower, 24, 3), bucket_cap_mb=0.002)
    with attached(model, "int8"), model.join():
        for step in range(3 + rank):
            model.zero_grad()
            loss(model, batch(rank, step, width=24)).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.05 * param.grad
    return digest(model.parameters())


def test_join_with_uneven_inputs(ranks):
    assert len(set(ranks(2).run(_joined))) == 1
