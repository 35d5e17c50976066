"""The process that holds a lab's network namespaces.

It makes one namespace for the hub (a bridge) and one per node, keeps each open by a file descriptor, and answers
requests, one JSON object per line, from the process that opened the lab. The namespaces have no names and no files:
they vanish when the last process in them and this one are gone. It outlives its parent for as long as it takes to end
what still runs in them, whether the parent closed the lab, crashed, or was killed.

Why a hub namespace: the bridge, the ports and their queues stay out of the user's own network, and everything after
the first ``unshare`` is the same with and without root.
"""

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from thinwire.lab import linux, shaping
from thinwire.lab.counters import parse_counters
from thinwire.lab.delay import fork_delay_line
from thinwire.lab.units import LinkRate

SUBNET = "10.117.0"
END_TIMEOUT_S = 10.0


class HolderError(Exception):
    """The network cannot be made; the message says why and what helps."""


def mark() -> str:
    """Name of an idle interface in every namespace of this lab, and the start of all names of interfaces in it.

    It carries the holder's id, so that what a killed lab left can be told from a live one. A node's real interface
    could not serve: it vanishes with the other end of its cable, in the hub.
    """
    return f"tw{os.getpid()}"


def interface_name(node: int) -> str:
    """Name of a node's interface."""
    return f"{mark()}n{node}"


def node_address(node: int) -> str:
    """IPv4 address of a node in its lab."""
    return f"{SUBNET}.{node + 1}"


def _port(node: int) -> str:
    return f"port{node}"


_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Namespaces:
    """The hub's and the nodes' network namespaces, the links between them, and their rates."""

    def __init__(self, rates: list[LinkRate], latency: float | None):
        self.rates = rates
        self.latency = latency or None
        self.delay_line: str | None = None  # "netem", "user space" or None
        self.congestion_control: str | None = None  # of TCP in the nodes
        self.tools = {name: _find_tool(name) for name in ("ip", "tc")}
        self.in_user_namespace = _leave_network()
        self.hub = _open_own_namespace()
        self.nodes: list[int] = []
        for _ in rates:
            linux.unshare(linux.CLONE_NEWNET)
            self.nodes.append(_open_own_namespace())
        held = [linux.namespace_of(f"/proc/self/fd/{fd}") for fd in (self.hub, *self.nodes)]
        self.identities = {identity for identity in held if identity is not None}

    def connect(self) -> None:
        """Lay the cables and bring everything up."""
        bridge = mark()
        self._ip(self.hub, [f"link add name {bridge} type bridge stp_state 0 mcast_snooping 0"])
        if self.latency is not None:
            self.delay_line = "netem" if self._has_netem() else "user space"
        for node, namespace in enumerate(self.nodes):
            if self.delay_line == "user space":
                self._join_by_delay_line(node)
            else:
                self._join_by_veth(node)
            device = interface_name(node)
            linux.setns(namespace, linux.CLONE_NEWNET)
            # Linux's default, whatever this machine's choice is; that one stays where namespaces may not have cubic.
            with contextlib.suppress(OSError):
                _CONGESTION_CONTROL.write_text("cubic")
            with contextlib.suppress(OSError):
                self.congestion_control = _CONGESTION_CONTROL.read_text().strip()
            # Autocorking waits until a host's frames have left it. Here they are on its account until they are through
            # both queues, and Linux then forgets the end of a block for 40 ms and more, as no network card makes it do.
            with contextlib.suppress(OSError):
                Path("/proc/sys/net/ipv4/tcp_autocorking").write_text("0")
            self._ip(
                namespace,
                [
                    "link set dev lo up",
                    f"link add name {mark()} type bridge",
                    f"address add {node_address(node)}/24 dev {device}",
                    f"link set dev {device} up",
                ],
            )
        ports = [_port(node) for node in range(len(self.nodes))]
        self._ip(
            self.hub,
            [f"link set dev {port} master {bridge}" for port in ports]
            + [f"link set dev {device} up" for device in (*ports, bridge)],
        )
        wanted, self.rates = self.rates, [LinkRate(up=None, down=None)] * len(self.nodes)
        if self.delay_line == "netem":
            self._tc(self.hub, [line for port in ports for line in shaping.delay(port, self.latency or 0.0)])
        self.set_rates(dict(enumerate(wanted)))

    def set_rates(self, rates: dict[int, LinkRate]) -> None:
        """Change the rates of some nodes; connections stay up."""
        ports = []
        for node, rate in rates.items():
            was = self.rates[node]
            self._tc(self.nodes[node], shaping.shape(interface_name(node), rate.up, self.latency, was=was.up))
            if self.delay_line == "netem":
                ports += shaping.shape_behind_delay(_port(node), rate.down, self.latency or 0.0, was=was.down)
            else:
                ports += shaping.shape(_port(node), rate.down, self.latency, was=was.down)
            self.rates[node] = rate
        self._tc(self.hub, ports)
        if self.delay_line != "user space":  # TAP interfaces carry single frames anyway
            self._size_super_frames()

    def counters(self) -> list[tuple[int, int]]:
        """(sent, received) bytes of each node's interface."""
        result = []
        for node, namespace in enumerate(self.nodes):
            linux.setns(namespace, linux.CLONE_NEWNET)
            result.append(parse_counters(Path("/proc/self/net/dev").read_text())[interface_name(node)])
        return result

    def end_processes(self) -> None:
        """Kill whatever still runs in the namespaces, however often it forked."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline:
            pids = [pid for pid in linux.processes_in(self.identities) if pid != os.getpid()]
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _join_by_veth(self, node: int) -> None:
        device, namespace = interface_name(node), f"/proc/self/fd/{self.nodes[node]}"  # `_run` hands it down
        self._ip(
            self.hub,
            [
                f"link add name {_port(node)} type veth peer name {device}",
                f"link set dev {device} netns {namespace}",
            ],
        )

        for side, name in ((self.nodes[node], device), (self.hub, _port(node))):
            linux.setns(side, linux.CLONE_NEWNET)
            linux.set_offload(name, linux.ETHTOOL_STSO, False)
            with contextlib.suppress(OSError):  # before Linux 5.13 frames travel singly, at more processor time
                linux.set_offload(name, linux.ETHTOOL_SGRO, True)

    def _size_super_frames(self) -> None:
        downs = [rate.down for rate in self.rates]
        for node, namespace in enumerate(self.nodes):
            self._ip(namespace, shaping.cut_super_frames(interface_name(node), self.rates[node].up))
        with contextlib.suppress(HolderError):  # iproute2 before 5.18 does not know the word; only time is lost
            self._ip(self.hub, [line for node in range(len(downs)) for line in shaping.join_frames(_port(node), downs)])

    def _join_by_delay_line(self, node: int) -> None:
        try:
            fork_delay_line(self.nodes[node], interface_name(node), self.hub, _port(node), self.latency or 0.0)
        except OSError as error:
            raise HolderError(
                f"the kernel has no netem, and /dev/net/tun, which the lab's own delay line needs, does not open "
                f"({error.strerror}). Allow it: sudo modprobe tun; sudo chmod 666 /dev/net/tun"
            ) from error

    def _has_netem(self) -> bool:
        linux.setns(self.hub, linux.CLONE_NEWNET)
        probe = [self.tools["tc"], "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    def _ip(self, namespace: int, lines: list[str]) -> None:
        self._run("ip", namespace, lines)

    def _tc(self, namespace: int, lines: list[str]) -> None:
        if lines:
            self._run("tc", namespace, lines)

    def _run(self, tool: str, namespace: int, lines: list[str]) -> None:
        linux.setns(namespace, linux.CLONE_NEWNET)
        text = "\n".join(lines) + "\n"
        done = subprocess.run(
            [self.tools[tool], "-batch", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=self.nodes,
        )
        if done.returncode != 0:
            raise HolderError(f"`{tool}` refused: {done.stderr.strip()}; it was given:\n{text}")


def _find_tool(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise HolderError(f"`{name}` is not installed. Install it: sudo apt-get install iproute2")
    return path


def _open_own_namespace() -> int:
    """Descriptor that keeps the namespace this process has just made; interfaces to come will not speak IPv6."""
    with contextlib.suppress(OSError):  # unasked announcements would only blur the byte counts
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _leave_network() -> bool:
    """Enter a new network namespace; True if that took a user namespace because this is not root."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        linux.unshare(linux.CLONE_NEWNET)
        return False
    except OSError as error:
        if error.errno != errno.EPERM:
            raise HolderError(f"this kernel gives no network namespaces ({error.strerror})") from error
    try:
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNET)
        linux.map_own_user(uid, gid)
        linux.keep_net_admin_across_exec()
        if not _may_configure_network():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    except OSError as error:
        raise HolderError(
            f"network namespaces need root or user namespaces, and this system forbids both ({error.strerror}). "
            f"{user_namespace_help()}"
        ) from error
    return True


