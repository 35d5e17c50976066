"""The few Linux calls the lab needs that Python 3.11 does not offer. Standard library only."""

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import TypeAlias

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

Namespace: TypeAlias = tuple[int, int]  # (device, inode): what tells one namespace from another

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAP_NET_ADMIN = 12
_CAPABILITY_VERSION_3 = 0x20080522

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000

ETHTOOL_STSO, ETHTOOL_SGRO = 0x1F, 0x2C  # TCP segmentation when sending, joining of frames when receiving
_SIOCETHTOOL = 0x8946


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces of the given kinds."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """Move this process into the namespace that ``fd`` refers to."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def _prctl(option: int, *arguments: int) -> None:
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(ctypes.c_int(option), *words), "prctl")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def use_precise_timers() -> None:
    """Wake from sleeps within microseconds rather than the default 50 us slack."""
    _prctl(_PR_SET_TIMERSLACK, 1)


def keep_net_admin_across_exec() -> None:
    """Let programs started from here (``ip``, ``tc``) configure networks although the user is not root.

    Inside a new user namespace this process has every capability, but exec drops them for a user id other than 0.
    An ambient capability survives exec; it must be inheritable first.
    """
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)  # two records (low and high 32 bits) of effective, permitted, inheritable
    _check(_libc.capget(header, data), "capget")
    words = list(struct.unpack("6I", data.raw))
    words[2] |= 1 << _CAP_NET_ADMIN
    _check(_libc.capset(header, struct.pack("6I", *words)), "capset")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_NET_ADMIN)


def map_own_user(uid: int, gid: int) -> None:
    """In a new user namespace, keep the user and group id that this process has outside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def open_tap(name: str) -> int:
    """Make a TAP interface in this network namespace; it lives as long as the returned descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


def set_offload(device: str, command: int, on: bool) -> None:
    """Turn an offload (``ETHTOOL_...``) of an interface in this network namespace on or off."""
    value = ctypes.create_string_buffer(struct.pack("II", command, on))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))


def namespace_of(path: str) -> Namespace | None:
    """Identity of the namespace behind a ``/proc`` link; None if it is gone or not ours to see."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def processes() -> list[int]:
    """Ids of all processes that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def processes_in(namespaces: set[Namespace]) -> list[int]:
    """Ids of the processes that live in one of these network namespaces."""
    return [pid for pid in processes() if namespace_of(f"/proc/{pid}/ns/net") in namespaces]
