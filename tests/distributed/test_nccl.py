"""Rounds between the memories of GPUs. NCCL itself needs GPUs; all around it runs here, with gloo in its place."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from late_device import LateDevice
from test_device import RECIPES
from test_gpu import SAME_BYTES, given_steps
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Tower, attached, batch, digest, gradients, loss, seeded

import thinwire
from thinwire.comm import process_group
from thinwire.comm.local import run_lock_step
from thinwire.comm.mesh import MeshClosedError, MeshError
from thinwire.comm.nccl import Nccl, start, wait_until
from thinwire.comm.process_group import own_group, own_store
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, SendRecv, Transfer
from thinwire.errors import AttachError
from thinwire.integrations import ddp

# --- rounds ---------------------------------------------------------------------------------------------------------

ROUNDS = [
    AllToAll((5, 0, 9)),
    AllToAll((4, 4, 4)),
    AllGather((3, 3, 3)),
    AllGather((2, 7, 0)),
    AllGather((0, 0, 0)),
    SendRecv(((0, 1, 0, 4), (0, 2, 2, 6), (1, 2, 0, 3), (2, 0, 1, 8), (2, 0, 0, 1)), 3),
    SendRecv(((1, 0, 0, 8),), 3),
    SendRecv((), 3),
    AllReduce(6, torch.float32, 3),
    AllReduce(6, torch.int8, 3, "max"),
]


def _transfer(round_, rank):
    """Return the round with buffers of one rank."""
    generator = torch.Generator().manual_seed(rank)

    def bytes_(n):
        return torch.randint(0, 255, (n,), generator=generator, dtype=torch.uint8)

    match round_:
        case AllToAll(nbytes):
            return Transfer(round_, bytes_(sum(nbytes)), torch.zeros(3 * nbytes[rank], dtype=torch.uint8))
        case AllGather(nbytes):
            return Transfer(round_, bytes_(nbytes[rank]), torch.zeros(sum(nbytes), dtype=torch.uint8))
        case SendRecv():
            return Transfer(round_, bytes_(8), torch.zeros(round_.received_nbytes(rank), dtype=torch.uint8))
        case AllReduce():
            numbers = bytes_(round_.numel).to(torch.int8).to(round_.dtype)
            return Transfer(round_, numbers, numbers)


def _rounds(rank, world_size):
    group = own_group(own_store(list(range(world_size)), rank), rank, world_size, dist.default_pg_timeout)
    found = []
    for round_ in ROUNDS:
        transfer = _transfer(round_, rank)
        for work in start(transfer, group):
            work.wait()
        found.append(transfer.receive)
    return found


def _once(transfer):
    yield transfer


def test_every_round_moves_what_the_lock_step_driver_moves(ranks):
    found = ranks(3).run(_rounds)
    for i, round_ in enumerate(ROUNDS):
        transfers = [_transfer(round_, rank) for rank in range(3)]
        run_lock_step([_once(transfer) for transfer in transfers], [round_])
        assert all(torch.equal(found[rank][i], transfers[rank].receive) for rank in range(3)), round_


def test_waits_end():
    answers = iter([False] * 5 + [True])
    wait_until(lambda: next(answers), lambda: False, 5.0)
    with pytest.raises(MeshClosedError, match="ended here"):
        wait_until(lambda: False, lambda: True, 5.0)
    with pytest.raises(MeshError, match=r"not done within 0\.01 s"):
        wait_until(lambda: False, lambda: False, 0.01)


# --- training, with gloo in NCCL's place ----------------------------------------------------------------------------


class OverGloo(Nccl):
    """Gloo in NCCL's place."""

    def __init__(self, store, ranks, rank, device, timeout):
        self._group, self._interrupted = own_group(store, rank, len(ranks), timeout), False

    def perform(self, transfer):
        for work in start(transfer, self._group):
            work.wait()

    def close(self):
        pass


@contextlib.contextmanager
def blocks_on_the_device():
    device, found = LateDevice(), (process_group.Nccl, process_group.choose, ddp._device)
    process_group.Nccl, process_group.choose = OverGloo, lambda *args, **kwargs: "nccl"
    ddp._device = lambda model: device
    try:
        yield device
    finally:
        process_group.Nccl, process_group.choose, ddp._device = found


def _steps(rank, recipe, manager):
    model, seen = DDP(seeded(Tower), bucket_cap_mb=0.01), []
    with manager as device, attached(model, recipe, nodes=1 if recipe.startswith("hier") else None) as link:
        for step in range(3):
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
            seen += gradients(model)
        stats = link.stats()
    if device is not None:
        device.close()
        assert device.num_copies == 0
    assert stats["pinned_nbytes"] == 0
    return digest(seen), stats["wire_nbytes"]


def _as_over_meshes(rank, world_size, recipes):
    managers = (blocks_on_the_device, contextlib.nullcontext)
    return [len({_steps(rank, recipe, manager()) for manager in managers}) for recipe in recipes]


def test_training_is_as_over_meshes(ranks):
    assert ranks(2).run(_as_over_meshes, RECIPES) == [[1] * len(RECIPES)] * 2


# --- who may ask for it ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def transport(name):
    os.environ["THINWIRE_TRANSPORT"] = name
    try:
        yield
    finally:
        del os.environ["THINWIRE_TRANSPORT"]


def _asked(rank, world_size, names):
    with transport(names[rank]), pytest.raises(AttachError) as raised:
        thinwire.attach(DDP(seeded(Tower, 8, 2)), "int8")
    return str(raised.value)


def test_a_model_on_the_cpu_and_one_rank_alone_are_refused(ranks):
    without = "THINWIRE_TRANSPORT=nccl without a GPU"
    expected = "expected THINWIRE_TRANSPORT=nccl on all ranks or none, and models on GPUs, got rank 0: "
    assert ranks(2).run(_asked, ["nccl", "nccl"]) == [f"{expected}{without}, rank 1: {without}"] * 2
    assert ranks(2).run(_asked, ["gloo", "nccl"]) == [f"{expected}THINWIRE_TRANSPORT=gloo, rank 1: {without}"] * 2


# --- NCCL itself ----------------------------------------------------------------------------------------------------


def _on_gpus(rank, world_size, recipes):
    torch.cuda.set_device(rank)
    found = []
    for recipe in recipes:
        ways = []
        for name in ("nccl", "mesh"):
            with transport(name):
                ways.append(given_steps(rank, recipe, f"cuda:{rank}")[:2])
        found.append(ways[0] == ways[1])
    return found


def _no_gpu_each(rank, world_size):
    with transport("nccl"), pytest.raises(AttachError) as raised:
        thinwire.attach(DDP(Tower(8, 2).to("cuda:0")), "int8")
    return str(raised.value)


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NUM_GPUS = torch.cuda.device_count()
ROUNDED_ON_THE_WIRE = "dense", "sum/", "topkc"  # in the backend's order


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=needs_gpu),
        *(
            pytest.param(n, marks=[*needs_gpu, pytest.mark.skipif(n > NUM_GPUS, reason=f"needs {n} GPUs, one a rank")])
            for n in (2, 4)
        ),
    ],
)
def test_nccl_brings_the_bits_of_the_mesh(ranks, world_size):
    recipes = [recipe for recipe in SAME_BYTES if world_size == 1 or not recipe.startswith(ROUNDED_ON_THE_WIRE)]
    assert ranks(world_size).run(_on_gpus, recipes, timeout=280) == [[True] * len(recipes)] * world_size


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_ranks_on_one_gpu_are_told_so(ranks):
    for message in ranks(2).run(_no_gpu_each, timeout=120):
        assert "expected a GPU of its own for each" in message
