"""Where ranks are: which share a host, and by which network interface they reach the others."""

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass

import torch.distributed as dist

from thinwire.comm.meeting import local_address
from thinwire.comm.process_group import all_gather_text
from thinwire.errors import AttachError, ProfileError

_VARIABLES = ("THINWIRE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank's.

    Attributes:
        host: what the ranks of one host have in common, and no others.
        name: of the host, for messages.
        address: at which others reach it.
        interface: that has this address, "" if none is found.
        cores: that the process may run on.
    """

    host: str
    name: str
    address: str
    interface: str
    cores: int


def own_place(store: dist.Store) -> Place:
    """Return this rank's place. Launchers number hosts (GROUP_RANK); without one its name tells them apart."""
    name, number = socket.gethostname(), os.environ.get("GROUP_RANK", "")
    address = local_address(store)
    return Place(
        host=number or name,
        name=name,
        address=address,
        interface=_interface_of(address),
        cores=len(os.sched_getaffinity(0)),
    )


def all_places(store: dist.Store, group: dist.ProcessGroup) -> list[Place]:
    """Return every rank's place. Collective.

    Raises:
        AttachError: on all ranks, where one finds no address.
    """
    try:
        mine = json.dumps(asdict(own_place(store)))
    except AttachError as error:
        mine = json.dumps(str(error))
    found = [json.loads(text) for text in all_gather_text(mine, group)]
    for rank, one in enumerate(found):
        if isinstance(one, str):
            raise AttachError(f"rank {rank}: {one}")
    return [Place(**one) for one in found]


def ranks_by_host(places: list[Place]) -> list[list[int]]:
    """Return the ranks of every host, in order of their lowest.

    Raises:
        ProfileError: hosts with different numbers of ranks, for which no prediction is made.
    """
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    sizes = {len(ranks) for ranks in hosts.values()}
    if len(sizes) > 1:
        found = ", ".join(f"{len(ranks)} on {places[ranks[0]].name}" for ranks in hosts.values())
        raise ProfileError(f"expected equally many ranks on all hosts, got {found}")
    return list(hosts.values())


def _interface_of(address: str) -> str:
    """Return the name of the interface that has an address; "" where the system does not say."""
    import fcntl
    import struct

    for variable in _VARIABLES:
        if names := os.environ.get(variable):
            return names.split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
