"""What the link and the hooks say of themselves: counters, loggers, warnings, and the ecosystem's hook style."""

import csv
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Tower, attached, batch, digest, gradients, loss, seeded, train

import thinwire
from thinwire import CSV, LogLine, PlanOptions, TensorBoard, hooks

# --- counters -------------------------------------------------------------------------------------------------------


def _documented_keys():
    page = (Path(__file__).parents[2] / "docs/tracing.md").read_text()
    table = page.partition("## Counters")[2]
    return {
        key for row in table.splitlines() if row.startswith("| `") for key in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def _counted(rank, world_size, recipe):
    model = DDP(seeded(Tower))  # less than one bucket
    with attached(model, recipe, options=PlanOptions(min_nbytes=4000, message_nbytes=8000)) as link:
        train(model, rank, range(2))
        link.stats(reset=True)  # DDP has rebuilt its bucket
        train(model, rank, range(3))
        stats = link.stats(reset=True)
        again = link.stats()
        layouts = list(link._buckets.kept.values())[-1].plan.layouts
        rounds = [r for layout in layouts for r in layout.rounds]
        planned = sum(r.sent_nbytes(rank) for r in rounds)
        assert link.plan.sent_nbytes(rank) == pytest.approx(planned, abs=16 * len(rounds))  # headers
        return stats, again["steps"], planned, len(rounds), len(layouts), link.plan.raw_nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["int8", "topk:0.05", "gather/onebit", "dense", "dense:bf16"])
def test_what_is_counted_is_what_is_planned(ranks, world_size, recipe):
    for stats, steps_left, planned, rounds, messages, raw in ranks(world_size).run(_counted, recipe):
        assert stats["steps"] == 3
        assert steps_left == 0
        assert stats["raw_nbytes"] == raw
        assert stats["num_collectives"] == rounds <= 2 * messages
        assert stats["wire_nbytes"] == pytest.approx(planned)
        assert stats["exposed_s"] >= 0
        assert set(stats) == _documented_keys()
        if recipe in ("int8", "topk:0.05", "gather/onebit"):
            assert set(stats["dense"].values()) == {"one-dimensional"}
            assert stats["encode_s"] > 0
            assert stats["decode_s"] > 0
            assert stats["work_nbytes"] > 0
        else:
            assert set(stats["dense"].values()) == {"asked for"}
        assert (stats["residual_nbytes"] > 0) == (recipe in ("topk:0.05", "gather/onebit"))
        assert (stats["residual_ratio"] > 0) == (recipe in ("topk:0.05", "gather/onebit"))


def _memory(rank, world_size, recipe, dtype, bucket_cap_mb):
    model = DDP(seeded(Tower, 64, 10).to(dtype), bucket_cap_mb=bucket_cap_mb)
    options = PlanOptions(min_nbytes=0, partition_numel=1024, message_nbytes=16384, node_sizes=2)
    with attached(model, recipe, options=options) as link:
        for step in range(4):
            loss(model, batch(rank, step, width=64).to(dtype)).backward()
        stats, plan = link.stats(), link.plan
        assert f"residuals take {max(_residuals(plan)):,} bytes a rank" in str(plan)
        kept = {slot: sum(t.nbytes for t in tensors.values()) for slot, tensors in link.state.whole.items()}
        owned = {slot: sum(t.nbytes for t in tensors.values()) for slot, tensors in link.state.owned.items()}
        assert sum(kept.values()) == plan.worker_nbytes
        assert sum(owned.values()) == plan.owner_nbytes(rank)
        return stats["residual_nbytes"], plan.residual_nbytes(rank), stats["work_nbytes"], plan.work_nbytes(rank)


def _residuals(plan):
    return [plan.residual_nbytes(rank) for rank in range(plan.world_size)]


@pytest.mark.parametrize("recipe", ["onebit", "hier/int4", "powersgd:2"])
def test_memory_is_what_the_plan_states(ranks, recipe):
    """Residuals to the byte; work memory about at most: how many messages are under way depends on their timing."""
    for dtype, bucket_cap_mb in ((torch.float32, 25), (torch.float32, 0.05), (torch.bfloat16, 25)):
        if dtype == torch.float32 or recipe == "onebit":
            for kept, claimed, work, most in ranks(4).run(_memory, recipe, dtype, bucket_cap_mb):
                assert kept == claimed
                assert most / 12 <= work <= 1.05 * most, (dtype, bucket_cap_mb)


# --- loggers --------------------------------------------------------------------------------------------------------


