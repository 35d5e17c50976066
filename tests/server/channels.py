"""Channels of one worker, which is a run of its own unless the test plays the others."""

from collections.abc import Callable, Sequence

from thinwire.server.channel import Channel
from thinwire.server.keys import WorkerKeys

SESSION = 7


def open_channel(
    addresses: Sequence[str],
    fail: Callable[[BaseException], None],
    *,
    keys: WorkerKeys | None = None,
    timeout_s: float = 5.0,
    world_size: int = 1,
) -> Channel:
    """Connect; every silence of `timeout_s` is an error, of which `fail` hears."""
    return Channel(
        addresses,
        session=SESSION,
        rank=0,
        world_size=world_size,
        keys=keys,
        heartbeat_s=0.1,
        heartbeat_timeout_s=timeout_s,
        timeout_s=timeout_s,
        fail=fail,
    )
