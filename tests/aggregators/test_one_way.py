"""Half of an exchange through owners, as sharded training needs it, keeps the same promises as a whole one.

`ReduceScatter` leaves sums with their owners, `ShardAllGather` brings what owners hold to all. A new kind is one line.
"""

import functools
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from world import SHAPES, Values, World, bits, gradients

from thinwire import (
    BlockQuant,
    Cast,
    Compressor,
    ErrorFeedback,
    GlobalLinear,
    Identity,
    LinearDithering,
    MinMax,
    NaturalDithering,
    OneBit,
    RandomK,
    TernGrad,
    TopK,
)
from thinwire.aggregators import Aggregator, Message, Partition, ReduceScatter, ShardAllGather, typical_contract
from thinwire.aggregators.header import header_nbytes
from thinwire.comm.local import run_lock_step
from thinwire.comm.rounds import AllGather, AllToAll
from thinwire.compressors import Unbiased
from thinwire.errors import RecipeError
from thinwire.recipes import default_feedback

DITHER = BlockQuant(bits=4, block=64, rounding="stochastic")
SHARED: list[Compressor] = [
    Identity(),
    Cast(dtype=torch.float16),
    Cast(dtype=torch.bfloat16),
    BlockQuant(bits=8),
    BlockQuant(bits=8, block=64, rounding="stochastic"),
    BlockQuant(bits=5, block=32),
    DITHER,
    LinearDithering(bits=8),
    NaturalDithering(bits=8),
]
REDUCE: list[Aggregator] = [
    *(ReduceScatter(up=c, feedback=default_feedback(c)) for c in SHARED),
    ReduceScatter(up=BlockQuant(bits=8), feedback=ErrorFeedback()),
    *(
        ReduceScatter(up=c, feedback=default_feedback(c))
        for c in (
            BlockQuant(bits=4),
            BlockQuant(bits=2),
            MinMax(bits=8),
            OneBit(),
            OneBit(scale="rms"),
            TopK(density=0.1),
            TopK(density=0.05, value_dtype=torch.float32),
            RandomK(density=0.25, block=4),
            TernGrad(shared=True),
            GlobalLinear(bits=8),
        )
    ),
    ReduceScatter(up=OneBit(), feedback=ErrorFeedback(decay=0.5)),
]
GATHER: list[Aggregator] = [
    *(ShardAllGather(down=c) for c in SHARED),
    ShardAllGather(down=MinMax(bits=8)),
    ShardAllGather(down=BlockQuant(bits=4)),
    ShardAllGather(down=BlockQuant(bits=4, block=32)),
]
TABLE = [*REDUCE, *GATHER]
NUM_STEPS = 4


def ident(value: object) -> str:
    return f"{type(value).__name__}-{value.recipe()}" if isinstance(value, Aggregator) else str(value)


every = pytest.mark.parametrize("aggregator", TABLE, ids=ident)
reduces = pytest.mark.parametrize("aggregator", REDUCE, ids=ident)
gathers = pytest.mark.parametrize("aggregator", GATHER, ids=ident)
with_feedback = pytest.mark.parametrize("aggregator", [a for a in REDUCE if a.feedback is not None], ids=ident)
world_sizes = pytest.mark.parametrize("world_size", range(1, 9))


def partitions(world: World) -> list[Partition]:
    return [p for param in world.plan.params for p in param.partitions]


def kept(world: World, values: Sequence[Values]) -> Values:
    """Put together what the owners hold."""
    whole = {name: torch.empty_like(value) for name, value in values[0].items()}
    for p in partitions(world):
        part = slice(p.offset, p.offset + p.numel)
        whole[p.name][part] = values[p.owner][p.name][part]
    return whole


def only_owned(world: World, values: Sequence[Values]) -> list[Values]:
    """Return the values with nan wherever another rank owns."""
    masked = [{name: torch.full_like(value, float("nan")) for name, value in own.items()} for own in values]
    for p in partitions(world):
        part = slice(p.offset, p.offset + p.numel)
        masked[p.owner][p.name][part] = values[p.owner][p.name][part]
    return masked


