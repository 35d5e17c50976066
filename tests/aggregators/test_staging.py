"""Values on a device that works beside the host: every aggregator sends the same bytes and keeps the same residuals."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from exchanges import TABLE, history, ident
from in_one_process import ServedWorld
from late_device import HastyDevice, LateDevice
from world import SHAPES, World, bits, gradients

from thinwire import (
    EF21,
    BlockQuant,
    ErrorFeedback,
    GlobalLinear,
    MomentumCorrection,
    PowerSGD,
    SumOnWire,
    TopK,
    TwoShot,
)
from thinwire.aggregators import Aggregator, Dense, Hierarchical, Message, MessageLayout, Staging
from thinwire.aggregators.staging import joined
from thinwire.comm.device import staged
from thinwire.comm.rounds import AllReduce, Exchange, Transfer
from thinwire.recipes import parse_recipe

TOP_K = TopK(density=0.1)
EACH_WAY = [
    TwoShot(up=TOP_K, down=TOP_K, feedback=ErrorFeedback()),
    TwoShot(up=TOP_K, down=TOP_K, feedback=MomentumCorrection()),
    TwoShot(up=TOP_K, down=TOP_K, feedback=EF21()),
    SumOnWire(up=GlobalLinear(bits=8)),
    PowerSGD(rank=2),
    Dense(),
]


@dataclass
class StagedWorld(World):
    """A world whose ranks have a device each."""

    kind: type[LateDevice] = LateDevice
    stagings: list[Staging] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stagings = [Staging(self.kind()) for _ in range(self.world_size)]

    def message(self, layout: MessageLayout, rank: int) -> Message:
        staging = self.stagings[rank]
        return Message(layout, [], rank, self.step, buffers=staging.pinned, staging=staging)

    def exchange(self, message: Message) -> Exchange:
        assert message.staging is not None
        values = [block.value for block in message.blocks] if message.flat is None else [message.flat]
        return staged(super().exchange(message), message.staging.device, message.staging.device.arrival(*values))

    def forget(self) -> None:
        """End the step, as a link does."""
        for message in (message for of_ranks in self.messages for message in of_ranks):
            assert message.staging is not None
            with message.staging.device.queue():
                message.forget()

    def close(self) -> list[str]:
        """End the devices; return what they noted."""
        violations: list[str] = []
        for staging in self.stagings:
            assert isinstance(staging.device, LateDevice)
            staging.device.mark().synchronize()
            violations += staging.device.violations
        return violations


class StagedServedWorld(StagedWorld, ServedWorld):
    """One whose means are formed by servers, which know of no device."""

    __init__ = ServedWorld.__init__


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("aggregator", TABLE, ids=ident)
def test_a_late_device_changes_no_bit(aggregator: Aggregator, world_size: int) -> None:
    _, delivered, sent = history(aggregator, world_size)  # whose later steps depend on what was kept of earlier ones
    world = StagedWorld(aggregator, world_size, message_nbytes=1500)
    for step in range(3):
        assert [bits(values) for values in world.run()] == [bits(values) for values in delivered[step]]
        assert world.sent_nbytes == sent[step]
        world.forget()
    assert world.close() == []


@pytest.mark.parametrize("aggregator", EACH_WAY, ids=ident)
def test_inf_on_one_rank_becomes_nan_on_all_and_changes_nothing(aggregator: Aggregator) -> None:
    world = StagedWorld(aggregator, 3, message_nbytes=1500)
    world.run()
    world.forget()
    before = world.residuals()
    grads = [gradients(rank, 1) for rank in range(3)]
    for name in SHAPES:
        grads[1][name][-1] = float("inf")
    for values in world.run(grads):
        assert not any(bool(value.isfinite().all()) for value in values.values())
    world.forget()
    assert world.residuals() == before
    assert world.close() == []


SERVED = ["topk:0.05", "topk:0.05@dgc", "int8:stochastic", "topk:0.1+int4", "hier/topk:0.05", "hier:fp16/int8@ef"]


@pytest.mark.parametrize("recipe", SERVED)
def test_a_late_device_changes_no_bit_before_servers(recipe: str) -> None:
    """Nor does a step that is not finite, which servers must take back."""
    exchange = parse_recipe(recipe)
    if isinstance(exchange, Hierarchical):
        exchange = dataclasses.replace(exchange, node_sizes=(2, 1))
    host, staged_ = (kind(exchange, 3, 2, message_nbytes=1500) for kind in (ServedWorld, StagedServedWorld))
    for step in range(4):
        grads = [gradients(rank, step) for rank in range(3)]
        if step == 2:
            grads[1]["gain"][0] = float("inf")
        assert [bits(values) for values in staged_.run(grads)] == [bits(values) for values in host.run(grads)]
        staged_.forget()
        assert staged_.residuals() == host.residuals()
    assert [(place, kept.tolist()) for place, kept in staged_.owners()] == [
        (place, kept.tolist()) for place, kept in host.owners()
    ]
    assert staged_.close() == []


@pytest.mark.parametrize("aggregator", EACH_WAY, ids=ident)
def test_nothing_waits_for_more_memory_than_two_steps_take(aggregator: Aggregator) -> None:
    world = StagedWorld(aggregator, 2, message_nbytes=1500)
    allocated: list[tuple[int, ...]] = []
    for _ in range(12):
        world.run()
        world.forget()
        for staging in world.stagings:
            staging.device.mark().synchronize()
        allocated.append(tuple(s.pinned.allocated_nbytes + s.near.allocated_nbytes for s in world.stagings))
    assert allocated[-1] == allocated[5]
    assert world.close() == []


@pytest.mark.parametrize("aggregator", EACH_WAY, ids=ident)
def test_an_event_that_is_not_waited_for_shows(aggregator: Aggregator) -> None:
    """The tests above can fail."""
    _, delivered, _ = history(aggregator, 3)
    world = StagedWorld(aggregator, 3, message_nbytes=1500, kind=HastyDevice)
    wrong = False
    for step in range(3):
        try:
            wrong = wrong or [bits(v) for v in world.run()] != [bits(v) for v in delivered[step]]
            world.forget()
        except Exception:  # poison decodes to nothing of sense
            wrong = True
    assert wrong or world.close()


# --- what the device is asked for, in order -------------------------------------------------------------------------


class Log:
    """A device that writes down what it is asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def queue(self) -> Any:
        device = self

        class Queue:
            def __enter__(self) -> None:
                device.seen.append("queue")

            def __exit__(self, *error: object) -> None:
                device.seen.append("leave")

        return Queue()

    def event(self, name: str) -> Any:
        device = self

        class Event:
            def synchronize(self) -> None:
                device.seen.append(f"wait for {name}")

            def query(self) -> bool:
                return True

        return Event()

    def mark(self) -> Any:
        self.seen.append("mark")
        return self.event("mark")


