"""CLAN's settings, its two algorithms, and training with them against dense LANS, all ranks in one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire import (
    CLAN_OPTIONS,
    CLAN_SETTINGS,
    ErrorFeedback,
    Identity,
    NodePushPull,
    OneBit,
    Plan,
    PlanOptions,
    PushPull,
    TwoShot,
)
from thinwire.aggregators import Aggregator
from thinwire.algorithms import clan_recipe
from thinwire.bench.lock_step import LockStep
from thinwire.bench.workloads.digits import HELD_OUT, DigitsWorkload
from thinwire.compressors import Unbiased
from thinwire.errors import RecipeError
from thinwire.optim import LANS, WarmUp
from thinwire.plan import build_plan
from thinwire.recipes import parse_recipe
from thinwire.spec import BlockSpec

UNCUT = PlanOptions(min_nbytes=0)


def planned(aggregator: Aggregator, shapes: dict[str, tuple[int, ...]], world_size: int, options=UNCUT) -> Plan:
    named = [(name, torch.empty(shape)) for name, shape in shapes.items()]
    return build_plan(named, aggregator, world_size, options)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("onebit", 32),
        ("topk", 1000),  # 4 bytes in place of 4000: 16-bit indices and values
        ("randomk", 64),  # no indices, float16 values
        ("linear5", 32 / 5),
        ("linear7", 32 / 7),
        ("natural", 32 / 3),
        ("fp16", 2),
    ],
)
@pytest.mark.parametrize("world_size", [2, 8])
def test_bytes_of_the_papers_settings(name: str, ratio: float, world_size: int) -> None:
    """As a multiple of what float32 sends; the same for any number of workers."""
    plan = planned(clan_recipe(name), {"a.weight": (2048, 2048)}, world_size, CLAN_OPTIONS)
    assert plan.compression_ratio == pytest.approx(ratio, rel=0.01)


def test_every_setting_has_the_papers_memory() -> None:
    """Algorithm 4 for contractive kinds, algorithm 3 for unbiased ones; 16 bits go without."""
    with_memory = {name for name in CLAN_SETTINGS if clan_recipe(name).feedback == ErrorFeedback()}
    without = {name for name in CLAN_SETTINGS if clan_recipe(name).feedback is None}
    assert with_memory == {"onebit", "topk", "randomk"}
    assert without == set(CLAN_SETTINGS) - with_memory


def test_the_papers_threshold_counts_bytes_alone() -> None:
    shapes = {"small.weight": (500, 511), "large.weight": (500, 512), "large.bias": (256_000,)}
    plan = planned(clan_recipe("onebit"), shapes, 2, CLAN_OPTIONS)
    assert {param.info.name for param in plan.params if param.reason} == {"small.weight"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("gather/onebit", "through owners or servers, as onebit, topk, .*got 'gather/onebit'"),
        ("powersgd:2", "through owners or servers, .*got 'powersgd:2'"),
        ("dense", "through owners or servers, .*got 'dense'"),
        ("topk:0.1@ef21", "plain error feedback, or none, got 'topk:0.1@ef21'"),
        ("onebit@ef:lr", "plain error feedback, or none"),
        ("linear5@nag", "linear5"),
    ],
)
def test_what_is_not_clan_is_refused(recipe: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        clan_recipe(recipe)


@pytest.mark.parametrize("kind", [PushPull, NodePushPull])
def test_settings_through_servers_are_clan_too(kind: type[PushPull | NodePushPull]) -> None:
    """They are the paper's own exchange; what else is asked of settings is asked of them."""
    one_bit = kind(up=OneBit(), down=OneBit(), feedback=ErrorFeedback())
    assert clan_recipe(one_bit) is one_bit
    with pytest.raises(RecipeError, match="plain error feedback, or none, got"):
        clan_recipe(kind(up=OneBit(), down=OneBit(), feedback=ErrorFeedback(decay=0.5)))


# --- algorithm 3 ----------------------------------------------------------------------------------------------------


def noise(aggregator: Aggregator, grads: list[Tensor], steps: int) -> tuple[Tensor, float]:
    """Return the mean of what is delivered for the same gradients, and the mean of ||p - g||^2."""
    world = LockStep(planned(aggregator, {"w": (1, grads[0].numel())}, len(grads)), {"w": (1, grads[0].numel())})
    true, total, squares = torch.stack(grads).mean(0), torch.zeros_like(grads[0]), 0.0
    for _ in range(steps):
        p = world.run([{"w": g} for g in grads])["w"]
        total += p
        squares += float((p - true).square().sum())
    return total / steps, squares / steps


