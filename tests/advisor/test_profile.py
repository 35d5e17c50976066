"""Profiles: what is written is read, and what cannot be is refused by name."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profiles import small_profile

from thinwire.advisor.profile import Overhead, read_profile, write_profile
from thinwire.errors import ProfileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def test_reading_gives_what_was_written(path: Path) -> None:
    write_profile(small_profile(), path)
    assert read_profile(path) == small_profile()
    assert json.loads(path.read_text())["schema"] == 2


def test_a_profile_of_before_there_were_fixed_costs_says_what_it_lacks(path: Path) -> None:
    profile = dataclasses.replace(small_profile(), overhead=Overhead())
    write_profile(profile, path)
    values = json.loads(path.read_text())
    del values["overhead"]
    path.write_text(json.dumps({**values, "schema": 1}))
    read = read_profile(path)
    assert read.assumptions[-1].startswith("messages and buckets cost nothing by themselves")
    assert dataclasses.replace(read, assumptions=profile.assumptions) == profile


def _set(*keys: str | int, to: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = to

    return change


def _delete(*keys: str | int) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        del values[keys[-1]]

    return change


BAD = {
    "negative rate": (_set("cluster", "between", "beta", to=-1.0), "cluster.between: beta: expected a number above 0"),
    "rate of 0": (_set("cluster", "between", "beta", to=0), "cluster.between: beta: expected a number above 0"),
    "a unit": (_set("cluster", "between", "beta", to="10gbit"), "beta: expected a number, got '10gbit'; units are"),
    "not finite": (_set("computation", "forward_s", to=float("nan")), "forward_s: expected a number of 0 or more"),
    "missing": (_delete("computation", "backward_s"), "computation.backward_s: expected this field, got none"),
    "missing below": (_delete("cluster", "exceptions", 0, "beta"), "cluster.exceptions[0].beta: expected this field"),
    "unknown": (_set("cluster", "nodes", to=2), "cluster.nodes: no such field; expected hosts, ranks_per_host"),
    "schema": (_set("schema", to=3), "schema: expected 2, got 3"),
    "no schema": (_delete("schema"), "schema: expected 2, got None"),
    "time gained": (_set("overhead", "message_s", to=-1e-3), "overhead: message_s: expected a number of 0 or more"),
    "null": (_set("kernels", to=None), "kernels: expected an object, got null"),
    "list": (_set("cluster", "collectives", to={}), "cluster.collectives: expected a list, got an object"),
    "operation": (
        _set("cluster", "collectives", 0, "operation", to="gossip"),
        "one of all_reduce, all_gather",
    ),
    "half a host": (_set("cluster", "hosts", to=2.5), "cluster.hosts: expected a whole number, got 2.5"),
    "no hosts": (_set("cluster", "hosts", to=0), "cluster: hosts: expected a number above 0, got 0"),
    "true": (_set("cluster", "hosts", to=True), "cluster.hosts: expected a whole number, got True"),
    "no link inside": (_set("cluster", "inside", to=None), "cluster: inside: expected a link between the 2 ranks"),
    "no such pair": (_set("cluster", "exceptions", 0, "target", to=7), "expected two of hosts 0 to 1, got 0 to 7"),
    "no parameters": (_set("computation", "parameters", to=[]), "parameters: expected at least one, got none"),
    "named twice": (_set("computation", "parameters", 0, "name", to="out.weight"), "got 'out.weight' 2 times"),
    "too late": (_set("computation", "parameters", 0, "ready_s", to=9), "backward_s = 0.2, got 'in.weight' after 9"),
    "dtype": (_set("computation", "parameters", 0, "dtype", to="float31"), "such as float32, got 'float31'"),
    "shape": (_set("computation", "parameters", 0, "shape", to=[-1]), "sizes of 0 or more, got [-1]"),
    "point": (_set("cluster", "collectives", 0, "points", 0, to=[1.0]), "points[0]: expected a list of 2, got 1"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_value_that_cannot_be_is_refused_by_name(path: Path, change: Callable[[Any], None], message: str) -> None:
    write_profile(small_profile(), path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(("text", "message"), [("{", "expected JSON"), ("[]", "a JSON object, got a list")])
def test_a_file_that_is_no_profile_is_refused(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(ProfileError, match=rf"cannot read {re.escape(str(path))}: No such file"):
        read_profile(path)
    with pytest.raises(ProfileError, match="cannot write"):
        write_profile(small_profile(), path / "below")


def test_a_profile_of_another_model_is_refused() -> None:
    profile = small_profile()
    shapes = {parameter.name: parameter.shape for parameter in profile.computation.parameters}
    profile.check_model(shapes)
    with pytest.raises(ProfileError, match=r"another model \(a small model\): out.weight has shape \[10, 512\] there"):
        profile.check_model({**shapes, "out.weight": (11, 512)})
    with pytest.raises(ProfileError, match=r"head.weight has no such parameter there and shape \[3\] here"):
        profile.check_model({**shapes, "head.weight": (3,)})
    with pytest.raises(ProfileError, match=r"out.weight has shape .* there and no such parameter here"):
        profile.check_model({"in.weight": (512, 300)})
