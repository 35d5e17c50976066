"""Steps that are not finite: all ranks learn of them, skip alike, and lose nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Ledger, Tower, attached, batch, digest, gradients, loss, seeded

from thinwire import ThinwireError
from thinwire.errors import NonFiniteError


class FakeScaler:
    """Only what the library asks of a GradScaler."""

    def __init__(self, scale=4.0):
        self.scale = scale

    def get_scale(self):
        return self.scale


def _memory(link):
    """Hash all that a skipped step must leave alone."""
    state = link.state_dict()
    tensors = [tensor for kind in ("worker", "owner") for _, tensor in sorted(state[kind].items())]
    return digest(tensors), state["step"], state["loss_scale"], state["learning_rates"]


def _poisoned(model, x, where, value):
    """Return a loss whose gradient for layer `where` holds `value`."""
    return loss(model, x) + value * model.module.layers[where].weight[0, 0]


# --- with a scaler --------------------------------------------------------------------------------------------------


def _skips(rank, world_size, recipe, value):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    scaler = FakeScaler()
    seen = []
    with attached(model, recipe, scaler=scaler) as link:
        for step in range(5):
            before = _memory(link)
            model.zero_grad()
            x = batch(rank, step)
            bad = step in (0, 2)
            value_here = value if rank == 1 else 0.0
            total = _poisoned(model, x, 2, value_here) if bad else loss(model, x)
            (total * scaler.scale).backward()
            finite = all(bool(g.isfinite().all()) for g in gradients(model))
            assert finite != bad
            assert (_memory(link) == before) == bad
            seen.append(digest(gradients(model)))
        return seen, link.skipped_steps, link.state.step, link.stats()["skipped_steps"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize(
    "recipe",
    ["int8:stochastic", "int4", "topk:0.05", "onebit", "gather/onebit", "fp16", "powersgd:2", "global:8", "globalexp"],
)
def test_a_bad_step_reaches_all_ranks_and_leaves_no_trace(ranks, recipe, value):
    results = ranks(2).run(_skips, recipe, value)
    assert results[0] == results[1]
    assert results[0][1:] == (2, 3, 2)


class Mixed(nn.Module):
    """A part that is compressed and a float64 part that is not."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(32, 32)
        self.wide = nn.Linear(32, 4, dtype=torch.float64)

    def forward(self, x):
        return self.wide(self.narrow(x).double()).square().sum()


def _bad_dense_part(rank, world_size):
    model = DDP(seeded(Mixed))
    with attached(model, "onebit", scaler=FakeScaler(1.0)) as link:
        model(batch(rank, 0, width=32)).backward()
        before = _memory(link)
        model.zero_grad()
        total = model(batch(rank, 1, width=32))
        if rank == 1:
            total = total + float("inf") * model.module.wide.bias[0]
        total.backward()
        return _memory(link) == before, link.skipped_steps


def test_a_bad_gradient_in_a_dense_bucket_counts_too(ranks):
    assert ranks(2).run(_bad_dense_part) == [(True, 1)] * 2


def _torch_scaler(rank, world_size, recipe):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales, skipped = [], []
    with attached(model, recipe, scaler=scaler) as link:
        ledger = Ledger(model, link)
        for step in range(8):
            x = batch(rank, step)
            bad = step in (1, 5)
            optimizer.zero_grad()
            total = _poisoned(model, x, 1, float("inf") if rank == 0 else 0.0) if bad else loss(model, x)
            if not bad:
                ledger.expect(loss(model.module, x))
            scale = scaler.get_scale()
            scaler.scale(total).backward()
            if not bad:
                ledger.got(scale)
            before = digest(model.parameters())
            scaler.step(optimizer)
            scaler.update()
            skipped.append(digest(model.parameters()) == before)
            scales.append(scaler.get_scale())
        return ledger.error(), scales, skipped, link.skipped_steps, digest(model.parameters())