@pytest.mark.parametrize("name", ["linear5", "natural"])
def test_algorithm_3_delivers_the_mean_gradient_in_the_mean(name: str) -> None:
    """Its variance is below omega (1 + omega) / n^2 sum ||g_i||^2 + omega ||g||^2: the second hop counts in full."""
    numel, n, steps = 300, 3, 2000
    grads = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
    true = torch.stack(grads).mean(0)
    aggregator = clan_recipe(name)
    mean, variance = noise(aggregator, grads, steps)
    assert float((mean - true).square().sum()) == pytest.approx(variance / steps, rel=0.5)
    contract = aggregator.up.contract(BlockSpec(shape=(numel,)))
    assert isinstance(contract, Unbiased)
    squares = sum(float(g.square().sum()) for g in grads)
    bound = contract.omega * (1 + contract.omega) / n**2 * squares + contract.omega * float(true.square().sum())
    assert variance < bound


def test_workers_average_out_their_noise_and_a_server_does_not() -> None:
    g = torch.randn(400, generator=torch.Generator().manual_seed(0))
    up = [noise(parse_recipe("linear:3+identity"), [g] * n, 300)[1] for n in (1, 9)]
    down = [noise(parse_recipe("identity+linear:3"), [g] * n, 300)[1] for n in (1, 9)]
    assert up[1] == pytest.approx(up[0] / 9, rel=0.1)
    assert down[1] == pytest.approx(down[0], rel=0.1)


# --- training -------------------------------------------------------------------------------------------------------

WORKERS, STEPS, LR = 4, 200, 0.01


def train(aggregator: Aggregator) -> tuple[float, float, nn.Module, LANS]:
    """Train a small network on the digits; return its loss on all training images and its held-out accuracy."""
    data = DigitsWorkload(0, 1)
    x, y = data.images.flatten(1), data.labels
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    params = dict(model.named_parameters())
    optimizer = LANS(params.values(), lr=LR, normalize_grad=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, WarmUp(total=STEPS, warm_up=STEPS // 10))
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    world = LockStep(planned(aggregator, shapes, WORKERS, PlanOptions(min_nbytes=0, compress_1d=True)), shapes)
    draws = [torch.Generator().manual_seed(rank) for rank in range(WORKERS)]
    for _ in range(STEPS):
        grads = []
        for draw in draws:
            batch = torch.randint(HELD_OUT, len(y), (32,), generator=draw)
            found = torch.autograd.grad(F.cross_entropy(model(x[batch]), y[batch]), list(params.values()))
            grads.append(dict(zip(params, found, strict=True)))
        for name, p in world.run(grads).items():
            params[name].grad = p.view_as(params[name]).clone()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(x[HELD_OUT:]), y[HELD_OUT:]))
        accuracy = float((model(x[:HELD_OUT]).argmax(1) == y[:HELD_OUT]).float().mean())
    return loss, accuracy, model, optimizer


START = 2.30  # ln 10: the loss of not knowing


@pytest.fixture(scope="module")
def lans() -> tuple[float, float]:
    """What dense LANS reaches."""
    loss, accuracy, *_ = train(TwoShot(up=Identity(), down=Identity()))
    assert loss < 0.4 * START
    return loss, accuracy


@pytest.mark.parametrize("name", ["fp16", "linear5", "linear7", "natural", "onebit"])
def test_clan_keeps_up_with_dense_lans(name: str, lans: tuple[float, float]) -> None:
    loss, accuracy, *_ = train(clan_recipe(name))
    assert loss < lans[0] + 0.1 * (START - lans[0])
    assert accuracy > lans[1] - 0.03


@pytest.mark.parametrize("name", ["onebit", "topk"])
def test_memory_helps(name: str) -> None:
    """The control: the same run with a memory that fades at once."""
    recipe = clan_recipe(name)
    forgetting = TwoShot(up=recipe.up, down=recipe.down, feedback=ErrorFeedback(decay=1e-9))
    loss, *_ = train(recipe)
    loss_without, *_ = train(forgetting)
    assert loss < loss_without - 0.05


@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_a_thousandth_and_a_thirty_second_of_the_values_are_enough_to_learn(name: str) -> None:
    loss, accuracy, *_ = train(clan_recipe(name))
    assert loss < 0.75 * START
    assert accuracy > 0.6


def test_second_moments_are_those_of_what_is_delivered() -> None:
    """Of one-bit messages all values of a partition have one magnitude, so v is flat: eps and lr matter the more."""
    _, _, model, optimizer = train(clan_recipe("onebit"))
    v = optimizer.state[model[0].weight]["exp_avg_sq"]
    assert v.numel() == 64 * 128
    assert float(v.min()) == pytest.approx(float(v.max()), rel=1e-5)
    dense = train(TwoShot(up=Identity(), down=Identity()))
    spread = dense[3].state[dense[2][0].weight]["exp_avg_sq"]
    assert float(spread.max()) > 10 * float(spread.mean())
