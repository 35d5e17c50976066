"""Residuals in checkpoints: what is saved, what is refused, and what a change of world size conserves."""

import copy
import io

import pytest
import torch
from torch import Tensor

from thinwire import ErrorFeedback, Identity, OneBit, PlanOptions, TopK, TwoShot, parse_recipe, reshard_state
from thinwire.aggregators import Aggregator
from thinwire.errors import StateError
from thinwire.feedback import Slot
from thinwire.plan import build_plan
from thinwire.state import State


def model() -> dict[str, Tensor]:
    return {
        "conv.weight": torch.zeros(6, 4, 3, 3).to(memory_format=torch.channels_last),
        "linear.weight": torch.zeros(30, 20),
        "transposed": torch.zeros(12, 10).t(),
        "gaps": torch.zeros(10, 14)[:, ::2],
        "dense.bias": torch.zeros(5),
        "scalar": torch.zeros(()),
    }


def make(
    rank: int, world_size: int, recipe: str | Aggregator = "onebit", partition_numel: int = 100, seed: int | None = 0
) -> State:
    """Return a state, its residuals filled with numbers of `seed` and rank."""
    aggregator = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    options = PlanOptions(partition_numel=partition_numel, min_nbytes=0)
    params = model()
    plan = build_plan(
        params.items(), lambda info: None if info.name == "dense.bias" else aggregator, world_size, options
    )
    state = State(plan, params, rank)
    if seed is not None:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        shared = torch.Generator().manual_seed(seed)
        for slot, kept in (state.whole | state.owned).items():
            for tensor in kept.values():
                source = shared if slot.common else generator
                tensor.copy_(torch.randn(tensor.shape, generator=source))
        state.step, state.loss_scale = 7, 1024.0
        state.learning_rates = {"linear.weight": 0.1}
    return state


def flat_bits(state: State) -> list[object]:
    return [
        *(
            (slot, place, kept.numpy().tobytes())
            for slot, whole in state.whole.items()
            for place, kept in whole.items()
        ),
        *(
            (slot, place, kept.numpy().tobytes())
            for slot, owned in state.owned.items()
            for place, kept in owned.items()
        ),
        state.step,
        state.loss_scale,
        state.learning_rates,
    ]


