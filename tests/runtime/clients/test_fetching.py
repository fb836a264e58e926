"""A source without a bundle takes the manifest of its peers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.fetching import fetch_model
from ls_edge.runtime.peer.peer import Peer


def test_the_manifest_of_any_peer_is_used(write_peers, serve, tiny_bundle):
    file = load_peers(write_peers({"a": "all", "gone": "all"}))
    serve(Peer(file, "a", Bundle.open(tiny_bundle)))
    assert fetch_model(file, None, "laptop", 30.0).manifest == Bundle.open(tiny_bundle).manifest


def test_without_a_peer_the_reasons_are_named(write_peers):
    with pytest.raises(LinkError, match=r"no peer of .* has sent the manifest of its model \(gone: .*\); start a peer"):
        fetch_model(load_peers(write_peers({"gone": "all"})), None, "laptop", 0.5)


def test_a_peer_that_starts_later_is_waited_for(write_peers, serve, tiny_bundle, wait_until, caplog):
    file = load_peers(write_peers({"a": "all"}))
    with ThreadPoolExecutor() as threads:
        fetched = threads.submit(fetch_model, file, None, "laptop", 30.0)
        wait_until(lambda: fetched.done() or "waiting for a model" in caplog.text)
        assert "a: nobody answers at tcp://127.0.0.1" in caplog.records[-1].why
        serve(Peer(file, "a", Bundle.open(tiny_bundle)))
        assert fetched.result().manifest == Bundle.open(tiny_bundle).manifest
