"""Every aggregator keeps the same promises, for any number of ranks. A new one is one line in `TABLE`."""

import struct
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from exchanges import DITHER, EF, NUM_STEPS, ONE_BIT, TABLE, WITH_FEEDBACK, history, ident
from world import SHAPES, Values, World, bits, gradients

from thinwire import (
    EF21,
    BlockQuant,
    Cast,
    Compressor,
    Dense,
    ErrorFeedback,
    Gather,
    Hierarchical,
    Identity,
    LowRank,
    OneBit,
    PowerSGD,
    RandomK,
    Sign,
    SumOnWire,
    TopK,
    TreeReduce,
    TwoShot,
)
from thinwire.aggregators import MANY, MEAN, Aggregator, Block, Message, Partition, typical_contract
from thinwire.aggregators.header import (
    bitmap,
    header_nbytes,
    names_in,
    num_flags,
    read_flags,
    read_header,
    write_flags,
    write_header,
)
from thinwire.comm.local import run_lock_step
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Exchange, Transfer
from thinwire.compressors import Unbiased
from thinwire.errors import RecipeError, ScheduleError
from thinwire.feedback import Slot


def _is_vote(aggregator: Aggregator) -> bool:
    return isinstance(aggregator, Gather) and aggregator.votes


all_aggregators = pytest.mark.parametrize("aggregator", TABLE, ids=ident)
compressed = pytest.mark.parametrize("aggregator", [a for a in TABLE if not isinstance(a, Dense)], ids=ident)
conserving = pytest.mark.parametrize(  # the others deliver something else than the sum of gradients
    "aggregator",
    [a for a in TABLE if isinstance(a.feedback, ErrorFeedback) or (a.feedback is None and not _is_vote(a))],
    ids=ident,
)
with_feedback = pytest.mark.parametrize("aggregator", WITH_FEEDBACK, ids=ident)
world_sizes = pytest.mark.parametrize("world_size", range(1, 9))

# --- the mean -------------------------------------------------------------------------------------------------------


@all_aggregators
@world_sizes
def test_all_ranks_get_the_same_bits(aggregator: Aggregator, world_size: int) -> None:
    _, delivered, _ = history(aggregator, world_size)
    for step in delivered:
        assert all(bits(values) == bits(step[0]) for values in step[1:])
        assert all(bool(value.isfinite().all()) for value in step[0].values())
        assert any(bool(value.any()) for value in step[0].values())


@all_aggregators
@world_sizes
def test_bytes_are_those_of_the_plan(aggregator: Aggregator, world_size: int) -> None:
    """The lock-step driver has checked the rounds themselves."""
    world, _, sent = history(aggregator, world_size)
    names = list(SHAPES)
    planned = [
        sum(r.sent_nbytes(rank) for layout in world.plan.messages(names) for r in layout.rounds)
        for rank in range(world_size)
    ]
    assert sent == [planned] * NUM_STEPS
    assert (max(planned) > 0) == (world_size > 1)


@conserving
@world_sizes
def test_nothing_is_lost(aggregator: Aggregator, world_size: int) -> None:
    """What was delivered, plus what is still owed, is the sum of the mean gradients; without feedback, about so."""
    world, delivered, _ = history(aggregator, world_size)
    owed = world.owed()
    lossless = aggregator.feedback is not None or aggregator.up == aggregator.down == Identity()
    totals = [_total(name, world_size, delivered) for name in SHAPES]
    means, got = torch.cat([mean for mean, _ in totals]), torch.cat([got for _, got in totals])
    error = float((got + torch.cat([owed[name] for name in SHAPES]) - means).norm() / means.norm())
    # float32 rounding where nothing may be lost, but for sums rounded to 16 bits on the wire; 4 bits are the coarsest
    # of the others, but for masks and for few levels of a shared scale, of which the next test says more.
    coarse = aggregator.up.shared_key or aggregator.up.statistic_reduction is not None
    rounded = isinstance(aggregator, SumOnWire) and aggregator.up.linear in (torch.float16, torch.bfloat16)
    bound = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[aggregator.up.linear] if rounded and world_size > 1 else 5e-6
    assert error < (bound if lossless else 4.0 if coarse else 0.25)
    assert any(bool(value.any()) for value in owed.values()) == bool(aggregator.feedback)


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregator",
    [a for a in TABLE if a.feedback is None and not _is_vote(a) and isinstance(typical_contract(a.up), Unbiased)],
    ids=ident,
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_unbiased_kinds_deliver_the_mean_on_average(aggregator: Aggregator, world_size: int) -> None:
    """The same gradients again and again: the mean's share in what is delivered is 1, to 5 standard errors."""
    world = World(aggregator, world_size)
    own = [gradients(rank, 0) for rank in range(world_size)]
    mean = {name: torch.stack([g[name] for g in own]).mean(dim=0) for name in SHAPES}
    square = sum(float(value.square().sum()) for value in mean.values())
    shares: list[float] = []
    for _ in range(150):
        delivered = world.run(own)[0]
        shares.append(sum(float(delivered[name] @ mean[name]) for name in SHAPES) / square)
    found = np.array(shares)
    assert abs(found.mean() - 1) < 5 * found.std(ddof=1) / len(found) ** 0.5 + 1e-6


