"""Slow links: tokens wait for the link, and nobody takes that for a failure."""

from concurrent.futures import wait

import pytest

from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster


@pytest.mark.release
@pytest.mark.parametrize("policy", ["nearest", "fastest"])
def test_little_is_done_twice_on_slow_links(wide_bundle, tmp_path, images, policy):
    """Tokens of 49 KB take 98 ms; with a burst of them on its way at once, links were lost and most work done twice."""
    with FaultyCluster(tmp_path, wide_bundle, {"a": [0, 1], "b": [0, 1]}, proxied=True) as peers:
        peers.wait_warm()
        for proxy in peers.proxies.values():
            proxy.conditions.rate_mbit = 4.0
            proxy.conditions.delay_ms = 2.0
        with Source.open(peers.path, wide_bundle, max_skips=0, policy=policy, budget_ms=60_000) as source:
            assert source.wait_ready(30) == ()
            pictures = images(20)
            futures = [source.submit(pictures[index % 20]) for index in range(60)]
            assert not wait(futures, 60).not_done
            records = [future.result().record for future in futures]
            assert sum(record.attempts - 1 for record in records) <= 6
            assert not [event for event in source.events if event.state == "lost"]
