"""Lanes find each other whatever other process groups a program has, had, or will have."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Tower, attached, seeded, train


def _again_and_again(rank, world_size):
    seen = []
    for _ in range(4):
        model = DDP(seeded(Tower, 16, 2))
        with attached(model, "int8"):
            seen.append(train(model, rank, range(2), width=16))
    return seen


def test_attach_after_close(ranks):
    results = ranks(2).run(_again_and_again)
    assert results[0] == results[1]
    assert len(set(results[0])) == 1


def _unequal_memberships(rank, world_size):
    dist.new_group([0, 1])  # ranks 0 and 1 now know one group more than rank 2
    model = DDP(seeded(Tower, 16, 2))
    with attached(model, "int8"):
        return train(model, rank, range(2), width=16)


def test_ranks_of_different_numbers_of_groups(ranks):
    assert len(set(ranks(3).run(_unequal_memberships, timeout=30))) == 1


def _two_halves(rank, world_size):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DDP(seeded(Tower, 16, 2), process_group=halves[rank // 2])
    with attached(model, "topk:0.1") as link:
        assert link.plan.world_size == 2
        mine = train(model, rank, range(3), width=16)
    total = torch.ones(1)
    dist.all_reduce(total)
    return mine, float(total)


def test_models_over_parts_of_the_world(ranks):
    results = ranks(4).run(_two_halves)
    assert results[0] == results[1] != results[2] == results[3]
    assert all(total == 4 for _, total in results)


def _destroyed_first(rank, world_size):
    model = DDP(seeded(Tower, 16, 2))
    with attached(model, "int8") as link:
        train(model, rank, range(2), width=16)
        dist.barrier()
        dist.destroy_process_group()
    link.close()


def test_close_after_the_default_group_is_gone_and_twice(ranks):
    ranks(2).run(_destroyed_first)
