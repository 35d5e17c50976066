"""Training beside a device that is late (see `late_device`): the bits of a run without one, and nothing left behind."""

import contextlib
import os
import signal

import pytest
import torch
from late_device import LateDevice
from serving import servers
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded

import thinwire
from thinwire.aggregators import Message, work_memory
from thinwire.comm.device import Failure
from thinwire.comm.process_group import DEPTH, SERVED_DEPTH
from thinwire.errors import AttachError, PlanError
from thinwire.integrations import ddp
from thinwire.integrations.stateless import StatelessHook
from thinwire.server.client import Servers

RECIPES = [
    *("int8:stochastic", "int4", "topk:0.05", "onebit", "gather/onebit", "sum/randomk:0.25:fp32", "global:8"),
    *("globalexp", "powersgd:2", "topk:0.05@dgc", "int4@ef21", "sign", "dense", "hier/int8"),
]


@contextlib.contextmanager
def beside_a_device(**kwargs):
    """Have links that are made inside exchange values of the CPU as if they lay on a device."""
    device, found = LateDevice(**kwargs), ddp._device
    ddp._device = lambda model: device
    try:
        yield device
    finally:
        ddp._device = found


def _steps(rank, recipe, *, beside, addresses=None, nodes=1, steps=3):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    seen = []
    with beside_a_device() if beside else contextlib.nullcontext() as device:
        depth = DEPTH if addresses is None else SERVED_DEPTH
        nodes = nodes if recipe.startswith("hier") else None
        with attached(model, recipe, nodes=nodes, servers=addresses, workers=depth if beside else None) as link:
            for step in range(steps):
                model.zero_grad()
                loss(model, batch(rank, step)).backward()
                seen += gradients(model)
                with torch.no_grad():
                    for param in model.parameters():
                        param -= 0.05 * param.grad
            state = link.state_dict()
            stats = link.stats()
    if beside:
        device.close()
        assert device.num_copies > 0
        assert 0 < stats["pinned_nbytes"] <= 2 * depth * max(64, link.plan.buffers_nbytes(rank))  # in powers of two
    else:
        assert stats["pinned_nbytes"] == 0
    kept = [t for slot in ("worker", "owner", "momentum", "estimate", "mean") for _, t in sorted(state[slot].items())]
    return digest([*seen, *model.parameters()]), digest(kept), stats["wire_nbytes"]


def _as_without(rank, world_size, recipes):
    return [_steps(rank, r, beside=True) == _steps(rank, r, beside=False) for r in recipes]


def test_training_is_as_without_a_device(ranks):
    assert ranks(2).run(_as_without, RECIPES) == [[True] * len(RECIPES)] * 2


SERVED = ["topk:0.05", "int8:stochastic", "onebit", "topk:0.05@dgc", "dense until 1 then int4", "hier/topk:0.05"]


def _served_as_without(rank, world_size, addresses, recipes):
    where = {"addresses": addresses, "nodes": (2, 1)}
    return [_steps(rank, r, beside=True, **where) == _steps(rank, r, beside=False, **where) for r in recipes]


def test_training_through_servers_is_as_without_a_device(ranks):
    """Servers form means of bytes, and know of no device."""
    with servers(3, 2) as started:
        addresses = [server.address for server in started]
        assert ranks(3).run(_served_as_without, addresses, SERVED) == [[True] * len(SERVED)] * 3
        assert [server.output() for server in started] == ["", ""]


def _conserved(rank, world_size, recipe):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with beside_a_device() as device:
        with attached(model, recipe, workers=6) as link:
            ledger = Ledger(model, link)
            for step in range(4):
                x = batch(rank, step)
                ledger.expect(loss(model.module, x))
                model.zero_grad()
                loss(model, x).backward()
                ledger.got()
            error = ledger.error()
        device.close()
    return error


@pytest.mark.parametrize("recipe", ["int4", "topk:0.05", "powersgd:2"])
def test_nothing_is_lost(ranks, recipe):
    assert max(ranks(2).run(_conserved, recipe)) < 2e-6


class Scale:
    """A GradScaler whose scale is set by hand."""

    def get_scale(self):
        return 256.0


def _skipped(rank, world_size, recipe):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with beside_a_device() as device:
        with attached(model, recipe, scaler=Scale(), workers=6) as link:
            loss(model, batch(rank, 0)).backward()
            before, step = link.state_dict(), link.state.step
            (loss(model, batch(rank, 1)) * (float("inf") if rank == 1 else 1.0)).backward()
            after = link.state_dict()
            same = all(torch.equal(before[s][n], after[s][n]) for s in ("worker", "owner") for n in before[s])
            nans = [not bool(p.grad.isfinite().all()) for p in model.parameters()]
            found = same, all(nans), link.skipped_steps, link.state.step - step
        device.close()
    return found


@pytest.mark.parametrize("recipe", ["int4", "topk:0.05"])
def test_a_skipped_step_leaves_all_as_it_was(ranks, recipe):
    assert ranks(2).run(_skipped, recipe) == [(True, True, 1, 0)] * 2


