"""The blocking driver: the rounds of one exchange, in the calling thread, over real gloo ranks."""

import pytest
import torch
import torch.distributed as dist

from thinwire.comm.process_group import run_blocking
from thinwire.comm.rounds import AllGather, AllToAll, Transfer
from thinwire.errors import ScheduleError


def _schedule(world_size):
    return AllToAll(tuple(range(1, world_size + 1))), AllGather((2,) * world_size)


def _exchange(rank, world_size, received, rounds):
    """Send owner r r + 1 bytes that say who sends; then everybody two bytes, the sum of those that came."""
    for which in rounds:
        if isinstance(which, AllToAll):
            send = torch.full((sum(which.nbytes),), rank, dtype=torch.uint8)
            receive = torch.zeros(world_size * which.nbytes[rank], dtype=torch.uint8)
        else:
            send = received[-1].sum(dtype=torch.uint8).repeat(2)
            receive = torch.zeros(sum(which.nbytes), dtype=torch.uint8)
        yield Transfer(which, send, receive)
        received.append(receive)


def _run(rank, world_size):
    schedule, received = _schedule(world_size), []
    outcome = run_blocking(_exchange(rank, world_size, received, schedule), schedule, dist.group.WORLD)
    assert outcome.num_collectives == 2
    assert outcome.sent_nbytes == sum(which.sent_nbytes(rank) for which in schedule)
    return [block.tolist() for block in received]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rounds_of_one_exchange(ranks, world_size):
    ids = sum(range(world_size))
    for rank, (to_me, from_all) in enumerate(ranks(world_size).run(_run)):
        assert to_me == [source for source in range(world_size) for _ in range(rank + 1)]
        assert from_all == [ids * (owner + 1) for owner in range(world_size) for _ in range(2)]


def _run_other(rank, world_size, rounds):
    schedule = _schedule(world_size)
    exchange = _exchange(rank, world_size, [], schedule[:rounds])
    with pytest.raises(ScheduleError):
        run_blocking(exchange, schedule[: 3 - rounds], dist.group.WORLD)


@pytest.mark.parametrize("rounds", [1, 2])
def test_too_few_and_too_many_rounds_are_errors(ranks, rounds):
    ranks(2).run(_run_other, rounds)
