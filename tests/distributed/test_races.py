"""Order: random delays in every thread that could reorder anything leave every bit as it was."""

import dataclasses
import random
import time

import pytest
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Tower, attached, batch, digest, gradients, loss, seeded, train

from thinwire.aggregators import Message
from thinwire.comm import process_group


def _delayed(rank, world_size, recipe, steps, slow):
    dice = random.Random(1000 + rank)
    plain = {"encode": Message.encode, "decode": Message.decode, "perform": process_group.perform}

    def late(function):
        def run(*args, **kwargs):
            if slow and dice.random() < 0.3:
                time.sleep(dice.random() * 0.01)
            return function(*args, **kwargs)

        return run

    Message.encode, Message.decode = late(plain["encode"]), late(plain["decode"])
    process_group.perform = late(plain["perform"])
    try:
        model = DDP(seeded(Tower), bucket_cap_mb=0.01)
        options = dataclasses.replace(ALL, message_nbytes=1 if slow else 1 << 20)
        with attached(model, recipe, options=options, workers=4 if slow else 1) as link:
            bits = train(model, rank, range(steps))
            return bits, link.stats()["num_collectives"]
    finally:
        Message.encode, Message.decode = plain["encode"], plain["decode"]
        process_group.perform = plain["perform"]


def _both(rank, world_size, recipe, steps):
    return [_delayed(rank, world_size, recipe, steps, slow) for slow in (False, True)]


@pytest.mark.parametrize("recipe", ["int8:stochastic", "topk:0.05", "gather/onebit"])
def test_delays_change_nothing(ranks, recipe):
    results = ranks(3).run(_both, recipe, 8)
    calm, delayed = results[0]
    assert calm[0] == delayed[0]
    assert delayed[1] > 2 * calm[1]  # many small messages
    assert results == [results[0]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["onebit", "int4"])
def test_delays_change_nothing_in_a_long_run(ranks, recipe):
    results = ranks(4).run(_both, recipe, 30, timeout=110)
    assert results[0][0][0] == results[0][1][0]
    assert results == [results[0]] * 4


def _interleaved(rank, world_size, steps):
    """Two models in one backward pass, their messages mixed in any order, each rank with delays of its own."""
    dice = random.Random(rank)
    first, second = (
        DDP(seeded(Tower, 24, 4), bucket_cap_mb=0.002),
        DDP(seeded(Tower, 24, 4, seed=1), bucket_cap_mb=0.002),
    )
    options = dataclasses.replace(ALL, message_nbytes=1)
    plain = Message.encode

    def late(*args, **kwargs):
        time.sleep(dice.random() * 0.003)
        return plain(*args, **kwargs)

    Message.encode = late
    try:
        with attached(first, "topk:0.1", options=options, workers=2), attached(second, "int4", options=options):
            for step in range(steps):
                first.zero_grad()
                second.zero_grad()
                x = batch(rank, step, width=24)
                (loss(first, x) + loss(second, x)).backward()
            return digest(gradients(first)), digest(gradients(second))
    finally:
        Message.encode = plain


def test_two_models_interleaved_with_delays(ranks):
    results = ranks(3).run(_interleaved, 4)
    assert results == [results[0]] * 3
