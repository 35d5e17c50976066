"""What measuring a plan's kernels goes through: every exchange, alone and beside PowerSGD."""

from typing import Any

import pytest
import torch

from thinwire import Hierarchical, PlanOptions, codec, parse_recipe
from thinwire.aggregators import Partition
from thinwire.codec import measure_codec
from thinwire.plan import build_plan

PARAMS = [("a.weight", torch.empty(96, 64)), ("b.weight", torch.empty(64, 80)), ("b.bias", torch.empty(80))]
RECIPES = ["int8", "topk:0.1", "gather/onebit", "sign", "global:8", "global:8:halving", "hier/int8", "powersgd:2"]


@pytest.mark.parametrize("beside", [None, "powersgd:2", "powersgd:2:alternating"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_exchange_can_be_measured(recipe: str, beside: str | None) -> None:
    nodes = (2, 2) if isinstance(parse_recipe(recipe), Hierarchical) else None
    policy = recipe if beside is None else {"a.*": beside, "*": recipe}
    plan = build_plan(PARAMS, policy, 4, PlanOptions(min_nbytes=0, node_sizes=nodes))
    assert measure_codec(plan, 1, repeats=1) > 0


def test_what_powersgd_does_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan(PARAMS, {"a.*": "powersgd:2", "*": "int8"}, 4, PlanOptions(min_nbytes=0))
    seen, one = list[str](), codec._Block

    def block(partition: Partition, *args: Any) -> Any:
        seen.append(partition.name)
        return one(partition, *args)

    monkeypatch.setattr(codec, "_Block", block)
    measure_codec(plan, 1, repeats=1)
    assert set(seen) == {"b.weight"}  # the bias rides with PowerSGD's factors, whose exchange is run whole


def test_servers_do_their_own_work_elsewhere() -> None:
    assert measure_codec(build_plan(PARAMS, "int8", 4, PlanOptions(min_nbytes=0, num_servers=2)), 1, repeats=1) > 0
