"""What servers owe in a link's state, with servers that are a dictionary."""

import logging

import pytest
import torch

from thinwire import PlanOptions
from thinwire.aggregators import MEAN, Message
from thinwire.errors import StateError
from thinwire.integrations.served import OwedByServers
from thinwire.phases import build_phases
from thinwire.state import State

PARAMS = {"a": torch.empty(30, 20), "b": torch.empty(500), "c": torch.empty(8)}
OPTIONS = PlanOptions(partition_numel=100, min_nbytes=100, compress_1d=True, num_servers=2)


class Kept:
    """Servers' residuals by partition."""

    error = None

    def __init__(self):
        self.residuals, self.asked = {}, None

    def read_residuals(self, partitions, loss_scale, rates, step):
        self.asked = {p.name for p in partitions}, step
        return [self.residuals[p.name, p.offset] for p in partitions]

    def write_residuals(self, partitions, values, loss_scale, rates):
        for p, value in zip(partitions, values, strict=True):
            assert value.numel() == p.numel
            self.residuals[p.name, p.offset] = value


def _owed(servers: Kept, rank: int, recipe: str = "topk:0.1", world_size: int = 3) -> OwedByServers:
    phases = build_phases(PARAMS.items(), recipe, world_size, OPTIONS)
    return OwedByServers(servers, phases, State(phases.kept, PARAMS, rank), rank)  # type: ignore[arg-type]


def test_shares_of_all_ranks_are_everything_once() -> None:
    values = {"a": torch.randn(30, 20), "b": torch.randn(500)}  # "c" is small, and stays dense
    first, second = Kept(), Kept()
    for rank in range(3):
        _owed(first, rank).write(values)
    shares = [_owed(first, rank).read() for rank in range(3)]
    for name, value in values.items():
        assert torch.equal(sum(share[name] for share in shares), value)
    for rank, share in enumerate(shares):
        _owed(second, rank).write(share)
    assert first.residuals.keys() == second.residuals.keys()
    assert all(torch.equal(first.residuals[place], kept) for place, kept in second.residuals.items())


def test_only_what_servers_keep_in_some_phase_is_owed() -> None:
    for recipe, names in (
        ("topk:0.1", {"a", "b"}),
        ("identity+topk:0.1 until 5 then dense", {"a", "b"}),
        ("topk:0.1+identity", set()),  # workers alone owe
        ("linear:5@nag", set()),  # in the mean nothing is lost
    ):
        servers = Kept()
        for rank in range(3):
            _owed(servers, rank, recipe).write({})
        assert {name for name, _ in servers.residuals} == names, recipe


def test_servers_go_back_where_one_of_their_means_was_not_finite() -> None:
    servers = Kept()
    owed, plan = _owed(servers, 0), build_phases(PARAMS.items(), "topk:0.1", 3, OPTIONS).final
    owed.write({})
    messages = [Message(plan.messages([name])[0], [], 0) for name in PARAMS]
    messages[0].nonfinite = {(MEAN, "a")}
    messages[1].nonfinite = {(2, "b")}  # a rank's own: no server has counted it
    messages[2].nonfinite = {(MEAN, "c")}  # dense: nothing is owed
    servers.residuals = {(p.name, p.offset): torch.zeros(p.numel) for p in messages[0].layout.partitions}
    owed.take_back(messages, 7)
    assert servers.asked == ({"a"}, 7)


def test_states_that_differ_are_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    owed, saved = _owed(Kept(), 0), {"a": torch.zeros(30, 20), "d": torch.zeros(3)}
    with pytest.raises(StateError, match="got 'b' in one of both only"):
        owed.check(saved, strict=True)
    with pytest.raises(StateError, match="a: expected 600 numbers of what its owner keeps, got 5"):
        owed.check({**saved, "a": torch.zeros(5)}, strict=False)
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        owed.check({}, strict=True)  # as after servers were lost
        assert not caplog.records
        owed.check(saved, strict=False)
        assert "dropped or started at zero at the servers: b, d" in caplog.text
