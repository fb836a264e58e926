"""Sparse links: some peers have no link to the source or to one another, but a process in between."""

import itertools

import pytest

from ls_edge.runtime.protocol.messages import Accept, Refuse, RefuseReason, Release, Visit
from ls_edge.runtime.routing.source.source_rules import SKIP_GRACE
from ls_edge.runtime.routing.state.events import Complete, Forward, NeighborDown
from ls_edge.runtime.routing.state.limits import LOOK, Limits
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.simulation import FaultySimulation
from tests.runtime.routing.driver import BY_X, new_peer, run_of, transfer

REQUESTS = 40
BLOCK_S = 0.005
HUB = {"hub": (4,), "b": (0, 3), "c": (1, 5), "d": (2,)}
"""Every process is linked with the hub alone."""


def sparse(placement, *links, blocks=6, **settings):
    settings = {"block_seconds": BLOCK_S, **settings}
    sim = FaultySimulation(placement, blocks=blocks, validate=True, **settings)
    wanted = {frozenset(link) for link in links}
    for one, other in itertools.combinations((SOURCE, *placement), 2):
        if frozenset((one, other)) not in wanted:
            sim.cut(one, other)
    sim.run(1.0)
    return sim


def around_the_hub(placement=HUB, **settings):
    hub, *others = placement
    return sparse(placement, (SOURCE, hub), *((hub, name) for name in others), **settings)


def outcomes(sim):
    return [outcome for (outcome,) in sim.outcomes.values()]


@pytest.mark.parametrize("slow", ["hub", "c"])
@pytest.mark.parametrize("policy", ["nearest", "sequential", "fastest", "random"])
def test_all_are_answered_and_each_block_runs_once(policy, slow):
    seconds = {name: 0.03 if name == slow else BLOCK_S for name in HUB}
    sim = around_the_hub(block_seconds=seconds)
    for _ in range(REQUESTS):
        sim.submit(policy=policy, budget=30.0)
    sim.settle()
    assert all(isinstance(outcome, Complete) for outcome in outcomes(sim))
    assert sim.busy == pytest.approx({name: REQUESTS * len(HUB[name]) * seconds[name] for name in HUB})
    assert not any(process.machine.held for process in sim.processes.values())


def test_peers_in_different_networks_are_reached_over_the_source():
    sim = sparse({"a": (0, 2, 4), "b": (1, 3, 5)}, (SOURCE, "a"), (SOURCE, "b"))
    for policy in ("nearest", "sequential", "fastest"):
        sim.submit(policy=policy, budget=5.0)
    sim.settle()
    assert all(isinstance(outcome, Complete) for outcome in outcomes(sim))


def test_a_block_that_only_waits_for_a_credit_is_not_skipped():
    sim = around_the_hub(block_seconds={**dict.fromkeys(HUB, BLOCK_S), "d": 0.05})
    for _ in range(REQUESTS):
        sim.submit(max_skips=2, budget=30.0)
    sim.settle()
    assert {outcome.itinerary.skipped for outcome in outcomes(sim)} == {()}


def test_a_hub_that_is_killed_and_comes_back():
    sim = around_the_hub()
    for _ in range(20):
        sim.submit(budget=30.0)
    sim.run(0.05)
    sim.kill("hub")
    sim.run(0.5)
    sim.restart("hub")
    sim.settle()
    assert {type(outcome) for outcome in outcomes(sim)} == {Complete}


def test_a_peer_that_has_lost_its_link_to_the_source_still_answers_through_others():
    sim = sparse({"a": (0, 1), "b": (2, 3), "c": (4, 5)}, (SOURCE, "a"), (SOURCE, "c"), ("a", "b"), ("b", "c"))
    sim.cut(SOURCE, "c")
    sim.run(0.5)
    for _ in range(120):
        sim.submit(budget=30.0)
        sim.run(0.02)
    sim.settle()
    assert all(isinstance(outcome, Complete) for outcome in outcomes(sim))


def test_tokens_replace_the_copy_of_a_relay():
    """A relay full of copies refused the tokens whose acceptance would have ended them, until the budgets ended."""
    limits, leaves = Limits(credits=1, custody=2), {"b": (0, 1, 2, 4, 5, 7), "c": (0, 1, 2, 3, 5, 6), "e": (0, 1, 3, 7)}
    sim = around_the_hub({"a": (2, 6), **leaves, "d": (0, 2, 3, 4, 5, 6)}, blocks=8, latency=0.2, limits=limits)
    sim.run(3.0)
    for _ in range(3):
        sim.submit(policy="sequential", budget=25.0)
    sim.settle()
    assert all(isinstance(outcome, Complete) for outcome in outcomes(sim))


def test_a_relay_full_of_work_lets_answers_through():
    """Peers with answers that it refused had no credit for that work."""
    limits = Limits(credits=1, custody=2)
    relay = new_peer([], limits=limits)
    relay.meets("next", [0, 1, 2, 3])
    for number in range(4):
        relay.gets("laptop", run_of(transfer(number), budget=60.0))
        for sent in relay.sent(Forward, "next"):
            relay.hears("next", Accept(sent.transfer, 9))
    assert len(relay.machine.held) >= limits.custody
    answer = transfer(99, hop=3)
    relay.gets("next", run_of(answer, remaining=(), returning="done"))
    assert [accept.transfer for accept in relay.sent(Accept, "next")] == [answer]


def test_the_way_home_waits_for_a_process_that_refused_instead_of_a_dead_end():
    """The dead end dropped the tokens, and their source waited for half of the budget."""
    peer = new_peer([0])
    peer.meets("near", [], reaches=("x",))
    peer.meets("behind", [])
    visits = tuple(Visit(holder, (), 0, 0, 0) for holder in ("near", peer.machine.turn.name, "behind"))
    peer.gets("behind", run_of(source="x", remaining=(1,), returning="unreachable", visits=visits))
    (sent,) = peer.sent(Forward)
    assert sent.to == "near"
    peer.hears("near", Refuse(sent.transfer, RefuseReason.BUSY, 0))
    assert not peer.sent(Forward)
    peer.passes(2 * LOOK)
    assert [sent.to for sent in peer.sent(Forward)] == ["near"]


def test_tokens_of_a_canceled_request_are_not_offered_repeatedly_to_the_only_way_home():
    peer = new_peer()
    peer.meets("b", [2], reaches=("laptop",))
    peer.meets("c", [3])
    peer(NeighborDown("laptop", "cut"))
    peer.gets("c", run_of(transfer(), remaining=(), waves=((*BY_X[0], ((2, "b"), (3, "c"))),), returning="done"))
    (home,) = peer.sent(Forward, "b")
    peer.hears("b", Refuse(home.transfer, RefuseReason.CANCELED, 9))
    assert not peer.sent(Forward)
    assert [release.holder for release in peer.sent(Release, "c")] == ["b"]
    assert not peer.machine.held


def test_blocks_whose_only_holder_has_gone_are_skipped_after_a_while():
    """No STATE repeats what is outdated."""
    sim = FaultySimulation({name: [number] for number, name in enumerate("abcd")}, blocks=4, block_seconds=0.002)
    sim.run(0.5)
    sim.kill("d")
    request, began = sim.submit(max_skips=1), sim.now
    sim.settle()
    (outcome,) = sim.outcomes[request]
    assert outcome.itinerary.skipped == (3,)
    assert sim.ended[request] - began < SKIP_GRACE + 0.05