@pytest.mark.parametrize(
    "recipe", ["int4", "topk:0.05", "onebit", "gather/onebit", "powersgd:2", "topkc:0.3:chunk=8:fp32"]
)
def test_grad_scaler_skips_everywhere_alike_and_residuals_follow_its_scale(ranks, recipe):
    results = ranks(2).run(_torch_scaler, recipe)
    for error, scales, skipped, num_skipped, _ in results:
        assert error < 1e-5
        assert len(set(scales)) == 2  # it went down and up
        assert [step for step, was in enumerate(skipped) if was] == [1, 5]
        assert num_skipped == 2
    assert results[0][4] == results[1][4]


def _disabled_scaler(rank, world_size):
    model = DDP(seeded(Tower))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with attached(model, "int8", scaler=scaler), pytest.raises(RuntimeError, match="NonFiniteError"):
        _poisoned(model, batch(rank, 0), 0, float("nan")).backward()


def test_a_disabled_scaler_skips_nothing_and_so_counts_as_none(ranks):
    ranks(2).run(_disabled_scaler)


# --- without ----------------------------------------------------------------------------------------------------------


def _raises(rank, world_size, recipe, bad_rank):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with attached(model, recipe) as link:
        loss(model, batch(rank, 0)).backward()
        value = float("nan") if rank == bad_rank else 0.0
        with pytest.raises(RuntimeError) as raised:
            _poisoned(model, batch(rank, 1), 3, value).backward()
        assert isinstance(link.error, NonFiniteError)
        assert isinstance(link.error, ThinwireError)
        model.zero_grad()
        loss(model, batch(rank, 2)).backward()  # one may go on
        return str(raised.value), digest(gradients(model)), all(bool(g.isfinite().all()) for g in gradients(model))


@pytest.mark.parametrize("recipe", ["int8", "topk:0.05", "gather/onebit", "powersgd:2:alternating", "global:8"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_without_a_scaler_all_ranks_raise_and_name_rank_and_parameter(ranks, recipe, bad_rank):
    results = ranks(3).run(_raises, recipe, bad_rank)
    for message, bits, finite in results:
        assert f"'layers.3.weight' on rank {bad_rank}" in message
        assert "GradScaler" in message
        assert finite
        assert bits == results[0][1]


def _warns(rank, world_size, recipe):
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    try:
        model = DDP(seeded(Tower), bucket_cap_mb=0.01)
        with attached(model, recipe, on_nonfinite="warn") as link:
            value = float("nan") if rank == 1 else 0.0
            _poisoned(model, batch(rank, 0), 0, value).backward()
            bad = any(bool(g.isnan().any()) for g in gradients(model))
            assert link.error is None
            model.zero_grad()
            loss(model, batch(rank, 1)).backward()
            return bad, [line for line in records if "layers.0.weight" in line], digest(gradients(model))
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def test_on_nonfinite_warn_delivers_nan_and_goes_on(ranks):
    results = ranks(2).run(_warns, "onebit")
    for bad, lines, _ in results:
        assert bad
        assert len(lines) == 1
        assert "on rank 1" in lines[0]
    assert results[0][2] == results[1][2]


def _overflow_of_the_mean(rank, world_size):
    """float16 holds each contribution; the owner's bytes must hold the mean plus its residual."""
    model = DDP(seeded(Tower, 8, 1))
    with attached(model, "topk:1.0") as link:
        for _ in range(2):
            model.zero_grad()
            (65000.0 * model(torch.ones(1, 8)).sum() * 0 + 60000.0 * model.module.layers[0].weight.sum()).backward()
        grads = gradients(model)
        return bool(grads[0].isfinite().all()), link.error


def test_large_but_finite_is_fine(ranks):
    assert ranks(2).run(_overflow_of_the_mean) == [(True, None)] * 2


def _dense_nan(rank, world_size, start_after):
    model = DDP(seeded(Tower))
    with attached(model, "int8" if start_after else "dense", start_after=start_after) as link:
        with pytest.raises(RuntimeError, match="NonFiniteError"):
            _poisoned(model, batch(rank, 0), 0, float("nan") if rank == 0 else 0.0).backward()
        return isinstance(link.error, NonFiniteError), dist.get_rank() == rank


@pytest.mark.parametrize("start_after", [0, 2])
def test_dense_steps_raise_as_well(ranks, start_after):
    assert ranks(2).run(_dense_nan, start_after) == [(True, True)] * 2
