"""A peer answers its neighbors while its engine hangs."""

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import HeartbeatSettings, load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.setup import PeerSettings
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Complaint, Hello, State
from ls_edge.runtime.routing.state.hop import HopLimit
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.connections import Incoming, Link, LinkUp
from ls_edge.runtime.transport.links import Links
from tests.faults.engines import Faults, inject, write


@pytest.fixture
def hanging(tiny_bundle, write_peers, serve, wait_until, tmp_path):
    """Files of a peer with hanging engines and of its faults; the limits are long, so that no request is given up."""
    file, faults = load_peers(write_peers({"a": range(6)})), tmp_path / "a.faults"
    peer = serve(
        inject(Peer(file, "a", Bundle.open(tiny_bundle), PeerSettings(limits=Limits(hop=HopLimit(floor=60.0)))), faults)
    )
    wait_until(lambda: peer.machine.rules.warm, what="warm engines")
    write(faults, Faults(hang=True))
    yield file, faults
    write(faults, Faults())


def test_a_peer_with_a_hanging_engine_answers_its_neighbors(hanging, tiny_bundle, images, assert_replays, wait_until):
    file, faults = hanging
    bundle = Bundle.open(tiny_bundle)
    batch = images(3)
    dial = {"a": file.peer("a").address}
    links = Links(dial, bind=None, heartbeat=HeartbeatSettings(), max_frame=1 << 20)
    heard = []

    def listen():
        for event in links.poll(0.01):
            if isinstance(event, LinkUp):
                manifest = bundle.manifest
                hello = Hello("onlooker", "source", 1, 0, manifest.model_id, manifest.bundle_id)
                links.send(Link("a"), [framing.encode(hello)])
            elif isinstance(event, Incoming):
                heard.extend(framing.decode(event.frames[0].bytes))
        return heard

    try:
        with Source(file, bundle, limits=Limits(hop=HopLimit(floor=60.0))) as source:
            assert source.wait_ready(30) == ()
            futures = [source.submit(image, budget_ms=60_000) for image in batch]
            wait_until(lambda: any(isinstance(m, State) and m.queue == 3 for m in listen()), what="three requests")
            # While it hangs, it still tells what has changed and answers messages.
            futures.append(source.submit(batch[0], budget_ms=60_000))
            wait_until(lambda: any(isinstance(m, State) and m.queue == 4 for m in listen()), what="four requests")
            links.send(Link("a"), [b"nonsense"])
            wait_until(lambda: any(isinstance(m, Complaint) for m in listen()), what="a complaint")
            assert {m.calls for m in heard if isinstance(m, State)} == {0}
            assert not any(future.done() for future in futures)
            write(faults, Faults())
            answers = [future.result(30) for future in futures]
    finally:
        links.close()
    assert_replays(tiny_bundle, [*batch, batch[0]], answers)