def test_rounds_come_after_their_bytes_and_the_end_is_not_waited_for() -> None:
    device, numbers = Log(), torch.zeros(1)
    reduce = AllReduce(1, torch.float32, 2)

    def exchange() -> Iterator[Transfer]:
        for i in range(2):
            device.seen.append(f"stage {i}")
            yield Transfer(reduce, numbers, numbers)
        device.seen.append("stage 2")

    run = staged(exchange(), device, device.event("arrival"))  # type: ignore[arg-type]
    for _ in run:
        device.seen.append("round")
    stage = ["queue", "{}", "mark", "leave"]
    waited = [*stage, "wait for mark", "round"]
    expected = ["wait for arrival", *waited, *waited, *stage]
    names = iter(["stage 0", "stage 1", "stage 2"])
    assert device.seen == [next(names) if one == "{}" else one for one in expected]


def test_neighbours_are_copied_as_one() -> None:
    assert joined([(8, 12), (0, 4), (4, 8), (20, 24)]) == [(0, 12), (20, 24)]
    assert joined([]) == []


def test_blocks_cross_encoded() -> None:
    """Of 4 bits a value no more than those are copied, beside headers and scales."""
    int4 = BlockQuant(bits=4)
    world = StagedWorld(TwoShot(up=int4, down=int4, feedback=ErrorFeedback()), 2)
    copied: list[int] = []
    for staging in world.stagings:
        copy = staging.device.copy

        def counting(target: torch.Tensor, source: torch.Tensor, copy: Any = copy) -> None:
            copied.append(source.nbytes)
            copy(target, source)

        staging.device.copy = counting  # type: ignore[method-assign]
    world.run()
    raw = 4 * sum(gradient.numel() for gradient in gradients(0, 0).values())
    # Each of two ranks: all of it up, its half from each of both, that half down, all of it down.
    blocks = 2 * (1 + 2 * 0.5 + 0.5 + 1) * raw / 8
    assert blocks < sum(copied) < 1.2 * blocks
    world.forget()
    assert world.close() == []
