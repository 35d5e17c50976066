"""Rates and times as people write them: ``100mbit``, ``1gbit``, ``5ms``. No torch, no I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.errors import LabError

Rate: TypeAlias = str | float | None

MAX_NODES = 250  # one byte of an address numbers them

RATE_UNITS = {"": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER_AND_UNIT = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-z]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """What one host may send (``up``) and receive (``down``), in bit/s; None is unshaped."""

    up: int | None
    down: int | None


NodeRates: TypeAlias = Rate | LinkRate | Sequence[Rate | tuple[Rate, Rate]]


def parse_rate(rate: Rate) -> int | None:
    """Turn a rate into bit/s.

    Args:
        rate: ``"100mbit"``, ``"1.5gbit"`` (decimal units; ``/s`` may follow), bit/s without a unit or as a number,
            or None (also ``"unshaped"``) for no limit.

    Raises:
        LabError: if it is none of these or not positive. ``mbps`` is refused because ``tc`` reads it as megabytes.

    Example:
        >>> parse_rate("100mbit")
        100000000
    """
    if rate is None:
        return None
    if isinstance(rate, str):
        text = rate.strip().lower().removesuffix("/s")
        if text in ("unshaped", "none"):
            return None
        match = _NUMBER_AND_UNIT.fullmatch(text)
        if match is None or match[2] not in RATE_UNITS:
            raise LabError(f"a rate looks like 100mbit or 1gbit (units bit, kbit, mbit, gbit), got {rate!r}")
        bits = float(match[1]) * RATE_UNITS[match[2]]
    else:
        bits = float(rate)
    if not 1000 <= bits <= 10**12:
        if isinstance(rate, str) and rate.strip().isdecimal() and bits < 1000:
            raise LabError(
                f"{rate!r} has no unit, so it is bit/s, and a rate is at least 1kbit: write {rate.strip()}mbit"
            )
        raise LabError(f"a rate lies between 1kbit and 1000gbit, got {rate!r}; None is unshaped")
    return round(bits)


def format_rate(rate: Rate) -> str:
    """Write a rate the way `parse_rate` reads it.

    Example:
        >>> format_rate(1.5e9)
        '1.5gbit'
    """
    bits = parse_rate(rate)
    if bits is None:
        return "unshaped"
    unit, size = next((u, s) for u, s in reversed(RATE_UNITS.items()) if bits >= s)
    number = f"{bits / size:.9f}".rstrip("0").rstrip(".")
    return f"{number}{unit}"


def parse_duration(duration: str | float | None) -> float | None:
    """Turn ``"5ms"``, ``"100us"``, ``"2s"`` or a number of seconds into seconds; None stays None.

    Raises:
        LabError: if it is none of these, or negative.

    Example:
        >>> parse_duration("5ms")
        0.005
    """
    if duration is None:
        return None
    if isinstance(duration, str):
        match = _NUMBER_AND_UNIT.fullmatch(duration.strip().lower())
        if match is None or match[2] not in TIME_UNITS:
            raise LabError(f"a time looks like 5ms or 0.5s (units {', '.join(TIME_UNITS)}), got {duration!r}")
        return float(match[1]) * TIME_UNITS[match[2]]
    if not 0 <= duration < float("inf"):
        raise LabError(f"a time is a number of seconds, 0 or more, got {duration!r}")
    return float(duration)


def expand_rates(rate: NodeRates, nodes: int) -> tuple[LinkRate, ...]:
    """Give every node its up and down rate.

    Args:
        rate: one rate for all, a `LinkRate` for all, or a list with one entry per node, each a rate or an
            ``(up, down)`` pair.
        nodes: number of nodes.

    Raises:
        LabError: if a list has another length than ``nodes``.
    """
    if isinstance(rate, LinkRate):
        return (rate,) * nodes
    if rate is None or isinstance(rate, (str, int, float)):
        entries: Sequence[Rate | tuple[Rate, Rate]] = [rate] * nodes
    else:
        entries = rate
    if len(entries) != nodes:
        raise LabError(f"a list of rates has one entry per node: expected {nodes}, got {len(entries)}")
    pairs = [entry if isinstance(entry, (tuple, list)) else (entry, entry) for entry in entries]
    if any(len(pair) != 2 for pair in pairs):
        raise LabError(f"an entry of a list of rates is a rate or an (up, down) pair, got {rate!r}")
    return tuple(LinkRate(up=parse_rate(up), down=parse_rate(down)) for up, down in pairs)
