"""PyTorch's PowerSGD, trained by its own hook, imported, and gone on with."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, attached, batch, gradients, loss, seeded

import thinwire
from thinwire import PlanOptions
from thinwire.errors import StateError
from thinwire.feedback import Slot

WHOLE = dataclasses.replace(ALL, compress_1d=False)
RANK, START = 2, 2


class Mixed(nn.Module):
    """Matrices of several shapes, two of them equal, among vectors; run in the reverse of their order."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(24, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.tiny = nn.Linear(48, 3)  # PyTorch sends it as it is: 2 * (3 + 48) numbers are no half of 144
        self.back = nn.Linear(3, 48)
        self.wide = nn.Conv1d(1, 16, 9, padding=4)

    def forward(self, x):
        x = torch.tanh(self.wide(x[:, None])).mean(dim=1)
        x = self.back(self.tiny(x)) + x
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return self.narrow(x[:, :24])


def blocking_hook(state: PowerSGDState, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Wait for each bucket: PyTorch's hook hangs on gloo where two are under way."""
    done = powerSGD_hook(state, bucket)
    done.wait()
    return done


def seen_by_name(state, buckets, model):
    """Find what PyTorch holds of each parameter by another way: as its hook cuts it."""
    shapes = {name: param.shape for name, param in model.module.named_parameters()}
    errors, factors = {}, {}
    for index, names in enumerate(buckets):
        at = at_q = 0
        for name in names:
            errors[name] = state.error_dict[index][at : at + shapes[name].numel()].view(shapes[name])
            at += shapes[name].numel()
        matrices = {name: (shapes[name][0], shapes[name].numel() // shapes[name][0]) for name in names}
        matrices = {k: (n, m) for k, (n, m) in matrices.items() if 2 * min(n, m, RANK) * (n + m) < n * m}
        for shape in dict.fromkeys(matrices.values()):
            for name in [name for name in names if matrices.get(name) == shape]:
                size = shape[1] * RANK
                factors[name] = state.q_memory_dict[index][at_q : at_q + size].view(shape[1], RANK)
                at_q += size
        assert at == state.error_dict[index].numel()
        assert at_q == state.q_memory_dict[index].numel()
    return errors, factors


def _imported(rank, world_size, cap, together):
    old = DDP(seeded(Mixed), bucket_cap_mb=cap)
    state = PowerSGDState(None, RANK, START, batch_tensors_with_same_shape=together)
    old.register_comm_hook(state, powerSGD_hook if cap == 1 else blocking_hook)
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss(old, batch(rank, step)).backward()
        optimizer.step()
    buckets = thinwire.bucket_names(old)
    errors, factors = seen_by_name(state, buckets, old)
    model = DDP(copy.deepcopy(old.module))
    with attached(model, f"powersgd:{RANK}:aggregated", options=WHOLE) as link:
        link.load_state_dict(thinwire.import_power_sgd(state, buckets, link))
        kept = link.state_dict()
        assert kept["step"] == state.iter == 6
        assert set(kept["worker"]) == set(kept["factor"]) == set(factors)  # the two agree on what pays
        for name, factor in factors.items():
            assert torch.equal(kept["worker"][name], errors[name]), name
            assert torch.equal(kept["factor"][name].view(RANK, -1), factor.mT), name
            assert errors[name].any()
            assert factor.any()
        for name in sorted(set(errors) - set(factors)):  # dropped: their mean over ranks is zero
            mean = errors[name].clone()
            torch.distributed.all_reduce(mean)
            assert float(mean.abs().max()) < 1e-5, name
        for step in range(6, 9):  # both go on
            old.zero_grad()
            model.zero_grad()
            loss(old, batch(rank, step)).backward()
            loss(model, batch(rank, step)).backward()
            for theirs, ours in zip(gradients(old), gradients(model), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))
        now, _ = seen_by_name(state, buckets, old)
        for name, error in link.state_dict()["worker"].items():
            torch.testing.assert_close(error, now[name], rtol=1e-3, atol=1e-4 * float(now[name].abs().max()))
    return len(buckets)


@pytest.mark.parametrize(("world_size", "cap", "together"), [(3, 1, False), (2, 1, True), (2, 0.01, False)])
def test_what_pytorch_held_goes_on(ranks, world_size, cap, together):
    """Errors and warm starts to the bit; what both then deliver differs by rounding alone."""
    num_buckets = ranks(world_size).run(_imported, cap, together)
    assert (num_buckets[0] > 1) == (cap < 1)
    assert len(set(num_buckets)) == 1


def _refused(rank, world_size):
    old = DDP(seeded(Mixed), bucket_cap_mb=1)
    state = PowerSGDState(None, RANK, START)
    old.register_comm_hook(state, powerSGD_hook)
    with pytest.raises(StateError, match="DDP has not said which parameters its buckets hold"):
        thinwire.bucket_names(old)
    for step in range(5):
        old.zero_grad()
        loss(old, batch(rank, step)).backward()
    buckets = thinwire.bucket_names(old)
    for recipe, options, message in (
        ("powersgd:1", WHOLE, "PyTorch keeps 24 x 2 numbers .* 'powersgd:1' keeps 24 for one of 48 x 24"),
        ("powersgd:2:alternating", WHOLE, "expected both sides in every step"),
        ("powersgd:2", PlanOptions(), "weight: PyTorch owes an error that 'dense' would never deliver"),
        ("topk:0.1@ef21", WHOLE, "would never deliver"),
    ):
        with attached(DDP(seeded(Mixed)), recipe, options=options) as link:
            with pytest.raises(StateError, match=message):
                thinwire.import_power_sgd(state, buckets, link)
            assert link.state.step == 0
    for recipe in (
        "powersgd:2 until 100 then int4@ef",
        thinwire.Allocate(candidates=["powersgd:2", "powersgd:4"], default="powersgd:2"),
    ):
        one = pytest.raises(StateError, match="expected a link with one recipe for all steps")
        with attached(DDP(seeded(Mixed)), recipe, options=WHOLE) as link, one:
            thinwire.import_power_sgd(state, buckets, link)
    with attached(DDP(seeded(Mixed)), "powersgd:2", options=WHOLE) as link:
        take = functools.partial(thinwire.import_power_sgd, state, link=link)
        with pytest.raises(StateError, match=r"each once, got 'back.weight' in one of them only"):
            take([[name for name in buckets[0] if name != "back.weight"]])
        with pytest.raises(StateError, match="each once, got one of them twice"):
            take([*buckets, ["back.weight"]])
        with pytest.raises(StateError, match=r"bucket 0: expected \d+ numbers of errors"):
            take([buckets[0][:3], buckets[0][3:]])
        state.q_memory_dict[0][-1] = float("nan")  # as PyTorch leaves it where columns depend on each other
        with pytest.raises(StateError, match="bucket 0: expected finite factors"):
            take(buckets)
        state.q_memory_dict[0][-1] = 0.0
    with attached(DDP(seeded(Mixed)), "topk:0.1", options=ALL) as link:  # errors fit whatever has error feedback
        kept = take(buckets, link=link)
        assert kept["loss_scale"] == 1.0
        link.load_state_dict(kept)
        errors, _ = seen_by_name(state, buckets, old)
        assert all(torch.equal(link.state_dict()[Slot.WORKER][name], errors[name]) for name in errors)


def test_what_does_not_fit_is_refused(ranks):
    ranks(2).run(_refused)
