"""What is said of a measured cluster."""

import dataclasses

from thinwire.advisor.findings import links, warnings
from thinwire.advisor.profile import Cluster, CollectiveFit, LinkClass, Pair

BETWEEN = LinkClass(alpha_s=1e-4, beta=12.5e6, residual=0.02)


def _cluster(*exceptions: Pair, hosts: int = 4) -> Cluster:
    return Cluster(hosts=hosts, ranks_per_host=1, between=BETWEEN, exceptions=exceptions, interface="eth0")


def _slow(source: int, target: int) -> Pair:
    return Pair(source=source, target=target, alpha_s=1e-4, beta=2.5e6)


def test_a_good_cluster_has_nothing_to_look_at() -> None:
    assert warnings(_cluster()) == []
    assert links(_cluster()) == ["between hosts: 100 µs one way, 100 Mbit/s (fit within 2 %)"]


def test_a_host_that_sends_slowly_to_all_is_named_once() -> None:
    found = warnings(_cluster(*(_slow(2, other) for other in (0, 1, 3))))
    assert found == ["host 2 sends at 20 Mbit/s to every other host; usual is 100 Mbit/s"]
    found = warnings(_cluster(*(_slow(other, 2) for other in (0, 1, 3))))
    assert found == ["host 2 receives at 20 Mbit/s from every other host; usual is 100 Mbit/s"]


def test_a_link_that_is_slow_one_way_says_what_the_other_is() -> None:
    (sentence,) = warnings(_cluster(_slow(0, 1)))
    assert sentence.startswith("host 0 to host 1: 20 Mbit/s and 100 µs one way; usual is 100 Mbit/s")
    assert sentence.endswith("; 100 Mbit/s the other way")
    both = warnings(_cluster(_slow(0, 1), _slow(1, 0)))
    assert len(both) == 2
    assert not any("the other way" in sentence for sentence in both)


def test_the_wrong_interface_and_poor_fits_are_named() -> None:
    fit = CollectiveFit(operation="all_gather", alpha_s=0.0, beta=1e6, residual=0.5)
    cluster = dataclasses.replace(_cluster(), interface="lo", collectives=(fit,))
    first, second = warnings(cluster)
    assert "set GLOO_SOCKET_IFNAME" in first
    assert second.startswith("all-gather: times lie 50 % off the fitted line")
