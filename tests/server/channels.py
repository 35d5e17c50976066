"""Channels of one worker that is a run of its own."""

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
) -> Channel:
    """Connect; every silence of `timeout_s` is an error, of which `fail` hears."""
    return Channel(
        addresses,
        session=SESSION,
        rank=0,
        world_size=1,
        keys=keys,
        heartbeat_s=0.1,
        heartbeat_timeout_s=timeout_s,
        timeout_s=timeout_s,
        fail=fail,
    )