def step(world: World, grads: Sequence[Values] | None = None) -> list[Values]:
    """Do a step with gradients, or with weights that only their owners have."""
    grads = grads or [gradients(rank, world.step, world.shapes) for rank in range(world.world_size)]
    return world.run(only_owned(world, grads) if isinstance(world.aggregator, ShardAllGather) else grads)


def results(world: World, values: Sequence[Values]) -> Values:
    """Return what counts: all values where everyone gets them, else what owners keep."""
    if isinstance(world.aggregator, ShardAllGather):
        assert all(bits(own) == bits(values[0]) for own in values)
        return values[0]
    return kept(world, values)


@functools.cache
def history(aggregator: Aggregator, world_size: int) -> tuple[World, list[Values], list[list[int]]]:
    """Run some steps once for several tests; return the world, what was delivered, and the bytes that were sent."""
    world = World(aggregator, world_size, message_nbytes=1500)
    delivered, sent = [], []
    for _ in range(NUM_STEPS):
        delivered.append(results(world, step(world)))
        sent.append(world.sent_nbytes)
    return world, delivered, sent


def sum_of(rank_values: Sequence[Values], name: str) -> Tensor:
    """Return the sum in rank order, in float32."""
    total = rank_values[0][name].clone()
    for own in rank_values[1:]:
        total += own[name]
    return total


# --- what arrives ---------------------------------------------------------------------------------------------------


@every
@world_sizes
def test_all_is_finite_and_bytes_are_those_of_the_plan(aggregator: Aggregator, world_size: int) -> None:
    """The lock-step driver has checked the rounds themselves, `results` that all ranks have the same bits."""
    world, delivered, sent = history(aggregator, world_size)
    assert all(bool(value.isfinite().all()) for values in delivered for value in values.values())
    assert all(any(bool(value.any()) for value in values.values()) for values in delivered)
    planned = [
        sum(r.sent_nbytes(rank) for layout in world.plan.messages(list(SHAPES)) for r in layout.rounds)
        for rank in range(world_size)
    ]
    assert sent == [planned] * NUM_STEPS
    assert (max(planned) > 0) == (world_size > 1)


@reduces
@world_sizes
def test_nothing_is_lost(aggregator: Aggregator, world_size: int) -> None:
    """Sums delivered, plus what ranks still owe, are the sums that were due; without feedback, about so."""
    if aggregator.feedback == ErrorFeedback(decay=0.5):
        return  # forgets by intent
    world, delivered, _ = history(aggregator, world_size)
    owed = world.owed()
    due, gap = 0.0, 0.0
    for name in SHAPES:
        total = sum(gradients(rank, i)[name].double() for rank in range(world_size) for i in range(NUM_STEPS))
        got = sum(values[name].double() for values in delivered)
        assert isinstance(total, Tensor)
        due += float(total.square().sum())
        gap += float((got + world_size * owed[name] - total).square().sum())
    lossless = aggregator.feedback is not None or aggregator.up == Identity()
    coarse = aggregator.up.statistic_reduction is not None  # few levels of one scale for all
    # Of the others natural dithering errs most: its omega is 1/8.
    assert (gap / due) ** 0.5 < (5e-6 if lossless else 4.0 if coarse else 8**-0.5)
    assert any(bool(value.any()) for value in owed.values()) == bool(aggregator.feedback)
    assert not any(state.owner for state in world.states), "nothing is sent back, so that owners owe nothing"


@world_sizes
def test_identity_sums_in_rank_order_and_does_not_divide(world_size: int) -> None:
    _, delivered, _ = history(ReduceScatter(up=Identity()), world_size)
    for i, values in enumerate(delivered):
        own = [gradients(rank, i) for rank in range(world_size)]
        assert all(torch.equal(values[name], sum_of(own, name)) for name in SHAPES)