def _may_configure_network() -> bool:
    """AppArmor lets a user namespace be made and then withholds its capabilities; trying is the only test."""
    try:
        linux.unshare(linux.CLONE_NEWNET)
    except OSError:
        return False
    return True


def user_namespace_help(proc: Path = Path("/proc")) -> str:
    """The one command that allows user namespaces on this system."""
    for name, forbidden, value in (
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu 23.10 and later
        ("kernel.unprivileged_userns_clone", "0", "1"),  # older Debian
        ("user.max_user_namespaces", "0", "15000"),  # RHEL 7
    ):
        path = proc / "sys" / name.replace(".", "/")
        if path.exists() and path.read_text().strip() == forbidden:
            return f"Allow them: sudo sysctl -w {name}={value}"
    return (
        "In a container, start it with: docker run --cap-add NET_ADMIN --cap-add SYS_ADMIN. Elsewhere run as root: sudo"
    )


def _reply(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _serve(network: Namespaces, parent: int) -> None:
    """Answer requests until the parent closes its end or dies.

    The parent's death is watched by itself, because a process that it forked may keep the pipe open.
    """
    buffer = b""
    while True:
        readable, _, _ = select.select((0, parent), (), ())
        chunk = os.read(0, 65_536) if 0 in readable else b""
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                if "rates" in request:
                    network.set_rates({int(node): LinkRate(**rate) for node, rate in request["rates"].items()})
                _reply({"counters": network.counters()})
            except (HolderError, OSError, KeyError) as error:
                _reply({"error": str(error)})


def main(settings: str) -> None:
    """Make the namespaces for ``settings`` (JSON: parent, rates, latency), serve, and clean up."""
    given = json.loads(settings)
    parent = os.pidfd_open(given["parent"])
    if os.getppid() != given["parent"]:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    network = None
    try:
        network = Namespaces([LinkRate(**rate) for rate in given["rates"]], given["latency"])
        network.connect()
        names = [interface_name(node) for node in range(len(network.nodes))]
        _reply(
            {
                "interfaces": names,
                "namespaces": [f"/proc/{os.getpid()}/fd/{fd}" for fd in network.nodes],
                "user_namespace": f"/proc/{os.getpid()}/ns/user" if network.in_user_namespace else None,
                "delay_line": network.delay_line,
                "congestion_control": network.congestion_control,
            }
        )
        _serve(network, parent)
    except (HolderError, OSError) as error:
        _reply({"error": str(error)})
    finally:
        if network is not None:
            network.end_processes()
