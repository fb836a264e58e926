"""A source reports events of peers as they happen, and a snapshot that changes only when something has changed."""

import threading

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source


@pytest.fixture
def file(write_peers):
    return load_peers(write_peers({"a": range(6), "b": range(3)}))


def test_events_arrive_without_a_request_or_a_question(file, tiny_bundle, serve, wait_until, monkeypatch):
    bundle, seen, arrived = Bundle.open(tiny_bundle), [], threading.Event()

    def on_event(event):
        seen.append((event.peer, event.state, threading.current_thread().name))
        arrived.set()

    with Source.open(file, bundle, on_event=on_event) as source:
        peer = serve(Peer(file, "a", bundle))
        assert arrived.wait(10)
        assert seen == [("a", PeerState.ALIVE, "source")]
        close = type(peer.node).close  # libzmq drops what was not read when a link ends
        monkeypatch.setattr(
            type(peer.node), "close", lambda node: (wait_until(lambda: seen[-1][1] is PeerState.LOST), close(node))
        )
        peer.stop()
        peer.stop()
        wait_until(lambda: seen[-1][1] is PeerState.LOST)
        assert seen[-1] == ("a", PeerState.LOST, "source")
        assert [(event.peer, event.state) for event in source.events] == [event[:2] for event in seen]
        assert "left" in source.events[-1].why


def test_a_failing_callback_is_logged_and_has_no_other_effect(file, tiny_bundle, serve, images, caplog):
    bundle = Bundle.open(tiny_bundle)

    def on_event(event):
        raise ValueError(f"no {event.peer}")

    with Source.open(file, bundle, on_event=on_event) as source:
        serve(Peer(file, "a", bundle))
        assert source.wait_ready(10) == ()
        assert not source.submit(images(1)[0]).result(10).degraded
    assert "a callback for peer events failed" in caplog.text
    assert "no a" in caplog.text


def test_a_snapshot_stays_the_same_object_while_nothing_changes(file, tiny_bundle, serve, wait_until):
    bundle = Bundle.open(tiny_bundle)
    with Source.open(file, bundle) as source:
        for name in "ab":
            serve(Peer(file, name, bundle))
        wait_until(lambda: all("source" in " ".join(v.reaches) for v in source.snapshot.peers.values()), what="both")
        wait_until(lambda: all(len(v.reaches) == 2 for v in source.snapshot.peers.values()), what="links")
        wait_until(lambda: {v.state for v in source.snapshot.peers.values()} == {PeerState.ALIVE}, what="warm engines")

        def stays():
            before = source.snapshot
            for _ in range(4):
                source.reload()  # makes the source look at all peers again, in its next turn
                wait_until(lambda: source._loop._new_peers is None, what="a turn of the source")
            return source.snapshot is before

        wait_until(stays, what="a snapshot that stays")
        before = source.snapshot
        assert {view.state for view in before.peers.values()} == {PeerState.ALIVE}
        assert {view.bundle_id for view in before.peers.values()} == {bundle.manifest.bundle_id}


def test_waiting_for_holders_ends_when_the_source_is_closed(file, tiny_bundle):
    source, missing = Source.open(file, tiny_bundle), []
    waiting = threading.Thread(target=lambda: missing.append(source.wait_ready(600)))
    waiting.start()
    source.close()
    waiting.join(30)
    assert missing == [tuple(range(6))]