@gathers
@world_sizes
def test_all_hold_what_the_owners_bytes_decode_to(aggregator: Aggregator, world_size: int) -> None:
    """By a compressor alone, for kinds that draw nothing; and nothing is carried over from one step to the next."""
    world, delivered, _ = history(aggregator, world_size)
    assert not any(world.residuals())
    if aggregator.down.stochastic:
        return
    for i, values in enumerate(delivered):
        held = kept(world, [gradients(rank, i) for rank in range(world_size)])
        for p in partitions(world):
            part = slice(p.offset, p.offset + p.numel)
            expected = aggregator.down.decode(aggregator.down.encode(held[p.name][part]), p.spec)
            assert torch.equal(values[p.name][part], expected)


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", [a for a in TABLE if isinstance(typical_contract(a.up), Unbiased)], ids=ident)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_unbiased_kinds_deliver_the_sum_on_average(aggregator: Aggregator, world_size: int) -> None:
    """The same values again and again: their share in what is delivered is 1, to 5 standard errors."""
    world = World(aggregator, world_size)
    own = [gradients(rank, 0) for rank in range(world_size)]
    exact = kept(world, own) if isinstance(aggregator, ShardAllGather) else {name: sum_of(own, name) for name in SHAPES}
    square = sum(float(value.square().sum()) for value in exact.values())
    shares: list[float] = []
    for _ in range(150):
        delivered = results(world, step(world, own))
        shares.append(sum(float(delivered[name] @ exact[name]) for name in SHAPES) / square)
    found = np.array(shares)
    assert abs(found.mean() - 1) < 5 * found.std(ddof=1) / len(found) ** 0.5 + 1e-6


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_parameters(aggregator: Aggregator, dtype: torch.dtype) -> None:
    """What comes is float32 of 16 bits; sums are float32, and bytes those of the plan."""
    world = World(aggregator, 3, dtype=dtype)
    own = [{name: g.to(dtype).float() for name, g in gradients(rank, 0).items()} for rank in range(3)]
    delivered = results(world, step(world, own))
    planned = [
        sum(r.sent_nbytes(rank) for m in world.plan.messages(list(SHAPES)) for r in m.rounds) for rank in range(3)
    ]
    assert world.sent_nbytes == planned
    if aggregator.up != Identity():
        return
    exact = kept(world, own) if isinstance(aggregator, ShardAllGather) else {name: sum_of(own, name) for name in SHAPES}
    assert bits(delivered) == bits(exact)


@every
@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_parameters_of_any_size(aggregator: Aggregator, world_size: int) -> None:
    """Empty ones, ones with fewer elements than ranks, and ones of which the last piece has one element."""
    world = World(aggregator, world_size, shapes={f"w{numel}": (numel,) for numel in (0, 1, 2, 31, 201)})
    delivered = results(world, step(world))
    assert all(bool(value.isfinite().all()) for value in delivered.values())
    assert [value.numel() for value in delivered.values()] == [0, 1, 2, 31, 201]


# --- nothing shows but the plan -------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("message_nbytes", "order"),
    [(1, None), (1 << 30, None), (1500, tuple(reversed(SHAPES)))],
    ids=["tiny", "huge", "reversed"],
)
def test_cuts_and_order_do_not_show(
    aggregator: Aggregator, world_size: int, message_nbytes: int, order: tuple[str, ...] | None
) -> None:
    reference, delivered, _ = history(aggregator, world_size)
    world = World(aggregator, world_size, message_nbytes=message_nbytes, order=order)
    for i in range(NUM_STEPS):
        assert bits(results(world, step(world))) == bits(delivered[i])
    assert world.residuals() == reference.residuals()


@reduces
def test_owners_do_not_show(aggregator: Aggregator) -> None:
    """Another order of registration deals other owners."""
    world = World(aggregator, 3, shapes={name: SHAPES[name] for name in ("layer.weight", "gain", *SHAPES)})
    plain, delivered, _ = history(aggregator, 3)
    owners = [{(p.name, p.offset): p.owner for p in partitions(w)} for w in (world, plain)]
    assert owners[0] != owners[1]
    for i in range(NUM_STEPS):
        assert bits(results(world, step(world, [gradients(rank, i) for rank in range(3)]))) == bits(delivered[i])


