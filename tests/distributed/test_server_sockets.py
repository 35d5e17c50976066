"""Nonsense on a server's socket, while two workers train through it."""

import pytest
from fuzz_sockets import fuzz_sockets


@pytest.mark.parametrize("count", [3000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_nonsense_on_sockets_has_no_effect(ranks, count):
    sent, refused, num_steps = fuzz_sockets(ranks(2), count)
    assert sent.total() == count
    assert set(refused) >= {"malformed", "foreign", "plan"}
    assert refused.total() > 0.8 * count  # what a peer sends just before it closes, or bare connections, may be lost
    assert num_steps > 1
