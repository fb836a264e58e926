"""An idle fleet sends no message while nothing changes."""

from collections import Counter

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.routing.peer.state_announcer import LOAD_EVERY
from ls_edge.runtime.routing.state.events import NeighborState
from ls_edge.runtime.simulator.simulation import SOURCE
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.node import Node
from tests.faults.simulation import FaultySimulation

PEERS = 16


class Counting(FaultySimulation):
    """A simulation that counts the STATE messages between each two processes."""

    def __init__(self, *args, **named):
        self.states = Counter()
        super().__init__(*args, **named)

    def _deliver(self, sender, to, event, size=0.0):
        self.states[sender, to] += isinstance(event, NeighborState)
        super()._deliver(sender, to, event, size)


@pytest.fixture
def fleet():
    blocks = 4
    sim = Counting({f"p{i}": (i % blocks,) for i in range(2 * blocks)}, blocks=blocks, validate=True)
    sim.run(1.0)
    sim.states.clear()
    return sim


def test_only_users_of_a_peer_hear_its_load_often():
    """In a chain, the process before a peer and the source are its users."""
    blocks = 6
    sim = Counting({f"p{i}": (i,) for i in range(blocks)}, blocks=blocks, block_seconds=0.02)
    sim.run(1.0)
    sim.states.clear()
    for _ in range(100):
        sim.submit(policy="sequential", budget=60.0)
    sim.run(2.0)
    assert sim.source.rules.requests
    assert all(sim.states[f"p{i}", f"p{i - 1}"] >= 15 for i in range(1, blocks))
    others = [sim.states[f"p{i}", f"p{j}"] for i in range(blocks) for j in range(blocks) if j not in (i, i - 1)]
    assert max(others) <= 1 + 2.0 / LOAD_EVERY


def test_a_lost_link_is_announced_immediately(fleet):
    for _ in range(20):
        fleet.submit()
    fleet.run(0.25)
    fleet.kill("p3")
    fleet.run(3 * fleet.settings.latency)
    assert not any("p3" in n.state.reaches for n in fleet.source.neighbors)


def test_neighbors_know_the_state_that_a_peer_would_send_now(fleet):
    for _ in range(20):
        fleet.submit()
    fleet.settle()
    fleet.run(LOAD_EVERY + 2 * LOAD_EVERY)
    for name, process in fleet.processes.items():
        for n in process.machine.neighbors:
            if n.name != SOURCE:
                assert n.state == fleet.processes[n.name].machine.rules.announcer.state(name)


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
