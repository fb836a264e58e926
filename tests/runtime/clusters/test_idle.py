"""An idle fleet sends no message while nothing changes."""

from collections import Counter

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.node import Node

PEERS = 16


def test_sixteen_idle_peers_send_no_message(serve, write_peers, tiny_bundle, wait_until, monkeypatch):
    sent = []
    send = Links.send
    monkeypatch.setattr(Links, "send", lambda *arguments: (sent.append(arguments), send(*arguments))[1])
    file, bundle = load_peers(write_peers({f"p{i:02d}": [i % 3] for i in range(PEERS)})), Bundle.open(tiny_bundle)
    peers = [serve(Peer(file, peer.name, bundle)) for peer in file.peers]

    def is_linked():
        return all(p.snapshot.warm and len(p.snapshot.linked) == PEERS - 1 for p in peers)

    def is_silent():
        """Whether no peer sends in three turns, each of which waits for a second."""
        sent.clear()
        turns.clear()
        wait_until(lambda: all(turns[peer.node] >= 3 for peer in peers), 30.0, "turns of all peers")
        return not sent

    wait_until(is_linked, 30.0, "all peers to be linked")
    turns, step = Counter(), Node.step
    monkeypatch.setattr(Node, "step", lambda node, *more, **named: (step(node, *more, **named), turns.update([node])))
    wait_until(is_silent, 30.0, "three turns without a message")
