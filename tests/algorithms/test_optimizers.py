"""LANS, LAMB and NAG against their equations in float64, and what holds of every optimizer here."""

import copy
import dataclasses
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from papers import Lamb, Lans, Nag
from torch import Tensor, nn

from thinwire.algorithms.norms import norms
from thinwire.errors import OptimizerError
from thinwire.optim import LAMB, LANS, NAG, WarmUp, no_decay_groups

SHAPES: dict[str, tuple[int, ...]] = {"weight": (20, 13), "kernel": (4, 3, 3, 3), "bias": (13,), "gain": ()}
NUM_STEPS = 200
MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {"LANS": LANS, "LAMB": LAMB, "NAG": NAG}
PAPER: dict[str, Any] = {"LANS": Lans, "LAMB": Lamb, "NAG": Nag}


def weights(dtype: torch.dtype = torch.float32, shapes=SHAPES) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def gradient(x: Tensor, name: str, step: int) -> Tensor:
    """Pull to a point of its own, with noise, and blocks of very different scale; float64."""
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return 10.0 ** (len(name) - 5) * (x.detach().double() - 0.3 + noise)


def train(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for name, x in params.items():
            x.grad = gradient(x, name, step).to(x.dtype)
        optimizer.step()


def bits(tensors) -> list[bytes]:
    return [x.detach().contiguous().view(-1).numpy().tobytes() for x in tensors]


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("LANS", {}),
    ("LANS", {"normalize_grad": False}),
    ("LANS", {"grad_averaging": False, "bias_correction": False}),
    ("LANS", {"decoupled_weight_decay": False, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    ("LANS", {"weight_decay": 0.0, "eps": 1e-3}),
    ("LAMB", {}),
    ("LAMB", {"max_grad_norm": None, "weight_decay": 0.0}),
    ("LAMB", {"adapt_all": True, "weight_decay": 0.0, "grad_averaging": False}),
    ("LAMB", {"decoupled_weight_decay": False, "weight_decay": 0.1, "bias_correction": False, "max_grad_norm": 0.1}),
    ("NAG", {"momentum": 0.9, "weight_decay": 1e-2}),
    ("NAG", {"momentum": 0.0}),
]
IDS = [f"{kind} {' '.join(f'{k}={v}' for k, v in settings.items())}" for kind, settings in SETTINGS]


@pytest.mark.parametrize(
    ("dtype", "tolerance", "foreach"),
    [(torch.float64, 1e-11, False), (torch.float64, 1e-11, True), (torch.float32, 2e-4, False)],
)
@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=IDS)
def test_it_is_the_papers_algorithm_over_200_steps(kind, settings, foreach, dtype, tolerance) -> None:
    params = weights(dtype)
    extra = {} if kind == "NAG" else {"foreach": foreach}
    optimizer = MADE[kind](params.values(), lr=0.01, **settings, **extra)
    paper = PAPER[kind](lr=0.01, **settings)
    expected = {name: x.detach().double().numpy() for name, x in weights(dtype).items()}
    for step in range(NUM_STEPS):
        grads = {name: gradient(x, name, step).to(dtype) for name, x in params.items()}
        for name, x in params.items():
            x.grad = grads[name]
        optimizer.step()
        paper.step(expected, {name: g.double().numpy() for name, g in grads.items()})
    start = weights(dtype)
    for name, x in params.items():
        moved = np.abs(expected[name] - start[name].detach().double().numpy()).max()
        assert moved > 0.01, "the comparison means something"
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(x.detach().double().numpy(), expected[name], rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(("kind", "settings"), [s for s in SETTINGS if s[0] != "NAG"])
def test_all_at_once_and_one_by_one_agree_to_the_bit(kind, settings) -> None:
    ends = []
    for foreach in (False, True):
        params = weights()
        optimizer = MADE[kind](params.values(), lr=0.01, foreach=foreach, **settings)
        train(optimizer, params, range(20))
        ends.append(bits([*params.values(), *(m for s in optimizer.state.values() for m in s.values())]))
    assert ends[0] == ends[1]


def test_nag_is_torchs_sgd_to_the_bit() -> None:
    ours, theirs = weights(), weights()
    train(NAG(ours.values(), lr=0.01, momentum=0.9), ours, range(30))
    train(torch.optim.SGD(theirs.values(), lr=0.01, momentum=0.9, nesterov=True), theirs, range(30))
    assert bits(ours.values()) == bits(theirs.values())


def test_without_a_gradient_term_lans_steps_are_lambs() -> None:
    """With b1 = 1 - b3 -> 1 the Nesterov term vanishes; what is left is LAMB on normalised gradients."""
    ours, theirs = weights(torch.float64), weights(torch.float64)
    beta = 1 - 1e-9
    lans = LANS(ours.values(), lr=0.01, betas=(beta, 0.99), normalize_grad=False)
    lamb = LAMB(theirs.values(), lr=0.01, betas=(beta, 0.99), max_grad_norm=None)
    for step in range(20):
        for params, optimizer in ((ours, lans), (theirs, lamb)):
            for name, x in params.items():
                x.grad = gradient(torch.zeros_like(x), name, step)
            optimizer.step()
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["LANS", "LAMB"])
def test_a_step_is_as_long_as_the_rule_says(kind: str) -> None:
    """||dx|| <= lr ||x||, with equality for LAMB; whatever the scale of the gradient."""
    for scale in (1e-6, 1.0, 1e6):
        params = weights()
        before = {name: x.detach().clone() for name, x in params.items()}
        optimizer = MADE[kind](params.values(), lr=0.1, eps=1e-12)
        for name, x in params.items():
            x.grad = scale * gradient(x, name, 0).float()
        optimizer.step()
        for name, x in params.items():
            length = float((x.detach() - before[name]).norm() / before[name].norm())
            assert length == pytest.approx(0.1, rel=1e-3) if kind == "LAMB" else length <= 0.1 * (1 + 1e-5)


def test_blocks_that_are_zero_or_have_no_gradient() -> None:
    """Ratios fall back on 1, each by itself; what has no gradient keeps still, without state."""
    zero, still, unused = (nn.Parameter(x) for x in (torch.zeros(3), torch.ones(3), torch.ones(3)))
    for kind in (LANS, LAMB):
        optimizer = kind([zero, still, unused], lr=0.5, weight_decay=0.0)
        zero.data.zero_()
        zero.grad, still.grad, unused.grad = torch.tensor([0.1, -0.1, 0.0]), torch.zeros(3), None
        optimizer.step()
        torch.testing.assert_close(zero.detach(), torch.tensor([-0.5, 0.5, 0.0]), rtol=1e-3, atol=0.0)
        assert torch.equal(still.detach(), torch.ones(3))
        assert torch.equal(unused.detach(), torch.ones(3))
        assert unused not in optimizer.state


@pytest.mark.parametrize("kind", ["LANS", "LAMB", "NAG"])
def test_inf_and_nan_propagate(kind: str) -> None:
    for value in (float("inf"), float("nan")):
        x = nn.Parameter(torch.ones(3))
        x.grad = torch.tensor([value, 1.0, 1.0])
        MADE[kind]([x], lr=0.1).step()
        assert not bool(x.isfinite().all())


@pytest.mark.parametrize("kind", ["LANS", "LAMB", "NAG"])
def test_groups_have_settings_of_their_own(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight.requires_grad_(False)
    groups = no_decay_groups(model.named_parameters(), weight_decay=0.1)
    assert [[name for name, _ in group["params"]] for group in groups] == [["0.weight"], ["0.bias", "1.bias"]]
    optimizer = MADE[kind](groups, lr=0.1)
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer.step()
    moved = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert moved == {"0.weight"}, "only what decays moves where gradients are 0"


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LANS", "LAMB", "NAG"])
def test_resume_is_bit_for_bit(kind: str) -> None:
    whole = weights()
    optimizer = MADE[kind](whole.values(), lr=0.01, weight_decay=0.01)
    train(optimizer, whole, range(20))
    first = weights()
    optimizer = MADE[kind](first.values(), lr=0.01, weight_decay=0.01)
    train(optimizer, first, range(9))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weights": {n: x.detach() for n, x in first.items()}}, file)
    file.seek(0)
    saved = torch.load(file)  # torch's safe default
    second = {name: nn.Parameter(x) for name, x in saved["weights"].items()}
    optimizer = MADE[kind](second.values(), lr=123.0)
    optimizer.load_state_dict(saved["optimizer"])
    train(optimizer, second, range(9, 20))
    assert bits(second.values()) == bits(whole.values())


@pytest.mark.parametrize("kind", ["LANS", "LAMB", "NAG"])
def test_learning_rates_follow_a_scheduler_and_may_be_tensors(kind: str) -> None:
    ends = []
    for lr in (0.1, torch.tensor(0.1)):
        params = weights()
        optimizer = MADE[kind](params.values(), lr=lr)
        if not isinstance(lr, Tensor):
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, WarmUp(total=10, warm_up=4))
            state = copy.deepcopy(scheduler.state_dict())
            scheduler.load_state_dict(state)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
            optimizer.param_groups[0]["lr"] = 0.1
        train(optimizer, params, range(3))
        ends.append(torch.cat([x.detach().view(-1) for x in params.values()]))
    torch.testing.assert_close(*ends)


def test_threads_do_not_show() -> None:
    """Ranks may have different numbers of threads. In a process of its own: torch's number is global."""
    code = """
import torch
from thinwire.optim import LAMB, LANS
torch.manual_seed(0)
start, gradient = torch.randn(3, 1_000_003)[:2], torch.randn(2, 1_000_003)
for kind in (LANS, LAMB):
    ends = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        x = torch.nn.Parameter(start.clone())
        x.grad = gradient
        optimizer = kind([x], lr=0.1)
        optimizer.step()
        optimizer.step()
        ends.append(x.detach())
    assert all(torch.equal(one, ends[0]) for one in ends), kind
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (4097,), (3, 5000), (2, 3, 64, 64)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for one in (x, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.t() if x.dim() == 2 else x):
        first, second = norms([one, 2 * one])
        assert first.dtype == dtype
        assert first.shape == ()
        assert float(first) == pytest.approx(float(x.double().norm()), rel=1e-7)
        assert float(second) == pytest.approx(2 * float(first), rel=1e-6)


def test_a_compiled_step_is_the_step() -> None:
    ends = []
    for compiled in (False, True):
        params = weights()
        optimizer = LANS(params.values(), lr=0.01)
        train(optimizer, params, range(1))
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        train(optimizer, params, range(1, 4))
        ends.append(bits(params.values()))
    assert ends[0] == ends[1]


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("LANS", {"lr": -1.0}, "LANS: expected lr of at least 0, got -1.0"),
        ("LAMB", {"betas": (0.9, 1.0)}, r"LAMB: expected betas\[1\] in \[0, 1\), got 1.0"),
        ("LANS", {"betas": (float("nan"), 0.9)}, r"betas\[0\] in \[0, 1\), got nan"),
        ("LANS", {"eps": 0.0}, "eps above 0, got 0.0"),
        ("LAMB", {"max_grad_norm": 0.0}, "max_grad_norm above 0, got 0.0"),
        ("LANS", {"weight_decay": -0.1}, "weight_decay of at least 0, got -0.1"),
        ("NAG", {"momentum": 1.0}, r"NAG: expected momentum in \[0, 1\), got 1.0"),
    ],
)
def test_settings_out_of_range(kind, settings, message) -> None:
    with pytest.raises(OptimizerError, match=message):
        MADE[kind](weights().values(), **settings)
    good = MADE[kind]([weights()["weight"]])
    with pytest.raises(OptimizerError, match=message):
        good.add_param_group({"params": [weights()["bias"]], **settings})
    assert len(good.param_groups) == 1, "a refused group is not kept"


@pytest.mark.parametrize("kind", ["LANS", "LAMB", "NAG"])
def test_parameters_and_gradients_that_it_cannot_use(kind: str) -> None:
    half = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(OptimizerError, match=rf"{kind}: .*got torch.bfloat16 for 'weight'.*autocast"):
        MADE[kind](half.named_parameters())
    layer, embedding = nn.Linear(3, 3), nn.Embedding(9, 3, sparse=True)
    optimizer = MADE[kind]([{"params": layer.parameters()}, {"params": embedding.parameters()}], lr=0.1)
    (layer(embedding(torch.tensor([1, 2]))).sum()).backward()
    before = bits([*layer.parameters(), *embedding.parameters()])
    with pytest.raises(OptimizerError, match=r"dense gradients, got a sparse one for parameter 0, of shape \(9, 3\)"):
        optimizer.step()
    assert bits([*layer.parameters(), *embedding.parameters()]) == before
    assert not optimizer.state


# --- learning rates -------------------------------------------------------------------------------------------------


def test_warm_up_hold_and_decay() -> None:
    """LANS's schedule: eta t/W, eta, eta (T - t)/(T - W - H)."""
    total, warm_up, hold = 100, 10, 25
    schedule = WarmUp(total=total, warm_up=warm_up, hold=hold)
    for t in range(1, total + 5):
        expected = t / warm_up if t <= warm_up else 1.0 if t <= warm_up + hold else max(0.0, (total - t) / 65)
        assert schedule(t - 1) == pytest.approx(expected)
    cosine = WarmUp(total=total, warm_up=warm_up, decay="cosine")
    assert [cosine(t - 1) for t in (5, 10, 55, 100, 200)] == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0])
    assert WarmUp(total=4)(0) == 0.75


@pytest.mark.parametrize(
    "settings", [{"total": 0}, {"total": 5, "warm_up": 5}, {"total": 5, "hold": -1}, {"total": 5, "decay": "step"}]
)
def test_schedules_that_do_not_add_up(settings) -> None:
    with pytest.raises(OptimizerError, match="WarmUp: expected"):
        WarmUp(**settings)
    assert dataclasses.is_dataclass(WarmUp)
