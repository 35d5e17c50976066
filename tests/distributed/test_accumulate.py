"""`thinwire.accumulate`: one exchange a window, of the same sum as without it, with DDP and FSDP2."""

import logging
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Ledger, Tower, attached, batch, digest, gradients, loss, seeded

import thinwire
from thinwire.errors import AttachError

MICRO, WINDOWS = 4, 3


# --- DDP --------------------------------------------------------------------------------------------------------------


def _windows(rank, world_size, recipe, saving):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    costs, touched, seen = [], [], []
    with attached(model, recipe) as link:
        ledger = Ledger(model, link)
        for window in range(WINDOWS):
            model.zero_grad()
            link.stats(reset=True)
            for micro in range(MICRO):
                x = batch(rank, MICRO * window + micro)
                ledger.expect(loss(model.module, x))
                before = digest(link.state.worker.values())
                with thinwire.accumulate(model, sync=micro == MICRO - 1) if saving else nullcontext():
                    loss(model, x).backward()
                touched.append(digest(link.state.worker.values()) != before)
            stats = link.stats()
            costs.append([stats["steps"], *(stats["steps"] * stats[k] for k in ("num_collectives", "wire_nbytes"))])
            ledger.got()
            seen += gradients(model)
        return costs, touched, ledger.error(), digest(seen), link.state.step


@pytest.mark.parametrize("recipe", ["topk:0.05", "gather/onebit"])
def test_a_window_costs_one_exchange_and_touches_residuals_once(ranks, recipe):
    results = ranks(2).run(_windows, recipe, True)
    every_time = ranks(2).run(_windows, recipe, False)
    for (costs, touched, error, bits, step), (full, touched_in_full, *_) in zip(results, every_time, strict=True):
        assert touched == [False, False, False, True] * WINDOWS
        assert all(touched_in_full)
        assert error < 2e-6
        assert bits == results[0][3]
        assert step == WINDOWS
        # After the first window, in which DDP makes its buckets anew: exactly a quarter, in collectives and in bytes.
        for ours, theirs in zip(costs[1:], full[1:], strict=True):
            assert [MICRO * number for number in ours] == pytest.approx(theirs)


def _flags_of_ddp(rank, world_size):
    model = DDP(seeded(Tower, 16, 2))
    seen = []
    for wrapped in (model, torch.compile(model, backend="eager")):
        for sync in (False, True):
            for outer in (False, True):
                model.require_backward_grad_sync = outer
                with suppress(KeyError), thinwire.accumulate(wrapped, sync=sync):
                    inside = model.require_backward_grad_sync
                    raise KeyError
                seen.append((inside == sync, model.require_backward_grad_sync == outer))
    return seen


def test_the_flag_of_ddp_comes_back_after_an_exception(ranks):
    assert ranks(2).run(_flags_of_ddp) == [[(True, True)] * 8] * 2


def _forward_outside(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    try:
        model = DDP(seeded(Tower, 16, 2))
        with attached(model, "int8") as link:
            for step in range(3):
                value = loss(model, batch(rank, step, width=16))
                with thinwire.accumulate(model, sync=False):
                    value.backward()
            return [line for line in lines if "forward pass" in line], link.state.step
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def test_a_forward_pass_left_outside_is_said_once(ranks):
    (lines, step), (others, _) = ranks(2).run(_forward_outside)
    assert step == 3  # DDP did exchange
    assert len(lines) == 1
    assert others == []


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _sharded(world_size, kind):
    """Return a model sharded over all ranks, or with replicas too; `part`: its layers alone, under a plain root."""
    model = seeded(Tower, 16, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if kind == "replicas" else None
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return model if kind == "part" else fully_shard(model, mesh=mesh)


def _fsdp_windows(rank, world_size, kind):
    results = []
    for saving in (True, False):
        model = _sharded(world_size, kind)
        counts = []
        for window in range(2):
            model.zero_grad()
            for micro in range(MICRO):
                with (
                    thinwire.accumulate(model, sync=micro == MICRO - 1) if saving else nullcontext(),
                    CommDebugMode() as comm,
                ):
                    x = batch(rank, MICRO * window + micro, width=16)
                    loss(model, x.requires_grad_()).backward()  # else the counting mode warns
                counts.append(sum(n for op, n in comm.get_comm_counts().items() if "reduce" in str(op)))
        results.append((counts, [p.grad.full_tensor() for p in model.parameters()]))
    (saved, ours), (full, theirs) = results
    near = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    return saved, full, near


@pytest.mark.parametrize(("kind", "world_size"), [("shards", 2), ("part", 2), ("replicas", 4)])
def test_fsdp2_reduces_once_a_window(ranks, kind, world_size):
    for saved, full, near in ranks(world_size).run(_fsdp_windows, kind):
        assert full[0] > 0
        assert full == [full[0]] * MICRO * 2
        assert saved == [0, 0, 0, full[0]] * 2
        assert near < 1e-5


def _flags_of_fsdp(rank, world_size):
    model = _sharded(world_size, "shards")
    model.layers[0].set_requires_all_reduce(False)
    model.layers[1].set_requires_gradient_sync(False)

    def flags():
        groups = [
            g for m in model.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups
        ]
        return [(g.reduce_grads, g.all_reduce_grads) for g in groups]

    before = flags()
    inside = []
    for sync in (False, True):
        with suppress(KeyError), thinwire.accumulate(model, sync=sync):
            inside += flags()
            raise KeyError
        assert flags() == before
    return before, inside


def test_the_flags_of_fsdp2_come_back_after_an_exception(ranks):
    for before, inside in ranks(2).run(_flags_of_fsdp):
        assert (True, False) in before
        assert (False, False) in before
        assert inside == [(False, False)] * len(before) + [(True, True)] * len(before)


def test_a_model_that_nobody_wrapped_is_refused():
    with pytest.raises(AttachError, match="got Linear: accumulating would save no traffic"):
        thinwire.accumulate(nn.Linear(2, 2), sync=False).__enter__()
