"""What a measured cluster says of itself, in sentences: its links, and those that are not as the others."""

from collections.abc import Iterable, Sequence

from thinwire.advisor.profile import Cluster, Pair

ASYMMETRIC = 1.5  # times as fast one way as the other
POOR_FIT = 0.3  # a residual from which on a fit is named


def rate_text(nbytes_per_s: float) -> str:
    """Return a rate in decimal bits per second.

    >>> rate_text(11_900_000)
    '95.2 Mbit/s'
    """
    bits = 8 * nbytes_per_s
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def time_text(seconds: float) -> str:
    """Return a time with three digits.

    >>> time_text(0.000052), time_text(1.234)
    ('52 µs', '1.23 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def links(cluster: Cluster) -> list[str]:
    """Return a sentence per class of links and per collective."""
    classes = [("between hosts", cluster.between)] if cluster.hosts > 1 else []
    if cluster.inside is not None:
        classes.append(("inside a host", cluster.inside))
    sentences = [
        f"{where}: {time_text(link.alpha_s)} one way, {rate_text(link.beta)} (fit within {100 * link.residual:.0f} %)"
        for where, link in classes
    ]
    sentences += [
        f"{fit.operation.replace('_', '-')} of all {cluster.world_size} ranks: {time_text(fit.alpha_s)} and "
        f"{rate_text(fit.beta)} of sent bytes a rank (fit within {100 * fit.residual:.0f} %), "
        f"{1e9 * fit.cpu_s_per_nbyte:.2g} ns of processor a byte"
        for fit in cluster.collectives
    ]
    return sentences


def warnings(cluster: Cluster) -> list[str]:
    """Return what to look at: an interface that cannot be meant, slow hosts and links, poor fits."""
    found: list[str] = []
    if cluster.hosts > 1 and cluster.interface == "lo":
        found.append("the interface is lo, which reaches no other host: set GLOO_SOCKET_IFNAME on every host")
    pairs, usual = list(cluster.exceptions), rate_text(cluster.between.beta)
    for end, word, preposition in (("source", "sends", "to"), ("target", "receives", "from")):
        for host in range(cluster.hosts):
            of_host = [pair for pair in pairs if getattr(pair, end) == host]
            slow = [pair for pair in of_host if pair.beta < cluster.between.beta]
            if len(slow) == cluster.hosts - 1 > 1:
                found.append(f"host {host} {word} at {_rates(slow)} {preposition} every other host; usual is {usual}")
                pairs = [pair for pair in pairs if pair not in slow]
    for pair in pairs:
        back = next((p.beta for p in cluster.exceptions if (p.target, p.source) == (pair.source, pair.target)), None)
        back = cluster.between.beta if back is None else back
        text = (
            f"host {pair.source} to host {pair.target}: {rate_text(pair.beta)} and {time_text(pair.alpha_s)} one way; "
            f"usual is {usual} and {time_text(cluster.between.alpha_s)}"
        )
        found.append(text + (f"; {rate_text(back)} the other way" if back > ASYMMETRIC * pair.beta else ""))
    fits = [("between hosts", cluster.between.residual)]
    fits += [(fit.operation.replace("_", "-"), fit.residual) for fit in cluster.collectives]
    found += [
        f"{name}: times lie {100 * residual:.0f} % off the fitted line: measure again on a quieter network"
        for name, residual in fits
        if residual > POOR_FIT
    ]
    return found


def _rates(pairs: Sequence[Pair]) -> str:
    rates: Iterable[float] = [pair.beta for pair in pairs]
    low, high = rate_text(min(rates)), rate_text(max(rates))
    return low if low == high else f"{low} to {high}"