class FakeWriter:
    """Takes scalars as a SummaryWriter does."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def _logged(rank, world_size, path):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    log = logging.getLogger("thinwire")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    writer = FakeWriter()
    try:
        model = DDP(seeded(Tower))
        with attached(model, "topk:0.05", loggers=[CSV(path), LogLine(every=2), TensorBoard(writer)]) as link:
            train(model, rank, range(5))
            wire = link.stats()["wire_nbytes"]
        return [text for _, text in lines if text.startswith("step")], writer.scalars, wire
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def test_loggers_get_every_step_on_rank_0(ranks, tmp_path):
    path = tmp_path / "steps.csv"
    (lines, scalars, wire), (other_lines, other_scalars, _) = ranks(2).run(_logged, str(path))
    assert other_lines == other_scalars == []
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 2", "step 4"]
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert all(float(row["wire_nbytes"]) == wire for row in rows)
    assert sorted({step for _, _, step in scalars}) == [0, 1, 2, 3, 4]
    assert {name.split("/")[0] for name, _, _ in scalars} == {"thinwire"}


def _warnings_of(rank, world_size, make, cap):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    try:
        model = DDP(nn.Linear(*make), bucket_cap_mb=cap)
        with attached(model, "int8"):
            pass
        return lines
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def test_advice_on_buckets_and_on_a_world_of_one(ranks):
    few, none = ranks(2).run(_warnings_of, (2048, 2048), 25)
    assert "bucket_cap_mb" in few[0]
    assert none == []
    assert ranks(2).run(_warnings_of, (2048, 2048), 1) == [[], []]
    assert "no communication" in ranks(1).run(_warnings_of, (4, 4), 25)[0][0]


# --- hooks in the ecosystem's style ---------------------------------------------------------------------------------


def _hook_style(rank, world_size, recipe):
    by_attach, by_hook = DDP(seeded(Tower), bucket_cap_mb=0.01), DDP(seeded(Tower), bucket_cap_mb=0.01)
    state = hooks.State(by_hook, recipe, options=ALL)
    by_hook.register_comm_hook(state, hooks.compressed_hook)
    with attached(by_attach, recipe):
        bits = [train(model, rank, range(4)) for model in (by_attach, by_hook)]
    state.link.close()
    return bits, state.link.state.step


@pytest.mark.parametrize("recipe", ["int8", "topk:0.05", "gather/onebit"])
def test_state_and_compressed_hook_are_attach(ranks, recipe):
    for bits, step in ranks(2).run(_hook_style, recipe):
        assert bits[0] == bits[1]
        assert step == 4


def _stateless(rank, world_size, name, dtype):
    hook = getattr(hooks, name)
    seen = []
    for _ in range(2):  # two models, one after the other, share the hook
        model = DDP(seeded(Tower, 300, 2, dtype=dtype), bucket_cap_mb=0.1)
        model.register_comm_hook(None, hook)
        plain = DDP(seeded(Tower, 300, 2, dtype=dtype))
        x = batch(rank, 0, width=300).to(dtype)
        for each in (model, plain):
            for _ in range(2):
                each.zero_grad()
                loss(each, x).backward()
        worst = max(
            float((p.grad - q.grad).abs().max() / q.grad.abs().max())
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
        seen.append((digest(gradients(model)), worst))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "bound"), [("int8_hook", 0.02), ("fp16_hook", 0.003), ("bf16_hook", 0.02)])
def test_hooks_without_state(ranks, name, bound, dtype):
    results = ranks(2).run(_stateless, name, dtype)
    assert results[0] == results[1]
    for bits, worst in results[0]:
        assert bits == results[0][0][0]
        assert worst < (bound if dtype == torch.float32 else 0.03)


def _stateless_nan(rank, world_size):
    model = DDP(seeded(Tower, 300, 2))
    model.register_comm_hook(None, hooks.int8_hook)
    value = float("nan") if rank == 1 else 0.0
    (loss(model, batch(rank, 0, width=300)) + value * model.module.layers[0].weight[0, 0]).backward()
    return any(bool(g.isnan().any()) for g in gradients(model))


def test_a_hook_without_state_delivers_nan_to_all(ranks):
    assert ranks(2).run(_stateless_nan) == [True, True]


def _attach_after_hook(rank, world_size):
    model = DDP(seeded(Tower, 16, 2))
    model.register_comm_hook(None, hooks.bf16_hook)
    with pytest.raises(thinwire.ThinwireError, match="only one"):
        thinwire.attach(model, "int8")


def test_attach_after_another_hook_is_refused(ranks):
    ranks(2).run(_attach_after_hook)


# --- what must not stop or spoil a run ------------------------------------------------------------------------------


class _FullDisk:
    def write(self, step, values):
        raise OSError("no space left on device")


def _with_a_logger_that_raises(rank, world_size):
    logging.getLogger("thinwire").setLevel(logging.CRITICAL)
    model = DDP(seeded(Tower))
    with attached(model, "int8", loggers=[_FullDisk()]) as link:
        train(model, rank, range(3))
        logging.getLogger("thinwire").setLevel(logging.NOTSET)
        return link.stats()["steps"]


def test_a_logger_that_raises_is_dropped(ranks):
    assert ranks(2).run(_with_a_logger_that_raises) == [3, 3]


def _ratio(rank, world_size, dtype):
    """Several small buckets of another dtype: each buffer is given back and taken again before the step ends."""
    model = DDP(seeded(Tower).to(dtype), bucket_cap_mb=0.01)
    with attached(model, "onebit") as link:
        loss(model, batch(rank, 0).to(dtype)).backward()
        squared = sum(float(p.grad.float().norm()) ** 2 for p in model.parameters())
        return link.stats()["residual_ratio"], (link.state.squared_norm() / squared) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_ratio_is_of_this_step(ranks, dtype):
    for ratio, expected in ranks(2).run(_ratio, dtype):
        assert ratio == pytest.approx(expected, rel=0.02)