def saved_and_loaded(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("recipe", ["onebit", "onebit@dgc", "onebit@ef21", "gather/onebit@ef21"])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_checkpoint_restores_every_bit(world_size: int, recipe: str) -> None:
    for rank in range(world_size):
        state, fresh = make(rank, world_size, recipe), make(rank, world_size, recipe, seed=None)
        assert flat_bits(state) != flat_bits(fresh)
        fresh.load_state_dict(saved_and_loaded(state.state_dict()))
        assert flat_bits(fresh) == flat_bits(state)


def test_checkpoints_have_the_same_keys_on_every_rank_from_the_start() -> None:
    dicts = [make(rank, 5, seed=None).state_dict() for rank in range(5)] + [make(3, 5).state_dict()]
    for one in dicts:
        assert list(one) == list(dicts[0])
        for kind in ("worker", "owner"):
            assert list(one[kind]) == list(dicts[0][kind]) == [name for name in model() if name != "dense.bias"]


def test_a_state_of_other_owners_is_refused_and_resharded() -> None:
    """A parameter that is frozen or added moves the owners of others, and with them the residuals they kept."""

    def state_of(names: list[str], rank: int) -> State:
        params = {name: tensor for name, tensor in model().items() if name in names}
        options = PlanOptions(partition_numel=100, min_nbytes=0)
        dense = ("dense.bias", "scalar")
        plan = build_plan(
            params.items(), lambda info: None if info.name in dense else parse_recipe("onebit"), 3, options
        )
        return State(plan, params, rank)

    without = [name for name in model() if name not in ("dense.bias", "scalar")]
    old = [state_of(without, rank) for rank in range(3)]
    new = [state_of([*without, "dense.bias", "scalar"], rank) for rank in range(3)]
    for rank, state in enumerate(old):
        for residual in (*state.worker.values(), *state.owner.values()):
            residual.fill_(1 + rank)
    assert {place for state in old for place in state.owner} == {place for state in new for place in state.owner}
    moved = [set(a.owner) != set(b.owner) for a, b in zip(old, new, strict=True)]
    assert any(moved), "the test needs owners that move"
    with pytest.raises(StateError, match=r"other owners.*reshard_state"):
        new[0].load_state_dict(old[0].state_dict())
    for rank, saved in enumerate(reshard_state([state.state_dict() for state in old], 3, partition_numel=100)):
        new[rank].load_state_dict(saved)
    for name in without:
        owed_then, owed_now = (sum(s.state_dict()["owner"][name] for s in states) for states in (old, new))
        assert torch.equal(owed_then, owed_now)


def test_a_checkpoint_shares_no_memory_with_the_state() -> None:
    state = make(0, 2)
    saved = state.state_dict()
    before = copy.deepcopy(saved)
    for residual in (*state.worker.values(), *state.owner.values()):
        residual.zero_()
    state.learning_rates["linear.weight"] = 9.0
    assert saved["learning_rates"] == {"linear.weight": 0.1}
    for kind in ("worker", "owner"):
        for name, tensor in saved[kind].items():
            assert torch.equal(tensor, before[kind][name])


def test_residuals_have_the_logical_layout_of_their_parameter() -> None:
    """State is flat in memory order, as DDP's buckets are: strides where they leave no gaps, contiguous otherwise."""
    state = make(0, 1, seed=None)
    for name, flat in state.worker.items():
        flat.copy_(torch.arange(flat.numel()))
        saved = state.state_dict()["worker"][name]
        param = model()[name]
        assert saved.shape == param.shape
        order = param.stride() if name in ("conv.weight", "transposed") else torch.empty(param.shape).stride()
        expected = torch.arange(float(param.numel())).as_strided(param.shape, order)
        assert torch.equal(saved, expected), name
    # Another run may keep the same parameter in another order: what is saved does not depend on it.
    contiguous = {name: tensor.contiguous() for name, tensor in model().items()}
    plan = build_plan(
        contiguous.items(),
        lambda info: None if info.name == "dense.bias" else parse_recipe("onebit"),
        1,
        PlanOptions(partition_numel=100, min_nbytes=0),
    )
    other = State(plan, contiguous, 0)
    other.load_state_dict(state.state_dict())
    for name, tensor in other.state_dict()["worker"].items():
        assert torch.equal(tensor, state.state_dict()["worker"][name])
    assert not torch.equal(other.worker["conv.weight"], state.worker["conv.weight"])


def test_owner_residuals_are_zero_where_others_own() -> None:
    states = [make(rank, 3) for rank in range(3)]
    for name in states[0].state_dict()["owner"]:
        held = torch.stack([state.state_dict()["owner"][name] != 0 for state in states]).sum(dim=0)
        assert (held == 1).all(), name


def test_slices_are_views_of_the_state() -> None:
    state = make(1, 2)
    partitions = [p for param in state._plan.params for p in param.partitions]
    owned = 0
    for p in partitions:
        block = state.block(p, torch.zeros(p.numel), state._plan.by_name[p.name].slots)
        residual, own = block.residual, block.owner_residual
        if p.name == "dense.bias":
            assert residual is None
            assert own is None
            continue
        assert residual is not None
        assert residual.numel() == p.numel
        residual.fill_(p.offset)
        assert (own is not None) == (p.owner == 1)
        owned += own is not None
    assert (state.worker["linear.weight"] == torch.arange(6).repeat_interleave(100) * 100).all()
    assert owned == len(state.owner) > 1


def test_memory_and_norm() -> None:
    state = make(0, 1)
    numel = sum(t.numel() for name, t in model().items() if name != "dense.bias")
    assert state.nbytes == 2 * 4 * numel
    expected = sum(float(r.double().square().sum()) for r in state.worker.values()) / 1024.0**2
    assert state.squared_norm() == pytest.approx(expected, rel=1e-5)


def without(saved: dict, key: str) -> None:
    del saved[key]


def reshaped(saved: dict, kind: str) -> None:
    saved[kind]["linear.weight"] = torch.zeros(20, 30)


def lacking(saved: dict, kind: str) -> None:
    del saved[kind]["linear.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(format=2), "format 3, got 2"),
        (lambda s: without(s, "format"), "format 3, got None"),
        (lambda s: s.update(rank=1), "saved with rank 1, this run has 0.*reshard_state"),
        (lambda s: s.update(world_size=3), "saved with world_size 3, this run has 2.*reshard_state"),
        (lambda s: s.update(partition_numel=64), "saved with partition_numel 64, this run has 100"),
        (
            lambda s: reshaped(s, "worker"),
            r"linear.weight: expected its worker residual of shape \(30, 20\), got \(20, 30\)",
        ),
        (
            lambda s: reshaped(s, "owner"),
            r"^linear.weight: expected its owner residual of shape \(30, 20\), got \(20, 30\)",
        ),
        (lambda s: lacking(s, "worker"), r"no worker residual for 'linear.weight' \(1 missing\)"),
        (lambda s: lacking(s, "owner"), r"no owner residual for 'linear.weight' \(1 missing\)"),
        (
            lambda s: s["worker"].update(other=torch.zeros(3)),
            "worker residual for 'other', which this plan sends without",
        ),
        *((lambda s, key=key: without(s, key), f"without '{key}'") for key in ("step", "loss_scale", "owner", "rank")),
        (lambda s: without(s, "learning_rates"), "without 'learning_rates'"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change, message: str) -> None:
    saved, state = make(0, 2).state_dict(), make(0, 2, seed=3)
    before = flat_bits(state)
    change(saved)
    with pytest.raises(StateError, match=message):
        state.load_state_dict(saved)
    assert flat_bits(state) == before


def owed(states: list[dict]) -> dict[str, Tensor]:
    """Return what training still owes: the mean of the workers' residuals plus the owners'."""
    return {
        name: sum(s["worker"][name].double() for s in states) / len(states) + sum(s["owner"][name] for s in states)
        for name in states[0]["worker"]
    }


def test_resharding_conserves_what_is_owed() -> None:
    """From 4 ranks to 2 to 3, with other partitions, through states that use it."""
    states = [make(rank, 4).state_dict() for rank in range(4)]
    expected = owed(states)
    for world_size, partition_numel in ((2, 100), (3, 37), (1, 1000), (5, 100)):
        resharded = reshard_state(list(reversed(states)), world_size, partition_numel=partition_numel)
        states = []
        for rank, one in enumerate(resharded):
            state = make(rank, world_size, partition_numel=partition_numel, seed=None)
            state.load_state_dict(saved_and_loaded(one))
            assert (state.step, state.loss_scale) == (7, 1024.0)
            assert state.learning_rates == {"linear.weight": 0.1}
            states.append(state.state_dict())
        for name, value in owed(states).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=2e-6)
            assert expected[name].any()


def test_a_chain_of_world_sizes_rounds_once() -> None:
    """8 -> 4 -> 6 -> 1: what is owed changes by the rounding of one mean to float32; and by nothing after that."""
    states = [make(rank, 8).state_dict() for rank in range(8)]
    before = owed(states)
    chain = [states]
    for world_size, partition_numel in ((4, 100), (6, 37), (1, 1000)):
        through = []
        for rank, one in enumerate(reshard_state(chain[-1], world_size, partition_numel=partition_numel)):
            state = make(rank, world_size, partition_numel=partition_numel, seed=None)
            state.load_state_dict(saved_and_loaded(one))
            through.append(state.state_dict())
        chain.append(through)
    for name, exact in before.items():
        mean = sum(s["worker"][name].double() for s in states) / 8
        rounded = mean.float().double() + sum(s["owner"][name].double() for s in states)
        for states_then in chain[1:]:
            assert torch.equal(owed(states_then)[name], rounded)
        assert float((rounded - exact).abs().max()) <= 2.0**-24 * float(mean.abs().max())
    # A mean that is a float32 number is kept to the bit: halves of numbers with few digits, here.
    for state in states:
        for tensor in state["worker"].values():
            tensor.copy_((tensor * 16).round() / 16)
    for name, tensor in reshard_state(states, 3)[0]["worker"].items():
        assert torch.equal(tensor.double(), sum(s["worker"][name].double() for s in states) / 8)


def test_what_was_resharded_can_be_resharded_again() -> None:
    """Without loading it in between: every state then holds what all owners owe, which counts once."""
    states = [make(rank, 4).state_dict() for rank in range(4)]
    twice = reshard_state(reshard_state(states, 3), 2)
    once = reshard_state(states, 2)
    for slot in map(str, Slot):
        for name, tensor in once[0][slot].items():
            assert torch.equal(twice[1][slot][name], tensor)


@pytest.mark.parametrize("recipe", ["onebit@dgc", "onebit@ef21", "gather/onebit@ef21", "powersgd:2"])
def test_resharding_conserves_momenta_and_estimates(recipe: str) -> None:
    """As means over ranks; what owners keep whole; and what all ranks share as it is."""
    states = [make(rank, 4, recipe).state_dict() for rank in range(4)]
    resharded = reshard_state(states, 3, partition_numel=37)
    new = []
    for rank, one in enumerate(resharded):
        state = make(rank, 3, recipe, partition_numel=37, seed=None)
        state.load_state_dict(saved_and_loaded(one))
        new.append(state.state_dict())
    kept = [slot for slot in Slot if states[0][slot]]
    assert set(kept) == parse_recipe(recipe).slots
    for slot in kept:
        for name, first in states[0][slot].items():
            old_and_new = [torch.stack([s[slot][name] for s in group]) for group in (states, new)]
            if slot.common:
                assert all(torch.equal(s[slot][name], first) for s in (*states, *new))
            elif slot.owned:
                assert torch.equal(*(group.sum(dim=0) for group in old_and_new))
            else:
                torch.testing.assert_close(*(group.mean(dim=0) for group in old_and_new), rtol=1e-6, atol=1e-6)


def test_a_state_of_other_feedback_is_refused() -> None:
    for saved, recipe, message in [
        ("onebit", "onebit@dgc", "no momentum tensor for 'conv.weight'"),
        (
            "onebit@dgc",
            "onebit",
            "has a momentum tensor for 'conv.weight', which this plan sends without such feedback",
        ),
        (
            "onebit",
            "onebit@ef21",
            "has a worker residual for 'conv.weight', which this plan sends without such feedback",
        ),
        ("onebit@ef21", "gather/onebit@ef21", "other owners"),
    ]:
        state = make(0, 2, recipe)
        before = flat_bits(state)
        with pytest.raises(StateError, match=message):
            state.load_state_dict(make(0, 2, saved).state_dict())
        assert flat_bits(state) == before


@pytest.mark.parametrize(
    ("saved", "recipe"),
    [
        ("onebit", "onebit@dgc"),
        ("onebit@dgc", "onebit"),
        ("onebit", "gather/onebit"),
        ("onebit", "onebit@ef21"),
        ("powersgd:1", "powersgd:3"),
        ("topk:0.1", "powersgd:2"),
    ],
)
def test_what_does_not_fit_starts_at_zero_if_asked_to(saved: str, recipe: str, caplog) -> None:
    """What both keep is taken over; the rest is named."""
    old = [make(rank, 2, saved).state_dict() for rank in range(2)]
    new = []
    for rank, one in enumerate(reshard_state(old, 2, partition_numel=100)):
        state = make(rank, 2, recipe, seed=3)
        with caplog.at_level("WARNING", "thinwire"):
            state.load_state_dict(one, strict=False)
        new.append(state.state_dict())
    (line,) = caplog.messages  # of rank 0
    assert "starting at zero: " in line
    assert "; dropped: " in line
    for slot in Slot:
        for name, tensor in new[0][slot].items():
            if name in old[0][slot] and slot is Slot.WORKER:
                assert torch.equal(tensor, (old[0][slot][name].double() + old[1][slot][name].double()).div(2).float())
            elif name not in old[0][slot] or tensor.shape != old[0][slot][name].shape:
                assert not tensor.any()
                assert f"{name} ({slot})" in line
    assert all(not s["worker"]["linear.weight"].isnan().any() for s in new if "linear.weight" in s["worker"])


def test_parameters_may_come_and_go_if_asked_to(caplog) -> None:
    saved = make(0, 1).state_dict()
    saved["worker"]["gone"] = saved["worker"].pop("gaps")
    saved["owner"].pop("gaps")
    saved["owners"] = None
    state = make(0, 1, seed=3)
    with caplog.at_level("WARNING", "thinwire"):
        state.load_state_dict(saved, strict=False)
    loaded = state.state_dict()
    assert not loaded["worker"]["gaps"].any()
    assert not loaded["owner"]["gaps"].any()
    assert torch.equal(loaded["worker"]["linear.weight"], saved["worker"]["linear.weight"])
    (line,) = caplog.messages
    assert "starting at zero: gaps (worker), gaps (owner)" in line or "gaps (owner), gaps (worker)" in line
    assert "dropped: gone (worker)" in line


def test_resharded_states_share_no_memory() -> None:
    first, second = reshard_state([make(0, 1).state_dict()], 2)
    first["worker"]["linear.weight"].zero_()
    assert second["worker"]["linear.weight"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(), r"ranks 0\.\.2, got ranks \[0, 1\]"),
        (lambda s: s.append(s[0]), r"ranks 0\.\.2, got ranks \[0, 0, 1, 2\]"),
        (lambda s: s[1].update(step=8), "rank 1 has step 8, rank 0 has 7"),
        (lambda s: s[2].update(loss_scale=1.0), r"rank 2 has loss_scale 1\.0, rank 0 has 1024\.0"),
        (lambda s: lacking(s[1], "worker"), "rank 1 and rank 0 do not both have a worker tensor for 'linear.weight'"),
        (lambda s: without(s[1], "worker"), "without 'worker'"),
        (lambda s: s.clear(), "got 0, 2"),
    ],
)
def test_resharding_refuses_what_is_not_one_moment(change, message: str) -> None:
    states = [make(rank, 3).state_dict() for rank in range(3)]
    change(states)
    with pytest.raises(StateError, match=message):
        reshard_state(states, 2)


def test_exact_sides_are_not_saved() -> None:
    up_only = TwoShot(up=TopK(density=0.1), down=Identity(), feedback=ErrorFeedback())
    saved = make(0, 2, up_only).state_dict()
    assert saved["worker"]
    assert not saved["owner"]
    down_only = TwoShot(up=Identity(), down=OneBit(), feedback=ErrorFeedback())
    saved = make(0, 2, down_only).state_dict()
    assert not saved["worker"]
    assert saved["owner"]
    assert make(0, 2, "int8").nbytes == 0