class Unpicklable(RuntimeError):
    def __init__(self, text):
        super().__init__(text)
        self.lock = lambda: None


def _raising(rank, world_size):
    """An error in the middle of an exchange: backward raises on both ranks, and the device is left with nothing."""
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with beside_a_device() as device:
        link = thinwire.attach(model, "int4", options=ALL, workers=6)
        loss(model, batch(rank, 0)).backward()
        fetch = link._staging.fetch

        def failing(data):
            if rank == 1:
                raise Unpicklable("the device broke")
            return fetch(data)

        link._staging.fetch = failing
        with pytest.raises(RuntimeError):
            loss(model, batch(rank, 1)).backward()
        message = str(link.error)
        link.close()
        device.mark().synchronize()
        copies = device.num_copies
        device.close()
        assert device.num_copies == copies
    return message


def test_an_error_ends_backward_everywhere(ranks):
    first, second = ranks(2).run(_raising)
    assert "rank 1" in first or "every rank answers" in first
    assert "the device broke" in second


def _without_its_server(rank, world_size, address, pid):
    """What a server takes along with it is undone on the exchanges' stream, behind what the step has queued there."""
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    where = Servers(addresses=(address,), heartbeat_s=0.2, heartbeat_timeout_s=2.0)
    with beside_a_device() as device, pytest.MonkeyPatch.context() as patch:
        restore = Message.restore

        def checked(message):
            device.check(device.inside, "residuals were put back off the exchanges' stream")
            restore(message)

        patch.setattr(Message, "restore", checked)
        link = thinwire.attach(model, "topk:0.05", servers=where, options=ALL, workers=SERVED_DEPTH)
        for step in range(3):
            loss(model, batch(rank, step)).backward()
        before = link.state_dict()
        torch.distributed.barrier()  # both have their state
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError):
            loss(model, batch(rank, 3)).backward()
        after = link.state_dict()
        device.mark().synchronize()
        device.close()
    assert after["step"] == before["step"] == 3
    return [digest(t for _, t in sorted(state["worker"].items())) for state in (before, after)], str(link.error)


def test_a_lost_server_leaves_what_was_kept(ranks):
    with servers(2, 1) as (server,):
        results = ranks(2).run(_without_its_server, server.address, server.process.pid)
        server.process.wait(5)
    for (before, after), error in results:
        assert before == after
        assert "server 0" in error


def test_futures_of_a_device_can_hold_any_error():
    extracted = torch._jit_internal._extract_tensors(Failure(Unpicklable("x")))  # what they do with their value
    assert extracted == []


# --- hooks without state ----------------------------------------------------------------------------------------------


def _stateless(rank, world_size, names):
    found = []
    for name in names:
        bits = []
        for device in (None, LateDevice()):
            hook = StatelessHook(name)
            memory = device, *work_memory(device)
            hook._memory = lambda where, on_device, memory=memory: memory
            model = DDP(seeded(Tower), bucket_cap_mb=0.01)
            model.register_comm_hook(None, hook.run)
            seen = []
            for step in range(3):
                model.zero_grad()
                loss(model, batch(rank, step)).backward()
                seen += gradients(model)
            bits.append(digest(seen))
        device.close()
        found.append(bits[0] == bits[1])
    return found


def test_hooks_without_state(ranks):
    names = ["fp16", "globalexp", "dense"]
    assert ranks(2).run(_stateless, names) == [[True] * len(names)] * 2


# --- what cannot be served --------------------------------------------------------------------------------------------


def _elsewhere(rank, world_size):
    model = DDP(seeded(Tower, 8, 2))
    model.module.layers[1].weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    with pytest.raises(AttachError) as first:
        thinwire.attach(model, "int8")
    model.module.to("meta")
    with pytest.raises(AttachError) as second:
        thinwire.attach(model, "int8")
    return str(first.value), str(second.value)


def _over_nccl(rank, world_size, addresses):
    with pytest.MonkeyPatch.context() as patch, beside_a_device():
        patch.setenv("THINWIRE_TRANSPORT", "nccl" if rank == 1 else "mesh")
        with pytest.raises((AttachError, PlanError)) as error:
            thinwire.attach(DDP(seeded(Tower)), "int8", servers=addresses)
    return str(error.value)


def test_nccl_and_servers_do_not_go_together(ranks):
    for message in ranks(2).run(_over_nccl, ["tcp://127.0.0.1:9"]):
        assert "THINWIRE_TRANSPORT=nccl: what goes to servers leaves from memory of the host" in message


def test_other_devices_and_several_are_refused(ranks):
    for several, other in ranks(2).run(_elsewhere):
        assert several.startswith(
            "expected all parameters on one device, got layers.0.weight on cpu and layers.1.weight"
        )
        assert other == "expected parameters on the CPU or a CUDA device, got layers.0.weight on meta"
