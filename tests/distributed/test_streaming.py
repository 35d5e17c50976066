"""Streaming DiLoCo against a reference computed apart; its exchange really runs while training goes on."""

import pytest
import torch
import torch.distributed as dist
from training import ALL, Tower, batch, digest, loss, seeded

import thinwire

WIDTH = 24
FRAGMENTS = [["layers.0.*", "layers.2.*"], "layers.1.*"]
# Period 5 in two fragments: (step, fragment) by hand. 2 does not divide 5.
BEGINS = {3: 0, 5: 1, 8: 0, 10: 1, 13: 0}
STEPS = 14


def _model():
    return seeded(Tower, WIDTH, 3)


def _inner(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def _step(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss(model, batch(rank, step, width=WIDTH)).backward()
    optimizer.step()


def _fragment(name):
    return 1 if name.startswith("layers.1.") else 0


def _reference(world_size, overlap, alpha, lr=0.4, momentum=0.9):
    """Train all ranks in turn; outer steps in float64. Return the models of all ranks, and theta, after every step."""
    models = [_model() for _ in range(world_size)]
    inner = [_inner(model) for model in models]
    params = [dict(model.named_parameters()) for model in models]
    theta = {name: p.detach().double().clone() for name, p in params[0].items()}
    velocity = {name: torch.zeros_like(t) for name, t in theta.items()}
    flying = {}
    seen = []

    def end(step):
        for name, difference in flying.pop(step, {}).items():
            velocity[name] = momentum * velocity[name] + difference
            theta[name] = theta[name] - lr * (difference + momentum * velocity[name])
            for mine in params:
                mine[name].data.copy_(alpha * mine[name].detach().double() + (1 - alpha) * theta[name])

    for step in range(1, STEPS + 1):
        for rank in range(world_size):
            _step(models[rank], inner[rank], rank, step)
        if overlap:
            end(step)
        if step in BEGINS:
            flying[step + overlap] = {
                name: sum(t - mine[name].detach().double() for mine in params) / world_size
                for name, t in theta.items()
                if _fragment(name) == BEGINS[step]
            }
        if not overlap:
            end(step)
        copies = [{name: p.detach().double().clone() for name, p in mine.items()} for mine in params]
        seen.append((copies, dict(theta)))
    return seen


def _as_reference(rank, world_size, overlap, alpha):
    expected = _reference(world_size, overlap, alpha)
    model = _model()
    inner = _inner(model)
    outer = thinwire.StreamingDiLoCo(
        model, inner, sync_every=5, fragments=FRAGMENTS, overlap=overlap, merge_alpha=alpha
    )
    for step, (models, theta) in enumerate(expected, start=1):
        _step(model, inner, rank, step)
        for name, p in model.named_parameters():
            assert (p.detach().double() - models[rank][name]).abs().max() < 2e-5, (step, name)
        ours = outer._theta
        assert all((ours[name].double() - t).abs().max() < 2e-5 for name, t in theta.items()), step
        everyone = [None] * world_size
        dist.all_gather_object(everyone, digest(ours.values()))
        assert len(set(everyone)) == 1
    own = digest(model.parameters())
    with outer.averaged():
        inside = digest(model.parameters())
        assert inside == digest(ours.values())
    assert digest(model.parameters()) == own
    outer.sync()
    assert digest(model.parameters()) == digest(outer._theta.values()) != inside
    synced = digest(model.parameters())
    outer.sync()  # nothing has changed since
    assert digest(model.parameters()) == synced
    outer.close()
    return synced


@pytest.mark.parametrize(("world_size", "overlap", "alpha"), [(1, 2, 0.5), (3, 2, 0.5), (2, 4, 0.0), (2, 0, 0.3)])
def test_fragments_come_in_their_turn_and_merge_later(ranks, world_size, overlap, alpha):
    assert len(set(ranks(world_size).run(_as_reference, overlap, alpha))) == 1


def _handshake(rank, world_size, recipe):
    """Rank 1 takes the step that begins an exchange only once rank 0 is three steps further: no one may wait."""
    model = _model()
    inner = _inner(model)
    outer = thinwire.StreamingDiLoCo(
        model, inner, recipe, sync_every=8, fragments=2, overlap=4, merge_alpha=0.5, options=ALL
    )
    word = torch.zeros(1)
    for step in range(1, 17):
        if step % 4 == 0 and rank == 1:  # fragments begin at 4, 8, 12, ...
            dist.recv(word, 0)
        _step(model, inner, rank, step)
        if step % 4 == 3 and step > 3 and rank == 0:
            dist.send(word, 1)
    if rank == 0:
        dist.send(word, 1)
    return digest(outer.state_dict()["theta"].values())


def test_training_goes_on_while_fragments_travel(ranks):
    """A method that waited would stand still for ever: rank 0 for rank 1's exchange, rank 1 for rank 0's word."""
    assert len(set(ranks(2).run(_handshake, "int4", timeout=30))) == 1


def _in_order(rank, world_size, recipe):
    """Fragments under way at the same time, ranks out of step, every kind of exchange: equal copies all the same."""
    model = _model()
    inner = _inner(model)
    outer = thinwire.StreamingDiLoCo(model, inner, recipe, sync_every=7, fragments=4, overlap=6, options=ALL)
    for step in range(1, 30):
        _step(model, inner, rank, step)
    theta = digest(outer.state_dict()["theta"].values())
    stats = outer.stats()
    assert stats["exchanges"] * stats["wire_nbytes"] > 0
    outer.close()  # with exchanges under way
    return theta


@pytest.mark.parametrize("recipe", ["e3m0", "gather/e3m0", "topk:0.1:chunked~int2"])
def test_several_fragments_are_under_way_at_once(ranks, recipe):
    assert len(set(ranks(3).run(_in_order, recipe))) == 1


def _by_turns(rank, world_size, recipe, fragments):
    """Coordinates that have never been sent after each fragment has been exchanged twice."""
    model = seeded(Tower, WIDTH, 4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = thinwire.StreamingDiLoCo(
        model, inner, recipe, sync_every=fragments, fragments=fragments, overlap=0, merge_alpha=0.0, options=ALL
    )
    for _ in range(2 * fragments):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        inner.step()
    unsent = sum(int((p == before[name]).sum()) for name, p in model.named_parameters() if p.dim() > 1)
    outer.close()
    return unsent


@pytest.mark.parametrize("fragments", [1, 2])
def test_turns_go_by_a_fragments_own_exchanges(ranks, fragments):
    """Where every other exchange is a fragment's, a count of all would show it odd numbers only."""
    assert ranks(2).run(_by_turns, "randomk:0.5:rotating", fragments) == [0, 0]
