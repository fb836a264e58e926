"""Real peers in network namespaces survive silent and slow links, and missing routes.

They are not on the loopback, so they have CURVE keys. Proxies do what ``netem`` would do: delays and stalls.
"""

import contextlib

import pytest

from ls_edge.runtime.source.source import Source
from tests.faults.namespaces import NamespaceCluster, Net, reason_to_skip

PLACEMENT = {"a": [0, 1, 2, 3], "b": [1, 2, 3], "c": [0, 4, 5]}
"""Without b, every block has a holder; only c holds blocks 4 and 5."""


@pytest.fixture(scope="module")
def net():
    if reason := reason_to_skip():
        pytest.skip(reason)
    with Net("a", "b", "c", "src") as made:
        yield made


@pytest.fixture(scope="module")
def cluster(net, tiny_bundle, tmp_path_factory):
    with NamespaceCluster(net, tmp_path_factory.mktemp("cluster"), tiny_bundle, PLACEMENT) as peers:
        yield peers


@contextlib.contextmanager
def source_of(cluster, **settings):
    """A source in this process whose sockets are in the namespace ``src``."""
    with cluster.net.inside("src"):
        source = Source.open(cluster.path, cluster.bundle, secret_key=cluster.source_key, **settings)
    with source:
        yield source


def state_of(source, peer):
    return source.snapshot.peers[peer].state


def holders(answers):
    return {holder for answer in answers for holder in answer.record.holders}


def answers_of(source, images, seconds=10.0):
    return [future.result(seconds) for future in [source.submit(image) for image in images]]


def test_a_partition_of_one_peer_costs_no_request_and_heals(cluster, tiny_bundle, images, wait_until, assert_replays):
    pictures = images(20)
    with source_of(cluster, max_skips=0) as source:
        assert source.wait_ready(30) == ()
        before = answers_of(source, pictures)
        futures = [source.submit(image) for image in pictures]
        with silence(cluster.net, ("src", "b"), ("a", "b"), ("c", "b")):  # nobody receives a FIN: heartbeats detect it
            during = [future.result(10) for future in futures]
            wait_until(lambda: state_of(source, "b") == "lost", 15.0, "the heartbeats to say that b is lost")
            during += answers_of(source, pictures)
            assert "b" not in holders(during[20:])
        wait_until(lambda: state_of(source, "b") == "alive", 15.0, "b to be back")
        wait_until(lambda: "b" in holders(answers_of(source, pictures)), 15.0, "b to be used again")
        assert [e.state for e in source.events if e.peer == "b"] == ["alive", "lost", "alive"]
    assert not any(answer.degraded for answer in (*before, *during))
    assert_replays(tiny_bundle, [*pictures] * 3, [*before, *during])


def test_a_peer_without_a_link_to_the_source_is_reached_through_another(cluster, tiny_bundle, images, assert_replays):
    net, pictures = cluster.net, images(10)
    with silence(net, ("src", "b"), ("src", "c")), source_of(cluster, max_skips=0) as source:
        assert source.wait_ready(30) == ()
        assert state_of(source, "c") == "lost"
        answers = answers_of(source, pictures)
        assert {holder for a in answers for block, holder in a.record.steps if block in (4, 5)} == {"c"}
        assert state_of(source, "c") == "lost"
    assert_replays(tiny_bundle, pictures, answers)


@contextlib.contextmanager
def silence(net, *pairs):
    """Drop all packets between the two processes of each pair."""
    with contextlib.ExitStack() as stack:
        for one, other in pairs:
            for here, there in ((one, other), (other, one)):
                net.cut(here, there)
                stack.callback(net.cut, here, there, on=False)
        yield


def test_delay_and_stalls_on_every_link_change_no_answer(start_peers, open_source, tiny_bundle, images, assert_replays):
    peers, pictures = start_peers({"a": range(4), "b": range(2, 6)}, proxied=True), images(30)
    source = open_source(peers.path, max_skips=0)
    for proxy in peers.proxies.values():
        proxy.conditions.delay_ms = 20.0
    delayed = [source.submit(image).result(10) for image in pictures[:10]]
    for proxy in peers.proxies.values():
        proxy.conditions.stall_ms, proxy.conditions.stall_part = 200.0, 0.05
    stalled = answers_of(source, pictures[10:])
    assert source.snapshot.missing_blocks == ()
    assert all(proxy.delayed_bytes for proxy in peers.proxies.values())
    assert not any(answer.degraded for answer in (*delayed, *stalled))
    assert_replays(tiny_bundle, pictures, [*delayed, *stalled])
