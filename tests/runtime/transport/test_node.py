"""When a turn of the loop begins: with a message, unless messages may stay unread for a while."""

import random
import tempfile
import threading

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import HeartbeatSettings, load_peers
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Bye, Hello, State
from ls_edge.runtime.routing.peer.peer_rules import peer_machine
from ls_edge.runtime.routing.state.events import Drain, Tick
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.transport.connections import Link, LinkUp
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.node import Node, NodeSettings


@pytest.fixture
def node(tiny_bundle, write_peers):
    """A node that only :meth:`Node.step` drives, with no turns of its own."""
    manifest = Bundle.open(tiny_bundle).manifest
    node = Node(
        NodeSettings("a", "peer", load_peers(write_peers({"a": [0, 1, 2]})), manifest, keys=None),
        peer_machine("a", (0, 1, 2), limits=Limits(), rng=random.Random(0)),
        execute=lambda _: None,
        hello=lambda: Hello("a", "peer", 1, wire.MINOR, manifest.model_id, manifest.bundle_id, (0, 1, 2)),
        state=lambda _: State(True, False, False, 0, 0, 0, 0),
    )
    node.step(0.01)
    yield node
    node.close()


@pytest.fixture
def stranger(node, tmp_path, wait_until):
    """Links to the node, from a process that has not greeted: each of its messages is counted as dropped."""
    address = load_peers(next(tmp_path.rglob("peers.yaml"))).peer("a").address
    links = Links({"a": address}, bind=None, heartbeat=HeartbeatSettings(), max_frame=1 << 16)
    wait_until(lambda: any(isinstance(event, LinkUp) for event in links.poll(0.05)), what="a link")
    for _ in range(10):  # what libzmq reports of it
        node.step(0.02)
    yield lambda: links.send(Link("a"), [framing.encode(Bye())])
    links.close()


def test_a_message_ends_the_wait(node, stranger):
    assert stranger()
    node.step(30.0)
    assert node.counts["before hello"] == 1


def test_messages_that_may_stay_unread_do_not_end_the_wait_and_a_wake_does(node, stranger, wait_until):
    turn = threading.Thread(target=node.step, args=(30.0,), kwargs={"unread_for": 30.0})
    turn.start()
    for _ in range(3):
        assert stranger()
        turn.join(0.1)
        assert turn.is_alive()
        assert not node.counts["before hello"]
    node.wake()
    turn.join(20.0)
    assert not turn.is_alive()
    wait_until(lambda: node.step(0.0) or node.counts["before hello"] == 3, what="all three")


def test_unread_messages_are_read_when_their_time_is_over(node, stranger, wait_until):
    assert stranger()
    wait_until(lambda: node.step(0.05, unread_for=0.05) or node.counts["before hello"], what="the message")


def test_a_wake_before_the_wait_is_not_lost(node, stranger):
    node.wake()
    turn = threading.Thread(target=node.step, args=(30.0,), kwargs={"unread_for": 30.0})
    turn.start()
    turn.join(20.0)
    assert not turn.is_alive()


def test_the_latest_events_are_written_out_with_an_internal_error(node, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    node.feed(Drain())
    monkeypatch.setitem(node.driver.machine.rules.handlers, Tick, (lambda _event: 1 / 0,))
    with pytest.raises(ZeroDivisionError):
        node.feed(Tick())
    written = tmp_path / "ls-edge-events-a.txt"
    assert [line.split()[1] for line in written.read_text().splitlines()] == ["Drain()", "Tick()"]
