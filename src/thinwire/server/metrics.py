"""Live numbers of a server: for Prometheus, and as a line."""

import time
from collections.abc import Iterator
from typing import Any

from thinwire.errors import ServerError
from thinwire.server.process import Server

_COUNTS = {
    "pushes": "Pushes taken.",
    "pushed_nbytes": "Bytes of their payloads.",
    "pulls": "Pulls answered.",
    "pulled_nbytes": "Bytes of their payloads.",
    "rounds": "Rounds completed.",
    "lost_workers": "Workers taken for lost.",
    "unread": "Frames dropped for peers that do not read.",
}


class Collector:
    """Reads a server's numbers whenever Prometheus asks."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Any]:
        """Yield metrics; called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        service, engines = self._server.service, self._server.engines
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"thinwire_server_{name}", text, value=service.counts[name])
        refused = CounterMetricFamily("thinwire_server_refused", "Frames refused.", labels=["reason"])
        for reason, count in dict(service.refused).items():
            refused.add_metric([reason], count)
        yield refused
        busy = CounterMetricFamily("thinwire_server_engine_busy_seconds", "Seconds of work.", labels=["thread"])
        for thread, seconds in enumerate(engines.busy_s):
            busy.add_metric([str(thread)], seconds)
        yield busy
        clocks = GaugeMetricFamily(
            "thinwire_server_worker_clock", "Exchanges begun, -1 for a worker that is not there.", labels=["rank"]
        )
        for rank, clock in enumerate(service.clocks()):
            clocks.add_metric([str(rank)], clock)
        yield clocks
        yield GaugeMetricFamily("thinwire_server_kept_nbytes", "Memory of residuals.", value=service.store.nbytes)


def serve_metrics(server: Server, port: int, host: str = "127.0.0.1") -> int:
    """Answer http://host:port/metrics from a thread of its own; return the port, if 0 was asked for.

    Raises:
        ServerError: prometheus-client is not installed, or the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ServerError(
            f"--metrics: expected prometheus-client, got {error}; run  pip install '.[server]'  in thinwire's folder"
        ) from error
    registry = CollectorRegistry()
    registry.register(Collector(server))
    try:
        http, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ServerError(
            f"--metrics {host}:{port}: {error.strerror}; expected a free port at an address of this machine"
        ) from error
    return http.server_port


class StatusLine:
    """Says, since it was last asked, how fast a server is."""

    def __init__(self, server: Server) -> None:
        self._server, self._last, self._last_s = server, dict[str, int](), time.monotonic()

    def line(self) -> str:
        """Return one line."""
        now_s, counts = time.monotonic(), dict(self._server.service.counts)
        seconds = max(now_s - self._last_s, 1e-9)
        rounds, pushed, pulled = (
            (counts.get(name, 0) - self._last.get(name, 0)) / seconds
            for name in ("rounds", "pushed_nbytes", "pulled_nbytes")
        )
        self._last, self._last_s = counts, now_s
        service = self._server.service
        present = sum(clock >= 0 for clock in service.clocks())
        return (
            f"{present} of {service.options.num_workers} workers; {rounds:.0f} rounds/s, "
            f"{pushed / 1e6:.1f} MB/s pushed, {pulled / 1e6:.1f} MB/s pulled; "
            f"{sum(service.refused.values())} frames refused"
        )
