"""Profiles measured on real ranks: equal everywhere, usable, and an error in time where a rank is missing."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rank_pool import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.advisor.probe import plan_for, profile
from thinwire.advisor.profile import Profile, read_profile, write_profile
from thinwire.errors import ThinwireError

QUICK = {"recipes": ("int8", "powersgd:2"), "steps": 2, "target": 0.002, "timeout": 20.0}


def _training(*, wrapped: bool) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(dist.get_rank())
    model: nn.Module = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    if wrapped:
        model = DistributedDataParallel(model)

    def step() -> None:
        model.zero_grad()
        model(torch.randn(4, 256)).square().mean().backward()

    return model, step


def _profile(rank: int, world_size: int) -> Profile:
    model, step = _training(wrapped=True)
    return profile(model, step, name="two layers", **QUICK)  # type: ignore[arg-type]


def test_all_ranks_have_one_profile_that_plans_can_be_made_from(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    first, *others = ranks(3).run(_profile)
    assert all(other == first for other in others)
    write_profile(first, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == first
    cluster = first.cluster
    assert (cluster.hosts, cluster.ranks_per_host, cluster.interface) == (1, 3, "lo")
    assert [fit.operation for fit in cluster.collectives] == ["all_reduce", "all_to_all", "all_gather"]
    assert first.kernels.speed("int8", "encode_feedback") or first.kernels.speed("int8", "encode")
    assert first.kernels.speed("identity", "decode") is not None
    assert first.kernels.speed("powersgd:2", "exchange") is not None
    assert [parameter.name for parameter in first.computation.parameters] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    plan = plan_for(first.computation, cluster, "int8")
    assert plan is not None
    assert plan.world_size == 3
    assert not plan.by_name["0.weight"].reason


def _one_stays_away(rank: int, world_size: int) -> tuple[float, str]:
    started = time.monotonic()
    if rank == 1:
        time.sleep(6.0)  # alive, and does something else
        return 0.0, ""
    model, step = _training(wrapped=False)
    try:
        profile(model, step, **{**QUICK, "timeout": 2.0})  # type: ignore[arg-type]
    except ThinwireError as error:
        return time.monotonic() - started, str(error)
    return 0.0, "nothing was raised"


def test_a_rank_that_does_not_come_is_an_error_in_time(ranks: Callable[[int], Ranks]) -> None:
    (seconds, said), _ = ranks(2).run(_one_stays_away, timeout=30.0)
    assert "rank 1" in said
    assert "2 s" in said
    assert seconds < 15


def _one_has_another_model(rank: int, world_size: int) -> str:
    model = nn.Linear(8, 8 + rank)

    def step() -> None:
        model(torch.ones(1, 8)).sum().backward()

    try:
        profile(model, step, **QUICK)  # type: ignore[arg-type]
    except ThinwireError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_with_other_models_are_named_on_all_ranks(ranks: Callable[[int], Ranks]) -> None:
    said = ranks(2).run(_one_has_another_model)
    assert said == ["expected the same model on all ranks, got other parameters on rank 1"] * 2


def _one_has_no_backward(rank: int, world_size: int) -> str:
    model, step = _training(wrapped=False)
    try:
        profile(model, step if rank == 0 else lambda: None, **QUICK)  # type: ignore[arg-type]
    except ThinwireError as error:
        return str(error)
    return "nothing was raised"


def test_what_one_rank_cannot_measure_all_raise(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(2).run(_one_has_no_backward, timeout=60.0):
        assert said.startswith("rank 1: expected step() to run a backward pass")
