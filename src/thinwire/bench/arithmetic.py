"""Formulas that need no torch: what plain DDP sends, what headers add, what a step could be at best."""

MTU_PAYLOAD = 1448  # of a full TCP segment over Ethernet with time stamps ...
HEADERS = 66  # ... and its Ethernet, IP and TCP headers


def dense_nbytes(numel: int, world_size: int) -> int:
    """Bytes each rank sends in a ring all-reduce of ``numel`` float32, which is what plain DDP does on gloo.

    >>> dense_nbytes(1_000_000, 4)
    6000000
    """
    return ring_nbytes(4 * numel, world_size)


def ring_nbytes(nbytes: int, world_size: int) -> int:
    """Bytes each rank sends in a ring all-reduce of ``nbytes``: ``2 * (world_size - 1)`` times its share."""
    return round(2 * (world_size - 1) / world_size * nbytes)


def with_headers(sent_nbytes: float, received_nbytes: float) -> float:
    """Bytes at the interface: payload, headers of full segments, an acknowledgement per two received segments."""
    return sent_nbytes * (1 + HEADERS / MTU_PAYLOAD) + received_nbytes / MTU_PAYLOAD / 2 * HEADERS


def ideal_step_s(
    *,
    forward_s: float,
    backward_s: float,
    optimizer_s: float,
    codec_s: float,
    sent_nbytes: float,
    rate_nbytes_per_s: float,
) -> float:
    """Seconds of a step whose exchange hides behind backward as far as wire and cores allow.

    ``forward + optimizer + max(backward + codec, sent / rate)``, where forward, backward and optimizer are measured
    with all ranks running and nothing exchanged, codec without exchange, and rate on the same network.

    >>> ideal_step_s(forward_s=1, backward_s=2, optimizer_s=0.5, codec_s=0.5, sent_nbytes=100, rate_nbytes_per_s=10)
    11.5
    """
    return forward_s + optimizer_s + max(backward_s + codec_s, sent_nbytes / rate_nbytes_per_s)
