"""Removing what a killed lab left behind.

Normally nothing is left: the process that holds the namespaces sees the lab's death and ends everything. If that
process was killed too, ranks may live on in namespaces that nobody holds. They are found through the kernel alone:
their namespace has an idle interface named after its holder (`holder.mark`), and no process of that id holds the
namespace any more.
"""

import os
import re
import signal
import time
from pathlib import Path

from thinwire.lab import linux
from thinwire.lab.counters import parse_counters

_MARK = re.compile(r"tw(\d+)")
_TIMEOUT_S = 5.0


def find_orphans() -> list[int]:
    """Processes in network namespaces of labs whose holder is gone."""
    verdicts: dict[linux.Namespace, bool] = {linux.namespace_of("/proc/self/ns/net") or (0, 0): False}
    orphans = []
    for pid in linux.processes():
        namespace = linux.namespace_of(f"/proc/{pid}/ns/net")
        if namespace is None:
            continue
        if namespace not in verdicts:
            owner = _owner(pid)
            verdicts[namespace] = owner is not None and not _holds(owner, namespace)
        if verdicts[namespace]:
            orphans.append(pid)
    return orphans


def clean() -> list[int]:
    """End the processes that dead labs left, and with them their namespaces; live labs are not touched.

    Returns:
        The ids of the processes that were ended.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + _TIMEOUT_S
    while (orphans := find_orphans()) and time.monotonic() < deadline:
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended.add(pid)
        time.sleep(0.02)
    return sorted(ended)


def _owner(pid: int) -> int | None:
    """Id of the holder of the lab that a process lives in, if it lives in one."""
    try:
        names = parse_counters(Path(f"/proc/{pid}/net/dev").read_text())
    except OSError:
        return None
    return next((int(match[1]) for name in names if (match := _MARK.fullmatch(name))), None)


def _holds(owner: int, namespace: linux.Namespace) -> bool:
    try:
        fds = os.listdir(f"/proc/{owner}/fd")
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's live process: not ours to judge
    return any(linux.namespace_of(f"/proc/{owner}/fd/{fd}") == namespace for fd in fds)
