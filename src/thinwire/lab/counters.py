"""Byte counters of a network interface, as the kernel keeps them."""

from pathlib import Path


def read_interface(name: str) -> tuple[int, int]:
    """Bytes that an interface of this process's network namespace has sent and received since it was made.

    Every frame counts with its Ethernet, IP and TCP headers. A rank in the lab reads its own with
    ``read_interface(os.environ["THINWIRE_LAB_INTERFACE"])``.

    Raises:
        KeyError: if there is no such interface here.
    """
    return parse_counters(Path("/proc/self/net/dev").read_text())[name]


def parse_counters(text: str) -> dict[str, tuple[int, int]]:
    """Read the text of ``/proc/net/dev``: interface name to (sent, received) bytes."""
    counters = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        counters[name.strip()] = (int(fields[8]), int(fields[0]))
    return counters
