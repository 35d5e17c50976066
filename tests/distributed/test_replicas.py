"""`attach(check_replicas_every=N)`: ranks that hold other parameters are found, and named on all ranks."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Tower, attached, batch, loss, seeded

import thinwire
from thinwire.comm import process_group
from thinwire.errors import PlanError, ReplicaError
from thinwire.integrations import replicas
from thinwire.integrations.replicas import Difference, digests, first_difference

EVERY = 3


def _step(model, rank, step):
    model.zero_grad()
    loss(model, batch(rank, step)).backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.05 * param.grad


def _perturbed(rank, world_size, victim, name):
    """Flip the lowest bit of one value on one rank after step 3; return at which step and how it is found."""
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    model.module.layers[1].requires_grad_(name != "layers.1.weight")  # a frozen one is compared, too
    model = DDP(model.module, bucket_cap_mb=0.01)
    with attached(model, "int8", check_replicas_every=EVERY) as link:
        for step in range(10):
            if step == 4 and rank == victim:
                with torch.no_grad():
                    dict(model.module.named_parameters())[name].view(torch.int32).view(-1)[5] ^= 1
            try:
                _step(model, rank, step)
            except ReplicaError as error:
                return step, str(error), link.state_dict()["step"], link.error is error
        return None


@pytest.mark.parametrize(("victim", "name"), [(1, "layers.2.bias"), (2, "layers.1.weight"), (0, "layers.4.weight")])
def test_a_flipped_bit_is_found_at_the_next_check(ranks, victim, name):
    others = ", ".join(str(rank) for rank in range(3) if rank != victim)
    for step, message, saved_step, kept in ranks(3).run(_perturbed, victim, name):
        assert kept
        assert step == saved_step == 6  # the first multiple of EVERY after it
        assert (
            f"before step 6 ranks hold different parameters: expected the same bits everywhere, got {name!r}" in message
        )
        assert f"(rank {others} has one value; rank {victim} another)" in message


def _started_apart(rank, world_size):
    model = DDP(seeded(Tower, seed=rank), init_sync=False)
    with attached(model, "int8", check_replicas_every=100), pytest.raises(ReplicaError) as raised:
        _step(model, rank, 0)
    return str(raised.value)


def test_ranks_that_start_from_other_weights(ranks):
    for message in ranks(2).run(_started_apart):
        assert "'layers.0.weight' (rank 0 has one value; rank 1 another), and 9 more parameters" in message


def _counted(rank, world_size, every):
    """Return how often ranks gathered text in eight steps without a difference."""
    calls = []

    def counting(text, group):
        calls.append(len(text))
        return process_group.all_gather_text(text, group)

    model = DDP(seeded(Tower))
    with pytest.MonkeyPatch.context() as patch, attached(model, "int4", check_replicas_every=every):
        patch.setattr(replicas, "all_gather_text", counting)
        for step in range(8):
            _step(model, rank, step)
    return calls


@pytest.mark.parametrize(("every", "steps"), [(0, 0), (1, 8), (EVERY, 3)])
def test_other_steps_cost_no_collective(ranks, every, steps):
    assert ranks(2).run(_counted, every) == [[64] * steps] * 2


def _joined(rank, world_size, victim):
    """Train with fewer batches on rank 0; return at which step a flipped bit of `victim` is found, and the message."""
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with attached(model, "int8", check_replicas_every=1) as link:
        try:
            with model.join():
                for step in range(2 + 2 * (rank > 0)):
                    if rank == victim and step == 3:
                        with torch.no_grad():
                            model.module.layers[0].bias.view(torch.int32)[0] ^= 1
                    _step(model, rank, step)
        except ReplicaError as error:
            return link.state.step, str(error)
        return link.state.step, digests(model.parameters())


def test_a_rank_that_has_joined_is_left_out(ranks):
    results = ranks(3).run(_joined, None)
    assert results == [results[0]] * 3
    assert results[0][0] == 4
    for step, message in ranks(3).run(_joined, 2):
        assert step == 3
        assert "'layers.0.bias' (rank 1 has one value; rank 2 another)" in message


def _another_interval(rank, world_size):
    with pytest.raises(PlanError) as raised:
        thinwire.attach(DDP(seeded(Tower)), "int8", check_replicas_every=rank)
    return str(raised.value)


def test_intervals_must_agree(ranks):
    for message in ranks(2).run(_another_interval):
        assert "check_replicas_every=0" in message
        assert "check_replicas_every=1" in message


def test_digests_see_values_whatever_their_strides():
    weight = torch.randn(2, 3, 4, 4)
    odd = [
        torch.zeros(0, 7),
        torch.tensor(1.5),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
    ]
    assert digests([weight]) == digests([weight.to(memory_format=torch.channels_last)])
    assert len(set(digests([*odd, weight, -weight]))) == len(odd) + 2
    assert digests([torch.tensor([0.0])]) != digests([torch.tensor([-0.0])])


def test_the_first_difference_and_who_holds_what():
    assert first_difference(["a", "b"], {rank: ["x", "y"] for rank in range(3)}) is None
    held = {0: ["x", "1", "1"], 1: ["x", "2", "2"], 2: ["x", "3", "1"], 3: ["x", "2", "1"]}
    found = first_difference(["a", "b", "c"], held)
    assert found == Difference("b", ((1, 3), (0,), (2,)), 2)
    assert str(found) == "'b' (rank 1, 3 has one value; rank 0 another; rank 2 another), and 1 more parameters"
