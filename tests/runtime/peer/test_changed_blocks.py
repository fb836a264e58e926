"""A peer whose store lacks a block serves the others, until the next change of the fleet sends it."""

import pytest
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.peer_reports import PeerState
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.transport.keys import load_secret
from tests.faults.applying import give

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


def test_a_peer_serves_the_blocks_that_its_store_has_until_the_others_are_sent(tmp_path, tiny_bundle, wait_until):
    with LocalCluster(tmp_path, tiny_bundle, {"a": "0-3"}, sources=["laptop"], keys=True, stores=True) as peers:
        secret = peers.secret_key("laptop")
        give(peers.file, tiny_bundle, secret)
        peers.kill("a")
        lost = Bundle.open(tiny_bundle).manifest.parts.blocks[3]
        (peers.store("a") / "files" / lost.sha256).unlink()
        peers.start("a")
        with Observer(peers.file, keys=load_secret(secret)) as observer:
            wait_until(lambda: (found := observer.look(1.0)["a"]).blocks == (0, 1, 2) and found.warm, timeout=30)
            seen = observer.look(1.0)["a"]
            assert seen.state == PeerState.ALIVE
            assert "its store lacks block 3; send it again with 'ls-edge apply" in seen.reason
            one = give(peers.file, tiny_bundle, secret)["a"]
            assert (one.state, one.sent_bytes) == ("active", lost.bytes)
            wait_until(lambda: observer.look(1.0)["a"].blocks == (0, 1, 2, 3), timeout=30)
            assert observer.look(1.0)["a"].reason is None
