"""A peer with a store whose entry changes serves the blocks that it has, until a push sends the others."""

import signal

import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.core.records import PeerState
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.transport.keys import load_secret
from tests.faults.applying import give as give_bundle

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


def give(peers, name, blocks):
    document = yaml.safe_load(peers.path.read_text())
    next(one for one in document["peers"] if one["name"] == name)["blocks"] = blocks
    peers.path.write_text(yaml.safe_dump(document))
    peers.file = load_peers(peers.path)


def push(peers, bundle):
    return give_bundle(peers.file, bundle, peers.secret_key("laptop"))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_changed_entry_keeps_the_blocks_that_the_store_has(tmp_path, tiny_bundle, wait_until, number):
    with LocalCluster(tmp_path, tiny_bundle, {"a": "0-3"}, sources=["laptop"], keys=True, stores=True) as peers:
        push(peers, tiny_bundle)
        give(peers, "a", "1-4")
        peers.signal("a", number)
        if number == signal.SIGKILL:
            peers.processes["a"].wait()
            peers.start("a")
        with Observer(peers.file, keys=load_secret(peers.secret_key("laptop"))) as observer:
            wait_until(lambda: (found := observer.look(1.0)["a"]).blocks == (1, 2, 3) and found.warm, timeout=30)
            seen = observer.look(1.0)["a"]
            assert seen.state == PeerState.ALIVE
            assert "its store lacks block 4; send it again with 'ls-edge apply" in seen.reason
            one = push(peers, tiny_bundle)["a"]
            block = Bundle.open(tiny_bundle).manifest.parts.blocks[4]
            assert (one.state, one.sent_bytes) == ("active", block.bytes)
            wait_until(lambda: observer.look(1.0)["a"].blocks == (1, 2, 3, 4), timeout=30)
            assert observer.look(1.0)["a"].reason is None