@pytest.mark.parametrize("aggregator", [ReduceScatter(up=DITHER), ShardAllGather(down=DITHER)], ids=ident)
def test_dither_belongs_to_the_step_and_to_the_element(aggregator: Aggregator) -> None:
    small, large = World(aggregator, 3, partition_numel=64), World(aggregator, 3, partition_numel=64 * 5)
    same = [gradients(0, 0)] * 3
    seen = [[bits(results(world, step(world, same))) for _ in range(2)] for world in (small, large)]
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]


def test_dither_is_private_to_a_rank() -> None:
    """Shared dither would make the mean of equal contributions equal to each of them."""
    exact = gradients(0, 0)["layer.weight"]
    one, many = (World(ReduceScatter(up=DITHER), n) for n in (1, 8))
    alone = results(one, step(one, [gradients(0, 0)]))["layer.weight"]
    mean = results(many, step(many, [gradients(0, 0)] * 8))["layer.weight"] / 8
    assert float((mean - exact).norm()) < 0.6 * float((alone - exact).norm())


@every
def test_a_message_that_recurs_gives_the_bytes_of_fresh_ones(aggregator: Aggregator) -> None:
    """Kernel calls are prepared once per message; and all work memory comes back."""
    fresh, again = World(aggregator, 3), World(aggregator, 3)
    (layout,) = again.plan.messages(list(SHAPES))
    own = [gradients(rank, 0) for rank in range(3)]
    messages = [
        Message(layout, [again.block(rank, p, own[rank][p.name]) for p in layout.partitions], rank) for rank in range(3)
    ]
    sizes: list[list[int]] = []
    for i in range(4):
        grads = [gradients(rank, i) for rank in range(3)]
        if i == 2:  # not finite: nan for all, residuals as they were
            grads[1] = {name: torch.full_like(g, float("inf")) for name, g in grads[1].items()}
        if isinstance(aggregator, ShardAllGather):
            grads = only_owned(again, grads)
        for rank, message in enumerate(messages):
            message.begin(i)
            for name, gradient in grads[rank].items():
                own[rank][name].copy_(gradient)
            for block in message.blocks:
                if aggregator.feedback is not None:
                    block.residual_scale = aggregator.feedback.residual_scale(1.0)
        run_lock_step([type(aggregator).exchange(m) for m in messages], layout.rounds)
        expected = fresh.run(grads)
        if i == 2:
            assert all(bool(value.isnan().all()) for values in (*own, *expected) for value in values.values())
        else:
            assert bits(results(again, own)) == bits(results(fresh, expected))
        assert again.residuals() == fresh.residuals()
        for message in messages:
            message.forget()
        sizes.append([m.buffers.allocated_nbytes for m in messages])
    assert sizes[1] == sizes[-1]


# --- steps that are not finite --------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_non_finite_anywhere_is_known_everywhere(aggregator: Aggregator, world_size: int) -> None:
    """One message per partition, so that most ranks own nothing in it."""
    for rank in range(world_size):
        world = World(aggregator, world_size, message_nbytes=1)
        step(world)
        before = world.residuals()
        second = next(p for p in world.plan.by_name["layer.weight"].partitions if p.offset == 200)
        culprit = second.owner if isinstance(aggregator, ShardAllGather) else rank
        grads = [gradients(r, 1) for r in range(world_size)]
        grads[culprit]["layer.weight"][201] = float("nan" if culprit % 2 else "inf")
        values = step(world, grads)
        part = slice(second.offset, second.offset + second.numel)
        assert all(bool(own["layer.weight"][part].isnan().all()) for own in values)
        delivered = kept(world, values)
        assert int(sum(value.isnan().sum() for value in delivered.values())) == second.numel
        (messages,) = [m for m in world.messages if m[0].layout.partitions == (second,)]
        assert [m.nonfinite for m in messages] == [{(culprit, "layer.weight")}] * world_size
        assert not any(m.nonfinite for others in world.messages if others is not messages for m in others)
        changed = {place[2:] for place, value in world.residuals().items() if value != before[place]}
        assert ("layer.weight", second.offset) not in changed
        assert bool(changed) == bool(before), "the others moved on"
        after = results(world, step(world))
        assert all(bool(value.isfinite().all()) for value in after.values())


