"""A cable of a given length, in user space, for kernels without netem.

One process per node joins two TAP interfaces: the node's own, and the hub's port towards it. What the node sends is
held for the latency, what it receives passes at once, so a path between two nodes is delayed once, at its sender.
"""

import contextlib
import os
import select
import signal
import time
import traceback
from collections import deque

from thinwire.lab import linux

_MAX_FRAME = 65_536
_BATCH = 32  # frames read in a row before looking at the clock of those already held


def fork_delay_line(node_namespace: int, node_device: str, hub_namespace: int, hub_device: str, latency: float) -> int:
    """Make the two interfaces in their namespaces and fork the process that joins them; returns its id.

    To be called by a single-threaded process, which is left in the hub's namespace.
    """
    linux.setns(node_namespace, linux.CLONE_NEWNET)
    node = linux.open_tap(node_device)
    linux.setns(hub_namespace, linux.CLONE_NEWNET)
    hub = linux.open_tap(hub_device)
    pid = os.fork()
    if pid == 0:
        try:
            _become_delay_line(node, hub, latency)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never into the holder's own code
    os.close(node)
    os.close(hub)
    return pid


def _become_delay_line(node: int, hub: int, latency: float) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    linux.die_with_parent(signal.SIGKILL)
    linux.use_precise_timers()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # the holder's requests and replies are not ours
        os.dup2(null, stream)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)  # a cable does not wait for the hosts' processors
    run_delay_line(node, hub, latency)


def run_delay_line(node: int, hub: int, latency: float) -> None:
    """Carry frames between two non-blocking descriptors until the process is ended; never reorders."""
    held: deque[tuple[float, bytes]] = deque()  # (when it is due, frame), in order of arrival
    read, monotonic = os.read, time.monotonic
    while True:
        wait = None if not held else max(0.0, held[0][0] - monotonic())
        readable, _, _ = select.select((node, hub), (), (), wait)
        if hub in readable:
            _pass_on(hub, node)
        if node in readable:
            try:
                for _ in range(_BATCH):
                    frame = read(node, _MAX_FRAME)
                    held.append((monotonic() + latency, frame))
            except BlockingIOError:
                pass
        now = monotonic()
        while held and held[0][0] <= now:
            _write(hub, held.popleft()[1])


def _pass_on(source: int, target: int) -> None:
    try:
        for _ in range(_BATCH):
            _write(target, os.read(source, _MAX_FRAME))
    except BlockingIOError:
        pass


def _write(target: int, frame: bytes) -> None:
    # An interface that is down, or full, loses the frame: that is what cables do.
    with contextlib.suppress(OSError):
        os.write(target, frame)
