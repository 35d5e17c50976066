"""Mixed precision: autocast with a GradScaler as PyTorch has it, and scalers that ranks do not have alike."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded

import thinwire
from thinwire.errors import LossScaleError, PlanError

DTYPES = [torch.float16, torch.bfloat16]


class Scale:
    """A GradScaler whose scale is set by hand."""

    def __init__(self, scale=1024.0):
        self.scale = scale

    def get_scale(self):
        return self.scale


# --- scales that differ -----------------------------------------------------------------------------------------------


def _differing(rank, world_size, recipe):
    model, scaler = DDP(seeded(Tower), bucket_cap_mb=0.01), Scale()
    with attached(model, recipe, scaler=scaler) as link:
        ledger = Ledger(model, link)

        def backward(step):
            model.zero_grad()
            (scaler.scale * loss(model, batch(rank, step))).backward()

        def counted(step):
            ledger.expect(loss(model.module, batch(rank, step)))
            backward(step)
            ledger.got(scaler.scale)

        counted(0)
        before = link.state_dict()
        scaler.scale = 512.0 if rank == 1 else 2048.0
        with pytest.raises(RuntimeError, match="LossScaleError") as raised:
            backward(1)
        assert isinstance(link.error, LossScaleError)
        after = link.state_dict()
        kept = [digest(state[kind].values()) for state in (before, after) for kind in ("worker", "owner")]
        assert kept[:2] == kept[2:]
        assert [before[key] for key in ("step", "loss_scale")] == [after[key] for key in ("step", "loss_scale")]
        scaler.scale = 4096.0
        counted(2)  # one may go on
        feedback = any(param.aggregator.feedback is not None for param in link.plan.params)
        return str(raised.value), digest(gradients(model)), ledger.error() if feedback else 0.0


@pytest.mark.parametrize(
    "recipe",
    [
        "int4",
        "topk:0.05",
        "gather/onebit",
        "sum/randomk:0.1:fp32",
        "global:8",
        "globalexp",
        "terngrad:shared+terngrad",
        "powersgd:2",
        "int8",
    ],
)
def test_scales_that_differ_are_named_before_units_are_mixed(ranks, recipe):
    results = ranks(3).run(_differing, recipe)
    for message, bits, error in results:
        assert "got 2048 on most while rank 1 has 512, in step 1" in message
        assert bits == results[0][1]
        assert error < 2e-6


def _differing_at_attach(rank, world_size):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + rank))
    with pytest.raises(PlanError) as raised:
        thinwire.attach(DDP(seeded(Tower, 16, 2)), "int8", scaler=scaler)
    return str(raised.value)


def test_scalers_that_differ_from_the_start_are_refused(ranks):
    for message in ranks(2).run(_differing_at_attach):
        assert "rank 0 has `scaler=of scale 1024`, rank 1 has `scaler=of scale 2048`" in message


# --- autocast ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers that autocast runs in 16 bits, and a norm that it does not."""

    def __init__(self, width=48):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))).relu())


def _amp_steps(model, rank, dtype, steps, *, link_of=None, bad=()):
    """Train as PyTorch's recipe for mixed precision says; return losses, hashes of gradients, and scales."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    link = None if link_of is None else link_of(scaler)
    losses, bits, scales = [], [], []
    for step in steps:
        x = batch(rank, step % 4)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            value = (model(x) - x.roll(1, dims=1)).float().square().mean()
        if step in bad and rank == 0:
            value = value * float("inf")
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        bits.append(digest(gradients(model)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
        scales.append(scaler.get_scale())
    return losses, bits, scales, link


def _attached_with(model, recipe, scaler, **options):
    return thinwire.attach(model, recipe, scaler=scaler, options=ALL, **options)


def _votes_with_a_scaler(rank, world_size):
    model = DDP(seeded(Net))
    for recipe in ("sign", "dense until 5 then sign:random"):
        with pytest.raises(thinwire.ThinwireError, match=r"'sign' delivers \+1 and -1 whatever the loss scale"):
            thinwire.attach(model, recipe, scaler=torch.amp.GradScaler("cpu"), options=ALL)
    thinwire.attach(model, "sign", options=ALL).close()


def test_votes_take_no_scaler(ranks):
    ranks(2).run(_votes_with_a_scaler)


def _autocast(rank, world_size, dtype, recipe):
    model = DDP(seeded(Net), bucket_cap_mb=0.01)
    plain = DDP(copy.deepcopy(model.module))
    attach = functools.partial(_attached_with, model, recipe)
    losses, _, scales, link = _amp_steps(model, rank, dtype, range(40), link_of=attach, bad=(6,))
    expected, _, expected_scales, _ = _amp_steps(plain, rank, dtype, range(40), bad=(6,))
    skipped = link.skipped_steps
    link.close()
    return losses, expected, scales == expected_scales, skipped, digest(model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["int8", "int4", "topk:0.1"])
def test_autocast_with_a_grad_scaler_trains_as_without_compression(ranks, dtype, recipe):
    results = ranks(2).run(_autocast, dtype, recipe)
    for losses, expected, same_scales, skipped, bits in results:
        assert same_scales
        assert skipped == 1
        assert bits == results[0][4]
        first, last, ours = (
            sum(each) / 4 for each in (expected[:4], expected[-4:], losses[-4:])
        )  # four batches in all
        assert last < 0.6 * first
        assert ours < last + 0.1 * (first - last)


def _amp_warm_up(rank, world_size, dtype):
    model = DDP(seeded(Net), bucket_cap_mb=0.01)
    plain = DDP(copy.deepcopy(model.module), bucket_cap_mb=0.01)
    attach = functools.partial(_attached_with, model, "onebit", start_after=5)
    _, bits, scales, link = _amp_steps(model, rank, dtype, range(8), link_of=attach, bad=(2,))
    _, expected, expected_scales, _ = _amp_steps(plain, rank, dtype, range(8), bad=(2,))
    link.close()
    return [a == b for a, b in zip(bits, expected, strict=True)], scales == expected_scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_warm_up_is_ddp_with_amp_on(ranks, dtype):
    """Two ranks, whose sums have one order. The skipped step counts for none, and its nan has other places."""
    for same, same_scales in ranks(2).run(_amp_warm_up, dtype):
        assert same[:2] + same[3:6] == [True] * 5
        assert not any(same[6:])
        assert same_scales