@with_feedback
def test_a_flagged_message_leaves_all_its_residuals_bit_for_bit(aggregator: Aggregator) -> None:
    world = World(aggregator, 3)  # one message
    for _ in range(3):
        step(world)
    before = world.residuals()
    assert any(any(r) for r in before.values()), "residuals are not zero, or this shows nothing"
    for culprit, name in ((0, "gain"), (2, "embed.weight")):
        grads = [gradients(rank, 7) for rank in range(3)]
        grads[culprit][name][-1] = float("-inf")
        values = step(world, grads)
        assert all(value.isnan().all() for own in values for value in own.values())
        assert world.residuals() == before
        assert [m.nonfinite for m in world.messages[0]] == [{(culprit, name)}] * 3
    step(world)
    assert world.residuals() != before


def test_a_sum_that_overflows_shows_with_its_owner_alone() -> None:
    """As in a reduce-scatter of floats: no contribution was at fault, and nobody else is told."""
    world = World(ReduceScatter(up=Identity()), 4)
    grads = [gradients(rank, 0) | {"gain": torch.tensor([3e38])} for rank in range(4)]
    delivered = results(world, step(world, grads))
    assert bool(delivered["gain"].isinf().all())
    assert all(bool(value.isfinite().all()) for name, value in delivered.items() if name != "gain")
    assert not any(m.nonfinite for m in world.messages[0])


@every
def test_different_loss_scales_are_refused_on_all_ranks(aggregator: Aggregator) -> None:
    """Nothing is delivered, and residuals stay."""
    world = World(aggregator, 3)
    step(world)
    before = world.residuals()
    (layout,) = world.plan.messages(list(SHAPES))
    own = [gradients(rank, 1) for rank in range(3)]
    messages = [Message(layout, [world.block(r, p, own[r][p.name]) for p in layout.partitions], r, 1) for r in range(3)]
    messages[2].loss_scale = 2.0
    run_lock_step([type(aggregator).exchange(m) for m in messages], layout.rounds)
    assert all(m.scales_differ for m in messages)
    assert all(bool(value.isnan().all()) for values in own for value in values.values())
    assert world.residuals() == before


# --- schedules and refusals -----------------------------------------------------------------------------------------


@every
def test_schedule_for_4096_ranks_is_arithmetic(aggregator: Aggregator) -> None:
    started = time.perf_counter()
    one = Partition(name="w", dtype=torch.float32, offset=0, numel=4096, owner=0, aggregator=aggregator)
    many = [
        Partition(name="w", dtype=torch.float32, offset=4096 * i, numel=4096, owner=i, aggregator=aggregator)
        for i in range(4096)
    ]
    last = type(aggregator).schedule(many, 4096)[-1]
    assert time.perf_counter() - started < 5.0
    nbytes = (header_nbytes(1) + aggregator.up.nbytes(one.spec),) * 4096
    assert last == (AllGather(nbytes) if isinstance(aggregator, ShardAllGather) else AllToAll(nbytes))


@pytest.mark.parametrize("lossy", [OneBit(), TopK(density=0.1), BlockQuant(bits=4)], ids=str)
def test_lossy_kinds_need_feedback_on_their_way_up(lossy: Compressor) -> None:
    with pytest.raises(RecipeError, match="pass feedback=ErrorFeedback"):
        ReduceScatter(up=lossy)


@pytest.mark.parametrize("lossy", [OneBit(), TopK(density=0.1), BlockQuant(bits=2), RandomK(density=0.5)], ids=str)
def test_weights_take_no_kind_that_only_trains_with_feedback(lossy: Compressor) -> None:
    with pytest.raises(RecipeError, match="weights have none"):
        ShardAllGather(down=lossy)
