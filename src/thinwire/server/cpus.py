"""Which processors servers and workers run on: read, checked, shared out."""

import itertools
import os
import re
from collections.abc import Collection, Iterable, Sequence

from thinwire.errors import ServerError


def parse_cpus(text: str) -> set[int]:
    """Read processors and ranges of them.

    >>> sorted(parse_cpus("0,2-4"))
    [0, 2, 3, 4]
    """
    found = re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
    if found is None:
        raise ValueError(f"expected processors such as 0,2-5, got {text!r}")
    ends = ([int(end) for end in part.split("-")] for part in text.split(","))
    return {cpu for first, *last in ends for cpu in range(first, (last[0] if last else first) + 1)}


def parse_cpus_or_all(text: str) -> set[int]:
    """Read as `parse_cpus`; "all" are those that this process may use."""
    return os.sched_getaffinity(0) if text == "all" else parse_cpus(text)


def format_cpus(cpus: Iterable[int]) -> str:
    """Write what `parse_cpus` reads.

    >>> format_cpus({5, 0, 2, 3, 4})
    '0,2-5'
    """
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def check_cpus(cpus: Collection[int]) -> None:
    """Raise `ServerError` unless this process may use all of them: the kernel would drop the others in silence."""
    allowed = os.sched_getaffinity(0)
    if wrong := set(cpus) - allowed:
        raise ServerError(
            f"--cpu-affinity: expected some of the processors {format_cpus(allowed)}, which this process may use, got "
            f"{format_cpus(wrong)}{' among others' if len(wrong) < len(cpus) else ''}"
        )


def share_out(
    cpus: Collection[int], *, servers: int, threads: int, workers: int, leader_share: int
) -> tuple[list[set[int]], list[set[int]]]:
    """Deal processors to the servers and workers of a node, each to one of them.

    A server gets one for each of its `threads`. Of what is left the first worker, which leads the node, gets
    `leader_share` times what each of the others gets, and what does not go into equal parts.

    Returns:
        The sets of the servers, and of the workers by local rank.

    Raises:
        ServerError: there are fewer than every thread of a server and every worker needs.

    Example:
        >>> servers, workers = share_out(range(16), servers=2, threads=1, workers=4, leader_share=2)
        >>> [format_cpus(each) for each in (*servers, *workers)]
        ['14', '15', '0-7', '8-9', '10-11', '12-13']
    """
    left = len(cpus) - servers * threads
    if left < workers:
        raise ServerError(
            f"--cpu-affinity: expected at least {servers * threads + workers} processors, one for each worker and each "
            f"thread of {servers} servers, got {len(cpus)}: {format_cpus(cpus)}"
        )
    each = max(1, left // (workers - 1 + leader_share))
    sizes = [left - each * (workers - 1), *[each] * (workers - 1), *[threads] * servers]
    ordered = iter(sorted(cpus))
    sets = [set(itertools.islice(ordered, size)) for size in sizes]
    return sets[workers:], sets[:workers]


def describe(servers: Sequence[Collection[int]], workers: Sequence[Collection[int]]) -> str:
    """Return a sentence for people."""
    parts = [f"worker {rank}: {format_cpus(cpus)}" for rank, cpus in enumerate(workers)]
    parts += [f"server {index}: {format_cpus(cpus)}" for index, cpus in enumerate(servers)]
    return f"processors of this node: {'; '.join(parts)}"