def _total(name: str, world_size: int, delivered: list[list[Values]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over steps of mean gradients and of what was delivered."""
    mean = torch.zeros_like(gradients(0, 0)[name], dtype=torch.float64)
    for step in range(NUM_STEPS):
        for rank in range(world_size):
            mean += gradients(rank, step)[name].double() / world_size
    return mean, torch.stack([values[0][name].double() for values in delivered]).sum(dim=0)


@pytest.mark.parametrize("aggregator", [Gather(up=Identity()), TwoShot(up=Identity(), down=Identity())], ids=ident)
@world_sizes
def test_identity_is_the_mean_in_rank_order_divided_once(aggregator: Aggregator, world_size: int) -> None:
    _, delivered, _ = history(aggregator, world_size)
    for step, values in enumerate(delivered):
        for name in SHAPES:
            total = gradients(0, step)[name].clone()
            for rank in range(1, world_size):
                total += gradients(rank, step)[name]
            assert torch.equal(values[0][name], total / world_size)


@world_sizes
def test_dense_scales_then_sums(world_size: int) -> None:
    """As DDP: a product with 1/n, then the sum."""
    _, delivered, _ = history(Dense(), world_size)
    for step, values in enumerate(delivered):
        for name in SHAPES:
            total = gradients(0, step)[name] * (1 / world_size)
            for rank in range(1, world_size):
                total += gradients(rank, step)[name] * (1 / world_size)
            assert torch.equal(values[0][name], total)


def test_dense_in_16_bits_does_not_overflow_in_the_sum() -> None:
    world = World(Dense(wire_dtype=torch.float16), 4, shapes={"w": (10,)})
    delivered = world.run([{"w": torch.full((10,), 60000.0)}] * 4)
    assert (delivered[0]["w"] == 60000.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_parameters_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Four times 2049 has no float16 sum, nor a bfloat16 one; the mean is rounded once."""
    exact = 256.0 if dtype == torch.bfloat16 else 2048.0
    grads = [{"w": torch.full((3,), exact + (0 if rank else 4))} for rank in range(4)]
    world = World(TwoShot(up=Identity(), down=Identity()), 4, shapes={"w": (3,)}, dtype=dtype)
    expected = torch.tensor(exact + 1).to(dtype).float()
    assert (world.run(grads)[0]["w"] == expected).all()
    assert world.plan.params[0].partitions[0].spec.raw_nbytes == 6


# --- buckets do not show --------------------------------------------------------------------------------------------


@compressed
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("message_nbytes", "order"),
    [
        (1, None),
        (1 << 30, None),
        (1500, ("gain", "head.weight", "layer.bias", "embed.weight", "layer.weight")),
        (1 << 30, tuple(reversed(SHAPES))),
    ],
    ids=["tiny", "huge", "permuted", "reversed"],
)
def test_cuts_and_order_do_not_show(
    aggregator: Aggregator, world_size: int, message_nbytes: int, order: tuple[str, ...] | None
) -> None:
    reference, delivered, _ = history(aggregator, world_size)
    world = World(aggregator, world_size, message_nbytes=message_nbytes, order=order)
    for step in range(NUM_STEPS):
        assert bits(world.run()[0]) == bits(delivered[step][0])
    assert world.residuals() == reference.residuals()


def test_cuts_do_cut() -> None:
    """What the test above varies is there."""
    names = list(SHAPES)
    tiny, huge = World(ONE_BIT, 2, message_nbytes=1), World(ONE_BIT, 2, message_nbytes=1 << 30)
    assert len(tiny.plan.messages(names)) == sum(len(p.partitions) for p in tiny.plan.params) > 5
    assert len(huge.plan.messages(names)) == 1


@pytest.mark.parametrize(
    "aggregator",  # what a representative adds of its own is not rounded to 16 bits: there owners do show
    [a for a in TABLE if not isinstance(a, Dense) and not (isinstance(a, Hierarchical) and a.inner_dtype)],
    ids=ident,
)
def test_order_of_registration_and_owners_do_not_show(aggregator: Aggregator) -> None:
    """Another order deals other owners; the second hop's random stream does not depend on them."""
    world = World(aggregator, 3, shapes={name: SHAPES[name] for name in ("layer.weight", "gain", *SHAPES)})
    plain, delivered, _ = history(aggregator, 3)
    owners = [{(p.name, p.offset): p.owner for m in w.plan.params for p in m.partitions} for w in (world, plain)]
    assert owners[0] != owners[1]
    for step in range(3):
        grads = [gradients(rank, step) for rank in range(3)]
        assert bits(world.run(grads)[0]) == bits(delivered[step][0])


# --- random streams -------------------------------------------------------------------------------------------------

dithered = pytest.mark.parametrize(
    "aggregator",
    [TwoShot(up=DITHER, down=DITHER), Gather(up=DITHER), Hierarchical(up=DITHER, down=DITHER, node_sizes=2)],
    ids=ident,
)


@dithered
def test_dither_does_not_depend_on_the_size_of_partitions(aggregator: Aggregator) -> None:
    small, large = World(aggregator, 3, partition_numel=64), World(aggregator, 3, partition_numel=64 * 5)
    for _ in range(2):
        assert bits(small.run()[0]) == bits(large.run()[0])


@dithered
def test_dither_differs_between_steps(aggregator: Aggregator) -> None:
    world = World(aggregator, 2)
    same = [gradients(0, 0)] * 2
    assert bits(world.run(same)[0]) != bits(world.run(same)[0])


def test_dither_is_private_to_a_rank() -> None:
    """Shared dither would make the mean of equal contributions equal to each of them."""
    for aggregator in (Gather(up=DITHER), TwoShot(up=DITHER, down=Identity())):
        one = World(aggregator, 1).run([gradients(0, 0)])[0]["layer.weight"]
        many = World(aggregator, 8).run([gradients(0, 0)] * 8)[0]["layer.weight"]
        exact = gradients(0, 0)["layer.weight"]
        assert float((many - exact).norm()) < 0.6 * float((one - exact).norm())


# --- steps that are not finite --------------------------------------------------------------------------------------


@compressed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_non_finite_anywhere_is_nan_everywhere(aggregator: Aggregator, world_size: int) -> None:
    """One message per partition, so that most ranks own nothing in it."""
    for culprit in range(world_size):
        world = World(aggregator, world_size, message_nbytes=1)
        world.run()
        before = world.residuals()
        grads = [gradients(rank, 1) for rank in range(world_size)]
        grads[culprit]["layer.weight"][201] = float("nan" if culprit % 2 else "inf")
        delivered = world.run(grads)
        # The second of three, but of kinds that see whole matrices the only one.
        second = next(p for p in world.plan.by_name["layer.weight"].partitions if p.offset + p.numel > 201)
        for values in delivered:
            flagged = torch.zeros(528, dtype=torch.bool)
            flagged[second.offset : second.offset + second.numel] = True
            assert torch.equal(values["layer.weight"].isnan(), flagged)
            assert all(value.isfinite().all() for name, value in values.items() if name != "layer.weight")
        (messages,) = [m for m in world.messages if m[0].layout.partitions == (second,)]
        assert [m.nonfinite for m in messages] == [{(culprit, "layer.weight")}] * world_size
        assert not any(m.nonfinite for others in world.messages if others is not messages for m in others)
        changed = {place[2:] for place, value in world.residuals().items() if value != before[place]}
        assert ("layer.weight", second.offset) not in changed
        assert bool(changed) == bool(before), "the others moved on"
        # The other messages were ordinary: the next step is, too.
        after = world.run()
        assert all(bits(values) == bits(after[0]) for values in after)
        assert all(bool(value.isfinite().all()) for value in after[0].values())


@with_feedback
def test_a_flagged_message_leaves_all_its_residuals_bit_for_bit(aggregator: Aggregator) -> None:
    world = World(aggregator, 3)  # one message
    for _ in range(3):
        world.run()
    before = world.residuals()
    assert any(any(r) for r in before.values()), "residuals are not zero, or this shows nothing"
    for culprit, name in ((0, "gain"), (2, "embed.weight")):
        grads = [gradients(rank, 7) for rank in range(3)]
        grads[culprit][name][-1] = float("-inf")
        delivered = world.run(grads)
        assert all(value.isnan().all() for values in delivered for value in values.values())
        assert world.residuals() == before
        assert [m.nonfinite for m in world.messages[0]] == [{(culprit, name)}] * 3
    world.run()
    assert world.residuals() != before


def test_every_culprit_is_named() -> None:
    world = World(ONE_BIT, 4)
    grads = [gradients(rank, 0) for rank in range(4)]
    grads[1]["gain"][0] = float("nan")
    grads[3]["gain"][0] = float("inf")
    grads[3]["head.weight"][449] = float("inf")
    world.run(grads)
    expected = {(1, "gain"), (3, "gain"), (3, "head.weight")}
    assert [m.nonfinite for m in world.messages[0]] == [expected] * 4


@world_sizes
def test_dense_carries_non_finite_values_by_itself(world_size: int) -> None:
    grads = [gradients(rank, 0) for rank in range(world_size)]
    grads[-1]["gain"][0] = float("nan")
    assert all(values["gain"].isnan().all() for values in World(Dense(), world_size).run(grads))


@pytest.mark.parametrize(
    ("aggregator", "value"),
    [
        (TwoShot(up=Identity(), down=Identity()), 3e38),  # the sum overflows
        (Gather(up=Identity()), 3e38),
        (Gather(up=OneBit(), feedback=EF), 3e38),
        (TwoShot(up=BlockQuant(), down=BlockQuant(), feedback=EF), 3e38),
        (TwoShot(up=Identity(), down=Cast(), feedback=EF), 7e4),  # the mean does not fit what goes back
        (TwoShot(up=OneBit(), down=TopK(density=0.5), feedback=EF), 7e4),
    ],
    ids=ident,
)
def test_overflow_of_the_mean_is_flagged_as_the_mean(aggregator: Aggregator, value: float) -> None:
    world = World(aggregator, 4)
    world.run()
    before = world.residuals()
    grads = [gradients(rank, 1) for rank in range(4)]
    for own in grads:
        own["layer.weight"].fill_(value)
    delivered = world.run(grads)
    assert all(v.isnan().all() for values in delivered for v in values.values())
    assert [m.nonfinite for m in world.messages[0]] == [{(MEAN, "layer.weight")}] * 4
    assert world.residuals() == before


def test_overflow_of_one_ranks_wire_names_that_rank() -> None:
    world = World(TwoShot(up=Cast(), down=Cast()), 2)
    grads = [gradients(rank, 0) for rank in range(2)]
    grads[1]["gain"].fill_(65520.0)
    world.run(grads)
    assert [m.nonfinite for m in world.messages[0]] == [{(1, "gain")}] * 2


# --- parameters that backward does not reach ------------------------------------------------------------------------


def _in_units(kept: dict[tuple[int, str, str, int], bytes], ratio: float) -> dict[tuple[int, str, str, int], bytes]:
    """Return what feedback keeps in units that are `ratio` times smaller. A factor has none."""
    ratios = {place: 1.0 if place[1] == Slot.FACTOR else ratio for place in kept}
    return {place: (ratios[place] * np.frombuffer(one, np.float32)).tobytes() for place, one in kept.items()}


@with_feedback
@pytest.mark.parametrize("unit_ratio", [1.0, 2.0])
def test_unused_everywhere_keeps_what_is_owed(aggregator: Aggregator, unit_ratio: float) -> None:
    """And all else that feedback keeps."""
    world = World(aggregator, 3)
    for _ in range(3):
        world.run()
    before = world.residuals()
    grads = [gradients(rank, 5) | {"layer.weight": torch.zeros(528)} for rank in range(3)]
    world.run(grads, unused={rank: {"layer.weight"} for rank in range(3)}, unit_ratio=unit_ratio)
    assert [m.unused for m in world.messages[0]] == [{"layer.weight"}] * 3
    kept = _in_units(before, unit_ratio)
    after = world.residuals()
    assert any(any(one) for place, one in kept.items() if place[2] == "layer.weight")
    assert all(after[place] == one for place, one in kept.items() if place[2] == "layer.weight")
    assert any(after[place] != one for place, one in kept.items() if place[2] == "head.weight")


def test_what_is_owed_to_unused_parameters_does_not_decay() -> None:
    aggregator = TwoShot(up=OneBit(), down=OneBit(), feedback=ErrorFeedback(decay=0.5))
    world = World(aggregator, 2)
    world.run()
    owed = world.owed()
    world.run(unused={rank: set(SHAPES) for rank in range(2)}, unit_ratio=4.0)
    for name, value in world.owed().items():
        assert torch.equal(value, owed[name] * 4.0)


@compressed
def test_used_on_one_rank_is_used(aggregator: Aggregator) -> None:
    plain, world = World(aggregator, 3), World(aggregator, 3)
    for step in range(3):
        grads = [gradients(rank, step) for rank in range(3)]
        for rank in (0, 2):
            grads[rank]["layer.weight"].zero_()
        expected = plain.run(grads)
        delivered = world.run(grads, unused={0: {"layer.weight"}, 2: {"layer.weight"}})
        assert [bits(values) for values in delivered] == [bits(values) for values in expected]
        assert not any(m.unused for m in world.messages[0])
    assert world.residuals() == plain.residuals()


@with_feedback
def test_unused_and_not_finite_at_once(aggregator: Aggregator) -> None:
    """Nothing is delivered, so all stays owed, in the units of this step."""
    world = World(aggregator, 2)
    world.run()
    before = world.residuals()
    grads = [gradients(rank, 1) for rank in range(2)]
    grads[0]["gain"][0] = float("nan")
    world.run(grads, unused={0: {"layer.weight"}, 1: {"layer.weight"}}, unit_ratio=2.0)
    assert world.residuals() == _in_units(before, 2.0)


@all_aggregators
def test_a_mean_too_large_for_16_bits_is_not_finite(aggregator: Aggregator) -> None:
    """Scales are float32: a decoded value may exceed what a float16 parameter holds, where no gradient did."""
    world = World(aggregator, 2, dtype=torch.float16)
    grads = [{name: torch.full_like(g, 65504.0) for name, g in gradients(rank, 0).items()} for rank in range(2)]
    for step in range(4):
        grads = [{name: g * (1 if i % 2 else 0.999) for i, (name, g) in enumerate(own.items())} for own in grads]
        means = world.run([{name: g.clone() for name, g in own.items()} for own in grads])
        flagged = [{name for message in world.messages for _, name in message[rank].nonfinite} for rank in range(2)]
        assert flagged[0] == flagged[1]
        for own in means:
            for name, mean in own.items():
                assert bool(mean.half().isfinite().all()) or bool(mean.isnan().all()), (step, name)


@pytest.mark.parametrize("num_names", range(1, 71))
def test_headers_round_trip(num_names: int) -> None:
    names = [f"p{i}" for i in range(num_names)]
    out = torch.full((header_nbytes(num_names) + 8,), 0xAA, dtype=torch.uint8)
    assert header_nbytes(num_names) % 4 == 0
    assert header_nbytes(num_names) < 2 * (num_names / 8 + 1) + 8
    for pick in (1, 2, 3, 7):
        used, nonfinite = set(names[::pick]), set(names[pick - 1 :: pick + 1])
        header = out[: header_nbytes(num_names)]
        write_header(header, num_names, bitmap(names, used), bitmap(names, nonfinite), 2.0**-20)
        *bitmaps, scale = read_header(header, num_names)
        assert [names_in(bits, names) for bits in bitmaps] == [used, nonfinite]
        assert struct.unpack("<f", scale) == (2.0**-20,)
        assert (out[header_nbytes(num_names) :] == 0xAA).all()


def test_header_bits_start_from_the_least_significant() -> None:
    names = [f"p{i}" for i in range(10)]
    out = torch.empty(8, dtype=torch.uint8)
    write_header(out, 10, bitmap(names, {"p0", "p9"}), bitmap(names, {"p1", "p8"}))
    assert out.tolist() == [0, 0, 0x80, 0x3F, 0b00000001, 0b10, 0b00000010, 0b01]  # first 1.0, the loss scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_flags_tell_loss_scales_apart(op: Literal["sum", "max"], dtype: torch.dtype) -> None:
    names = ["p0", "p1", "p2"]

    def combined(scales: Sequence[float]) -> bool:
        flags = [torch.empty(num_flags(3, op), dtype=dtype) for _ in scales]
        for rank, (out, scale) in enumerate(zip(flags, scales, strict=True)):
            write_flags(out, names, {"p0"}, {"p1"} if rank == 1 else set(), rank, op, scale)
        data = torch.stack(flags)
        unused, bad, differ = read_flags(data.amax(0) if op == "max" else data.sum(0), names, op)
        assert (unused, bad) == ({"p1", "p2"}, {(1, "p1")})
        return differ

    assert not combined([65536.0] * 5)
    assert not combined([3.7] * 300)
    assert combined([65536.0] * 299 + [32768.0])
    assert combined([1.0, 1.0 + 2.0**-23])


# --- schedules ------------------------------------------------------------------------------------------------------


def partitions_of(aggregator: Aggregator, num: int, world_size: int, numel: int = 65536) -> list[Partition]:
    return [
        Partition(
            name=f"p{i // 4}",
            dtype=torch.float32,
            offset=(i % 4) * numel,
            numel=numel,
            owner=i % world_size,
            aggregator=aggregator,
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("aggregator", [a for a in TABLE if not isinstance(a, Hierarchical)], ids=ident)
def test_schedule_for_4096_ranks_is_arithmetic(aggregator: Aggregator) -> None:
    started = time.process_time()
    partitions = partitions_of(aggregator, 4096, 4096)
    rounds = type(aggregator).schedule(partitions, 4096)
    assert time.process_time() - started < 5.0  # without a tensor; other work on the machine does not count
    header, up = header_nbytes(1024), aggregator.up.nbytes(partitions[0].spec)
    down = aggregator.down.nbytes(partitions[0].spec)
    op = aggregator.up.statistic_reduction
    if op is not None:
        numel = num_flags(1024, op) + 4096 * aggregator.up.num_statistics(partitions[0].spec)
        assert rounds[0] == AllReduce(numel, torch.float32, 4096, op)
        rounds = rounds[1:]
    if isinstance(aggregator, PowerSGD):  # 65,536 values are a matrix of one row, whose rank is 1
        flags, factors = num_flags(1024, "sum"), [4096, 4096 * 65536]
        numel = [flags + factors[1]] if aggregator.alternating else [flags + factors[0], factors[1]]
        assert rounds == tuple(AllReduce(n, torch.float32, 4096) for n in numel)
    elif isinstance(aggregator, TwoShot):
        assert rounds == (AllToAll((header + up,) * 4096), AllGather((header + down,) * 4096))
    elif isinstance(aggregator, Gather):
        assert rounds == (AllGather((header + 4096 * up,) * 4096),)
    elif isinstance(aggregator, TreeReduce):
        *steps, gather = rounds
        assert gather == AllGather((up,) * 4096)
        assert len(steps) == 12
        assert sum(step.sent_nbytes(5) for step in steps) == 4095 * up
        assert {sum(sent) for sent in zip(*(step.sent_nbytes_by_rank() for step in steps), strict=True)} == {4095 * up}
    else:
        dtype = aggregator.up.linear or aggregator.up.layout(partitions[0].spec).parts[0].dtype
        flags = num_flags(1024, "sum") if isinstance(aggregator, SumOnWire) and op is None else 0
        assert rounds == (AllReduce(flags + 4096 * up // dtype.itemsize, dtype, 4096),)


def test_bytes_of_rounds() -> None:
    assert AllToAll((10, 20, 30)).sent_nbytes(1) == 40
    assert AllGather((10, 20, 30)).sent_nbytes(1) == 40
    assert AllGather((10, 20, 30)).sent_nbytes(2) == 60
    assert AllReduce(1000, torch.float16, 4).sent_nbytes(0) == 3000
    assert AllReduce(1000, torch.float32, 1).sent_nbytes(0) == 0


def _messages(world_size: int = 2) -> list[Message]:
    layout = TwoShot.lay_out(partitions_of(TwoShot(up=Identity(), down=Identity()), 2, 2, numel=8), world_size)
    return [Message(layout, [Block(p, torch.ones(8)) for p in layout.partitions], rank) for rank in range(world_size)]


def test_an_exchange_must_keep_to_its_schedule() -> None:
    messages = _messages()
    schedule = messages[0].layout.rounds

    def run(change) -> None:
        run_lock_step([change(m.rank, TwoShot.exchange(m)) for m in _messages()], schedule)

    def too_few(rank: int, exchange: Exchange) -> Exchange:
        yield next(exchange)

    def too_many(rank: int, exchange: Exchange) -> Exchange:
        last = None
        for transfer in exchange:
            last = transfer
            yield transfer
        if rank == 1:
            assert last is not None
            yield last

    def other_size(rank: int, exchange: Exchange) -> Exchange:
        for transfer in exchange:
            if isinstance(transfer.round, AllGather) and rank == 1:
                transfer = Transfer(AllGather((1, 2)), transfer.send, transfer.receive)
            yield transfer

    run(lambda rank, exchange: exchange)
    with pytest.raises(ScheduleError, match=r"rank 0, round 1: the schedule says AllGather.*yields None"):
        run(too_few)
    with pytest.raises(ScheduleError, match=r"rank 1, round 2: the schedule says None.*yields AllGather"):
        run(too_many)
    with pytest.raises(ScheduleError, match=r"rank 1, round 1: .*\(1, 2\)"):
        run(other_size)


def test_work_memory_comes_back() -> None:
    """Every buffer that an exchange takes is given back, so that the pool stops growing after a step."""
    for aggregator in (ONE_BIT, Gather(up=OneBit(), feedback=EF)):
        world = World(aggregator, 2)
        layout = world.plan.messages(list(SHAPES))[0]
        own = [gradients(rank, 0) for rank in range(2)]
        messages = [
            Message(
                layout,
                [world.block(rank, p, own[rank][p.name]) for p in layout.partitions],
                rank,
            )
            for rank in range(2)
        ]
        sizes = []
        for step in range(4):
            for message in messages:
                message.begin(step)
            run_lock_step([type(aggregator).exchange(m) for m in messages], layout.rounds)
            sizes.append([m.buffers.allocated_nbytes for m in messages])
        assert sizes[0] == sizes[1] == sizes[-1]


@all_aggregators
def test_a_message_that_recurs_gives_the_bytes_of_fresh_ones(aggregator: Aggregator) -> None:
    """Kernel calls are prepared once per message; what they do must not depend on that."""
    if isinstance(aggregator, Dense):
        return
    fresh, kept = World(aggregator, 3), World(aggregator, 3)
    (layout,) = kept.plan.messages(list(SHAPES))
    own = [gradients(rank, 0) for rank in range(3)]
    messages = [
        Message(
            layout,
            [kept.block(rank, p, own[rank][p.name]) for p in layout.partitions],
            rank,
        )
        for rank in range(3)
    ]
    for step in range(4):
        for rank, message in enumerate(messages):
            for name, gradient in gradients(rank, step).items():
                own[rank][name].copy_(gradient)
            message.begin(step)
            for nbytes in (64, 256, 1024, 4096, 8192):  # never given back: work memory lies elsewhere in each step
                message.buffers.take(nbytes)
            for block in message.blocks:
                block.residual_scale = block.unit_ratio = 1.0 + step / 8
        if step == 2:  # not finite: nan for all, residuals as they were
            own[1]["gain"].fill_(float("inf"))
        run_lock_step([type(aggregator).exchange(m) for m in messages], layout.rounds)
        grads = [gradients(rank, step) for rank in range(3)]
        if step == 2:
            grads[1]["gain"].fill_(float("inf"))
        expected = fresh.run(grads, unit_ratio=1.0 + step / 8)
        assert [bits(values) for values in own] == [bits(values) for values in expected]
        assert kept.residuals() == fresh.residuals()


# --- votes and flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_votes_are_majorities(world_size: int) -> None:
    """+1 or -1 as most ranks say; of a tie +1, or either by chance and the same on all ranks."""
    own = [gradients(rank, 0) for rank in range(world_size)]
    plus = World(Gather(up=Sign()), world_size).run(own)[0]
    drawn = World(Gather(up=Sign(ties="random")), world_size).run(own)[0]
    ties = 0
    for name in SHAPES:
        votes = torch.stack([torch.where(g[name] >= 0, 1.0, -1.0) for g in own]).sum(dim=0)
        assert torch.equal(plus[name], torch.where(votes >= 0, 1.0, -1.0))
        assert torch.equal(drawn[name][votes != 0], votes[votes != 0].sign())
        assert set(drawn[name].tolist()) <= {1.0, -1.0}
        ties += int((votes == 0).sum())
    if world_size == 2:
        of_ties = torch.cat([drawn[name][plus[name] != drawn[name]] for name in SHAPES]).numel() / ties
        assert 0.4 < of_ties < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1, 127, 128, 129, 300, 2000])
def test_flags_survive_being_added_and_compared(rank: int, dtype: torch.dtype) -> None:
    names = ["a", "b", "c"]
    for op in ("sum", "max"):
        both = []
        for who, used, bad in ((rank, {"a", "b"}, {"b"}), (rank + 1, {"b"}, set[str]())):
            flags = torch.empty(num_flags(3, op), dtype=dtype if op == "sum" else torch.float32)
            write_flags(flags, names, used, bad, who, op, 1024.0)
            both.append(flags)
        together = both[0] + both[1] if op == "sum" else torch.maximum(*both)
        assert read_flags(together, names, op) == ({"c"}, {(rank, "b")}, False)
        write_flags(both[1], names, set(), {"b", "c"}, rank + 1, op, 512.0)
        together = both[0] + both[1] if op == "sum" else torch.maximum(*both)
        several = MANY if op == "sum" else rank + 1  # of several the highest, or nobody in particular
        assert read_flags(together, names, op) == ({"c"}, {(several, "b"), (rank + 1, "c")}, True)


# --- rules of feedback ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lossy", [OneBit(), OneBit(scale="rms"), TopK(), BlockQuant(bits=4), LowRank(rank=300)], ids=ident
)
def test_lossy_kinds_need_feedback(lossy: Compressor) -> None:
    for make in (
        lambda: Gather(up=lossy),
        lambda: TwoShot(up=lossy, down=Identity()),
        lambda: TwoShot(up=Identity(), down=lossy),
    ):
        with pytest.raises(RecipeError, match="pass feedback=ErrorFeedback"):
            make()


@pytest.mark.parametrize("bits_", [8, 4])
def test_unbiased_kinds_refuse_feedback(bits_: int) -> None:
    unbiased = BlockQuant(bits=bits_, rounding="stochastic")  # type: ignore[arg-type]
    for make in (
        lambda: Gather(up=unbiased, feedback=EF),
        lambda: TwoShot(up=unbiased, down=OneBit(), feedback=EF),
        lambda: TwoShot(up=OneBit(), down=unbiased, feedback=EF),
    ):
        with pytest.raises(RecipeError, match="diverge under error feedback"):
            make()


@pytest.mark.parametrize(
    "kind",
    [OneBit(scale="rms"), TopK(density=0.1, selection="sampled"), RandomK(density=0.5, rotating=True)],
    ids=ident,
)
def test_ef21_refuses_kinds_without_a_contract(kind: Compressor) -> None:
    for make in (
        lambda: Gather(up=kind, feedback=EF21()),
        lambda: TwoShot(up=kind, down=Identity(), feedback=EF21()),
        lambda: TwoShot(up=Identity(), down=kind, feedback=EF21()),
    ):
        with pytest.raises(RecipeError, match=r"EF21 needs a contractive kind.*pass feedback=ErrorFeedback"):
            make()


def test_exact_sides_keep_no_residual() -> None:
    world = World(TwoShot(up=Identity(), down=OneBit(), feedback=EF), 2)
    assert not world.states[0].worker
    assert world.states[0].owner
    world = World(TwoShot(up=OneBit(), down=Identity(), feedback=EF), 2)
    assert world.states[0].worker
    assert not world.states[0].owner


def test_dense_refuses_other_wires() -> None:
    with pytest.raises(RecipeError, match=r"float16 or bfloat16, got torch\.float32"):
        Dense(wire_dtype=torch.float32)
