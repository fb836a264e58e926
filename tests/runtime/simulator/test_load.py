"""Load in simulated time: saturated peers are busy, and only the users of a peer hear of its load."""

from collections import Counter

import pytest

from ls_edge.runtime.routing.peer.state_announcer import LOAD_EVERY
from ls_edge.runtime.routing.state.events import Complete, NeighborState
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.simulation import FaultySimulation


def saturated(placement, most, *, policy="nearest", in_flight=64, seconds=3.0):
    """Keep many requests in flight; return the simulation and the used fraction of the peers' time."""
    limits = Limits(credits=most, custody=4 * most)
    sim = FaultySimulation(placement, blocks=6, limits=limits, block_seconds=0.005)
    sim.run(0.3)
    end = sim.now + seconds
    while sim.now < end:
        while len(sim.source.rules.requests) < in_flight:
            sim.submit(policy=policy, budget=3.0)
        sim.run(0.005)
    answered = sum(isinstance(outcome, Complete) for outcomes in sim.outcomes.values() for outcome in outcomes)
    return sim, answered * 6 * 0.005 / (seconds * len(placement))


@pytest.mark.parametrize(("policy", "most"), [("nearest", 4), ("random", 16)])
def test_peers_with_all_blocks_are_busy_all_the_time(policy, most):
    sim, used = saturated({"a": range(6), "b": range(6)}, most, policy=policy)
    assert used > 0.95
    assert not sim.notes


STAGES = {"a": range(3), "b": range(3, 6)}


@pytest.mark.parametrize(("policy", "most"), [("nearest", 4), ("fastest", 16)])
def test_peers_that_depend_on_each_other_do_not_fill_up_with_new_work(policy, most):
    sim, used = saturated(STAGES, most, policy=policy)
    assert not [note for _, _, note in sim.notes if note.what == "suspect"]
    assert used > 0.8


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
