"""What nobody waits for goes with the next message to the same process."""

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.routing.state.events import Send
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport import outbox
from ls_edge.runtime.transport.links import Links


@pytest.fixture
def sent(tiny_bundle, write_peers, serve, images, monkeypatch):
    """Returns the kinds of messages in each header that a source and two peers send for some images."""
    found, send = [], Links.send

    def watched(self, link, frames):
        found.append([type(message) for message in framing.decode(frames[0])])
        return send(self, link, frames)

    def answer(hold):
        monkeypatch.setattr(outbox, "HOLD_S", hold)
        monkeypatch.setattr(Links, "send", watched)
        file, bundle = load_peers(write_peers({"a": [0, 1, 2], "b": [3, 4, 5]})), Bundle.open(tiny_bundle)
        for name in ("a", "b"):
            serve(Peer(file, name, bundle))
        with Source(file, bundle) as source:
            assert source.wait_ready(30) == ()
            for image in images(20):
                assert not source.submit(image).result(20).degraded
            return list(found)

    return answer


@pytest.mark.parametrize("hold", [10.0, 0.0])
def test_release_and_moved_wait_for_another_message(hold, sent):
    sizes = [len(kinds) for kinds in sent(hold) if {wire.Release, wire.Moved} & set(kinds)]
    assert sizes
    assert (min(sizes) > 1) is (hold > 0)


@pytest.mark.parametrize("small", [64 * 1024, 16])
def test_long_tokens_go_before_what_could_wait(small, sent, monkeypatch):
    monkeypatch.setattr(outbox, "SMALL_TOKENS", small)
    home = [kinds for kinds in sent(10.0) if {wire.Run, wire.Moved} <= set(kinds)]
    assert {kinds.index(wire.Run) < kinds.index(wire.Moved) for kinds in home} == {small == 16}


def test_messages_that_waited_for_a_lost_process_are_dropped():
    sent = []
    links = type("Recorder", (), {"send": lambda _self, link, frames: sent.append((link, frames)) or True})()
    queue = outbox.Outbox("c", links, {"a": ["link"]}, outbox.LinkCounts(["a"]))
    queue.codec_of["a"] = "raw"
    queue.put(Send("a", wire.Release(wire.TransferId(bytes(16), 1, 1), "b")))
    queue.forget("a")
    queue.let_go()
    assert queue.send() == []
    assert not sent
