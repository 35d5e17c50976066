"""The ``tc`` and ``ip`` commands that make a link slow, and why their numbers are what they are.

Each node has two shaped queues: its own interface (what it sends, ``up``) and the hub's port towards it (what it
receives, ``down``). Both are token buckets (``tbf``):

- *burst* is what an idle link lets through at once: 2 ms of the rate up to 25 kB, 350 us of it beyond, and at least six
  frames. Smaller, and the tokens of every timer that fires late on a busy machine are lost: a step of four hosts at
  100 Mbit/s took 1.11 s with 350 us, 1.03 s with 2 ms. Larger, and a transfer of 100 kB would pass for free: it
  is 25 kB at 100 Mbit/s and 44 kB at 1 Gbit/s. (``tbf`` drops every frame larger than its burst.)
- *limit* is the queue before it drops, 30 ms of the rate plus the round trip of an emulated latency: room for several
  senders that answer one receiver at once, and no seconds of standing delay.

TCP hands the kernel super-frames of up to 64 kB. Byte counters would see one header where a cable carries 44, so
interfaces cut them into frames of 1,500 bytes before they count. Carrying single frames through a bridge and two
queues costs too much processor time at 1 Gbit/s, so the far side of each link joins them again (GRO). A joined frame
stays six frames (or half) below the burst: the queue would have to cut a larger one, and one of exactly the burst would
have to wait for a full bucket, in which every delay costs throughput (3 % at 100 Mbit/s, when it was so).
"""

FRAME_NBYTES = 1514  # MTU of 1500 and the Ethernet header
SUPER_FRAME_NBYTES = 65_536
BURST_S = 2e-3
BURST_NBYTES = 25_000
MIN_BURST_S = 350e-6
QUEUE_S = 30e-3
MIN_QUEUE_NBYTES = 64 * 1024


def burst_nbytes(rate: int) -> int:
    """Bytes that an idle link of this rate in bit/s lets through at once."""
    nbytes_per_s = rate / 8
    return max(6 * FRAME_NBYTES, round(nbytes_per_s * MIN_BURST_S), min(round(nbytes_per_s * BURST_S), BURST_NBYTES))


def joined_nbytes(rate: int | None) -> int:
    """Largest super-frame, in bytes on the wire, that suits a queue of this rate."""
    if rate is None:
        return SUPER_FRAME_NBYTES
    burst = burst_nbytes(rate)
    return min(SUPER_FRAME_NBYTES, burst - min(6 * FRAME_NBYTES, burst // 2))


def tbf(rate: int, latency: float | None) -> str:
    """Token bucket for a rate in bit/s and a one-way latency in seconds, as ``tc`` arguments."""
    limit = max(MIN_QUEUE_NBYTES, round(rate / 8 * (QUEUE_S + 2 * (latency or 0.0))))
    return f"tbf rate {rate}bit burst {burst_nbytes(rate)} limit {limit}"


def shape(device: str, rate: int | None, latency: float | None, *, was: int | None = None) -> list[str]:
    """``tc`` commands that set the rate of an interface without a kernel delay; ``was`` is its rate before."""
    if rate is not None:
        return [f"qdisc replace dev {device} root handle 1: {tbf(rate, latency)}"]
    return [] if was is None else [f"qdisc del dev {device} root"]


def delay(device: str, latency: float) -> list[str]:
    """``tc`` commands that put netem, the kernel's delay, at the root of an interface's queue.

    Its own limit (in frames) must never be what drops: it holds everything that is on the emulated cable.
    """
    return [f"qdisc replace dev {device} root handle 1: netem delay {round(latency * 1e6)}us limit 1000000"]


def shape_behind_delay(device: str, rate: int | None, latency: float, *, was: int | None = None) -> list[str]:
    """As `shape`, for an interface that has `delay` at its root."""
    if rate is not None:
        return [f"qdisc replace dev {device} parent 1:1 handle 2: {tbf(rate, latency)}"]
    return [] if was is None else [f"qdisc del dev {device} parent 1:1 handle 2:"]


def cut_super_frames(device: str, rate: int | None) -> list[str]:
    """``ip`` commands that keep TCP's super-frames on a node's interface to what suits its rate."""
    return [f"link set dev {device} gso_max_segs {joined_nbytes(rate) // FRAME_NBYTES}"]


def join_frames(device: str, rates: list[int | None]) -> list[str]:
    """``ip`` commands that keep what a hub's port joins to what suits every port it may go on to."""
    nbytes = min(joined_nbytes(rate) for rate in rates)
    return [f"link set dev {device} gro_max_size {nbytes * 1448 // FRAME_NBYTES}"]
