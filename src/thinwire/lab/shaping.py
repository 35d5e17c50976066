"""The ``tc`` commands that make a link slow, and why their numbers are what they are.

Each node has two shaped queues: its own interface (what it sends, ``up``) and the hub's port towards it (what it
receives, ``down``). Both are token buckets (``tbf``):

- *burst* is what an idle link lets through at once. It is 250 us of the rate: long enough that a timer which fires
  late does not cost throughput at 1 Gbit/s, and at 100 Mbit/s only two frames, so that a transfer of 100 kB is paced
  from its start. It may not be below one frame, or ``tbf`` would drop everything.
- *limit* is the queue before it drops, 30 ms of the rate plus the round trip of an emulated latency: room for several
  senders that answer one receiver at once, and no seconds of standing delay.
"""

FRAME_NBYTES = 1514  # MTU of 1500 and the Ethernet header
BURST_S = 250e-6
QUEUE_S = 30e-3
MIN_QUEUE_NBYTES = 64 * 1024


def tbf(rate: int, latency: float | None) -> str:
    """Token bucket for a rate in bit/s and a one-way latency in seconds, as ``tc`` arguments."""
    nbytes_per_s = rate / 8
    burst = max(2 * FRAME_NBYTES, round(nbytes_per_s * BURST_S))
    limit = max(MIN_QUEUE_NBYTES, round(nbytes_per_s * (QUEUE_S + 2 * (latency or 0.0))))
    return f"tbf rate {rate}bit burst {burst} limit {limit}"


def shape(device: str, rate: int | None, latency: float | None, *, was: int | None = None) -> list[str]:
    """Commands that set the rate of an interface without a kernel delay; ``was`` is its rate before."""
    if rate is not None:
        return [f"qdisc replace dev {device} root handle 1: {tbf(rate, latency)}"]
    return [] if was is None else [f"qdisc del dev {device} root"]


def delay(device: str, latency: float) -> list[str]:
    """Commands that put netem, the kernel's delay, at the root of an interface's queue.

    Its own limit (in frames) must never be what drops: it holds everything that is on the emulated cable.
    """
    return [f"qdisc replace dev {device} root handle 1: netem delay {round(latency * 1e6)}us limit 1000000"]


def shape_behind_delay(device: str, rate: int | None, latency: float, *, was: int | None = None) -> list[str]:
    """As `shape`, for an interface that has `delay` at its root."""
    if rate is not None:
        return [f"qdisc replace dev {device} parent 1:1 handle 2: {tbf(rate, latency)}"]
    return [] if was is None else [f"qdisc del dev {device} parent 1:1 handle 2:"]
