"""When exchanges begin and end, the outer optimizer beside torch's, and how models are cut."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.algorithms import OuterSGD, Rhythm
from thinwire.algorithms.tracked import cut, track
from thinwire.errors import AttachError


def test_a_period_of_four_is_at_four_and_eight():
    rhythm = Rhythm(sync_every=4)
    assert [t for t in range(1, 13) if rhythm.begins(t)] == [4, 8, 12]
    assert [t for t in range(1, 20) if Rhythm(sync_every=4, start_after=5).begins(t)] == [9, 13, 17]


@given(st.integers(1, 40), st.data())
def test_every_fragment_begins_once_a_period_and_ends_before_it_begins_again(sync_every, data):
    num = data.draw(st.integers(1, sync_every))
    overlap = data.draw(st.integers(0, sync_every - 1))
    rhythm = Rhythm(sync_every=sync_every, num_fragments=num, overlap=overlap)
    for start in (1, 2, sync_every):
        period = [p for t in range(start + sync_every, start + 2 * sync_every) for p in rhythm.begins(t)]
        assert sorted(period) == list(range(num))
    assert all(len(rhythm.begins(t)) <= 1 for t in range(1, 3 * sync_every))
    gaps = [rhythm.offset(p + 1) - rhythm.offset(p) for p in range(num - 1)]
    assert all(sync_every // num <= gap <= -(-sync_every // num) for gap in gaps)
    under_way = set()
    for t in range(1, 4 * sync_every):
        if overlap:
            under_way -= set(rhythm.ends(t))
        assert not under_way & set(rhythm.begins(t))
        under_way |= set(rhythm.begins(t))
        assert rhythm.under_way(t) == (overlap > 0 and bool(under_way))
        if not overlap:
            under_way -= set(rhythm.ends(t))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("sync_every", 0), ("num_fragments", 11), ("num_fragments", 0)),
        *(("overlap", 10), ("overlap", -1), ("start_after", -1)),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(AttachError, match=name.removeprefix("num_")):
        Rhythm(**{"sync_every": 10, name: value})


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_outer_optimizer_is_torchs_sgd(momentum, nesterov):
    theta = torch.randn(50, generator=torch.Generator().manual_seed(0))
    param = nn.Parameter(theta.clone())
    theirs = torch.optim.SGD([param], lr=0.7, momentum=momentum, nesterov=nesterov)
    velocity = torch.zeros(50) if momentum else None
    rule = OuterSGD(lr=0.7, momentum=momentum, nesterov=nesterov)
    for step in range(5):
        difference = torch.randn(50, generator=torch.Generator().manual_seed(step))
        param.grad = difference.clone()
        theirs.step()
        rule.step(theta, difference, velocity)
    assert torch.allclose(theta, param, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"lr": float("inf")}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_outer_settings_out_of_range_are_named(wrong):
    with pytest.raises(AttachError, match=f"outer_{next(iter(wrong))}"):
        OuterSGD(**wrong)


# --- what is kept equal, and fragments ------------------------------------------------------------------------------


def _model():
    return nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Linear(30, 3), nn.Linear(3, 3, bias=False))


def test_all_groups_and_buffers_are_found_and_frozen_parameters_are_not():
    model = _model()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 1}], 0.1)
    found = track(model, [optimizer], buffers=True)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "2.bias", "3.weight"]
    assert [one.name for one in found] == names
    assert [one.trained for one in found] == ["running" not in name for name in names]
    model[1].running_mean = torch.ones(30)  # modules may replace their buffers
    assert bool(found[4].local().all())
    assert [one.name for one in track(model, [optimizer], buffers=False)] == [n for n in names if "running" not in n]


def test_shared_tensors_count_once():
    model = _model()
    model[3].weight = nn.Parameter(torch.zeros(3, 3))
    model.append(nn.Linear(3, 3))
    model[4].weight = model[3].weight
    found = track(model, [torch.optim.SGD(model.parameters(), 0.1)], buffers=True)
    assert [one.name for one in found].count("3.weight") == 1
    assert "4.weight" not in [one.name for one in found]


def test_optimizers_of_other_models_and_other_dtypes_are_refused():
    model = _model()
    with pytest.raises(AttachError, match="7 of its parameters are not the model's"):
        track(model, [torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1)], buffers=True)
    double = _model().double()
    with pytest.raises(AttachError, match=r"0\.weight: expected float32"):
        track(double, [torch.optim.SGD(double.parameters(), 0.1)], buffers=True)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.data())
def test_runs_hold_everything_once_in_order_and_none_is_empty(sizes, data):
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
    found = track(model, [torch.optim.SGD(model.parameters(), 0.1)], buffers=True)
    num = data.draw(st.integers(1, len(sizes)))
    parts = cut(found, num)
    assert len(parts) == num
    assert all(parts)
    assert [one for part in parts for one in part] == found


def test_runs_are_of_about_equal_bytes():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    found = track(model, [torch.optim.SGD(model.parameters(), 0.1)], buffers=True)
    numels = [sum(one.local().numel() for one in part) for part in cut(found, 4)]
    assert max(numels) - min(numels) <= 2 * 256


def test_patterns_choose_fragments_and_say_what_they_leave():
    model = _model()
    found = track(model, [torch.optim.SGD(model.parameters(), 0.1)], buffers=True)
    first, second = cut(found, [["0.*", "3.*"], "*"])
    assert [one.name for one in first] == ["0.weight", "0.bias", "3.weight"]
    assert [one.name for one in second][:4] == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    with pytest.raises(AttachError, match=r"no pattern matches '3\.weight'"):
        cut(found, ["0.*", ["1.*", "2.*"]])
    with pytest.raises(AttachError, match=r"\['0\.weight'\] chooses no parameter"):
        cut(found, ["*", "0.weight"])
    with pytest.raises(AttachError, match="expected 1 to 7"):
        cut(found, 8)
    with pytest.raises(AttachError, match="patterns for each fragment"):
        cut(found, "0.*")
