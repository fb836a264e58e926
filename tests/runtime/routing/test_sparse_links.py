"""Sparse links with many requests at once: most peers have no link to the source, and no credit for all that comes."""

import itertools
from collections import Counter

import pytest

from ls_edge.runtime.protocol.messages import Accept, Refuse, RefuseReason, Release, Visit
from ls_edge.runtime.routing.state.events import Complete, Fail, Forward, NeighborDown
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.simulation import FaultySimulation
from tests.runtime.routing.driver import BY_X, new_peer, run_of, transfer

REQUESTS = 40
BLOCK_S, SLOW_S = 0.005, 0.05
IN_ORDER = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "d": (6, 7)}
CROSSING = {"a": (0, 1), "b": (4, 5), "c": (2, 3), "d": (6, 7)}
"""From c back to b, and past c to d: b and c both wait for each other's credit."""


def line_of(placement, slow=""):
    """The source reaches the first peer alone, each peer the one before and the one after."""
    seconds = {name: SLOW_S if name == slow else BLOCK_S for name in placement}
    sim = FaultySimulation(placement, blocks=8, block_seconds=seconds, validate=True)
    for (at, one), (to, other) in itertools.combinations(enumerate((SOURCE, *placement)), 2):
        if to - at > 1:
            sim.cut(one, other)
    sim.run(0.5)
    return sim


def settle(sim):
    """Run until the end; return the most that each peer has held."""
    most = Counter()
    while sim.source.rules.requests:
        sim.run(0.02)
        for name in sim.busy:
            most[name] = max(most[name], len(sim.processes[name].machine.held))
    return most


def outcomes(sim):
    return [outcome for (outcome,) in sim.outcomes.values()]


@pytest.mark.parametrize(
    ("placement", "slow", "policy"),
    [(IN_ORDER, "c", "fastest"), (IN_ORDER, "d", "nearest"), (CROSSING, "b", "sequential"), (CROSSING, "b", "random")],
)
def test_all_are_answered_and_each_block_runs_once(placement, slow, policy):
    sim = line_of(placement, slow)
    for _ in range(REQUESTS):
        sim.submit(policy=policy, budget=20.0)
    most = settle(sim)
    assert all(isinstance(outcome, Complete) and outcome.attempts == 1 for outcome in outcomes(sim))
    work = {name: REQUESTS * 2 * (SLOW_S if name == slow else BLOCK_S) for name in placement}
    assert sim.busy == pytest.approx(work)
    limits = Limits()
    assert max(most.values()) <= limits.credits + limits.custody
    assert max(sim.ended.values()) < 0.5 + 1.5 * max(work.values())


BACKWARDS = {"a": (4,), "b": (3,), "c": (2,), "d": (1,), "e": (0,)}
CROSSED = {"a": (1,), "b": (4,), "c": (2,), "d": (3,), "e": (0,)}
RING = {"a": (1,), "b": (2,), "c": (3,), "d": (4,), "e": (0,)}
"""The source and a, then b, c and d with links between all three, and e behind d."""


def sparse(placement, *links):
    sim = FaultySimulation(placement, blocks=5, block_seconds=BLOCK_S, validate=True)
    wanted = {frozenset(link) for link in links}
    for one, other in itertools.combinations((SOURCE, *placement), 2):
        if frozenset((one, other)) not in wanted:
            sim.cut(one, other)
    sim.run(1.0)
    return sim


def in_a_line(placement):
    return sparse(placement, *itertools.pairwise((SOURCE, *placement)))


def test_tokens_replace_the_copy_of_a_relay_that_has_a_link_to_the_source():
    """A relay full of copies refused the tokens whose acceptance would have ended them, until the budgets ended."""
    placement = {
        "a": (2, 6),
        "b": (0, 1, 2, 4, 5, 7),
        "c": (0, 1, 2, 3, 5, 6),
        "d": (0, 2, 3, 4, 5, 6),
        "e": (0, 1, 3, 7),
    }
    limits = Limits(credits=1, custody=2)
    sim = FaultySimulation(placement, blocks=8, latency=0.2, limits=limits, validate=True)
    for one, other in itertools.combinations(placement, 2):
        if one != "a":
            sim.cut(one, other)
    for leaf in "bcde":
        sim.cut(SOURCE, leaf)
    sim.run(3.0)
    for _ in range(3):
        sim.submit(policy="sequential", budget=25.0)
    sim.settle()
    assert all(isinstance(outcome, Complete) for outcome in outcomes(sim))


def test_what_peers_return_has_a_bound_of_its_own():
    """A source fills the places of the copies that its tokens replaced; then peers have passed on enough."""
    limits = Limits(credits=1, custody=2)
    relay = new_peer([], limits=limits)
    relay.meets("x", role="source")
    relay.meets("first", [0])
    relay.meets("last", [1, 2, 3])
    held = []
    for number in range(12):
        relay.gets("x", run_of(transfer(number), source="x", budget=60.0))
        for sent in relay.sent(Forward, "first"):
            relay.hears("first", Accept(sent.transfer, 9))
            relay.gets("first", run_of(transfer(number, hop=3), source="x", remaining=(1, 2, 3), budget=60.0))
        for sent in relay.sent(Forward, "last"):
            relay.hears("last", Accept(sent.transfer, 9))
        relay.passes(limits.starved)
        held.append(len(relay.machine.held))
    assert max(held) == 2 * (limits.credits + limits.custody)


def test_a_relay_full_of_work_of_its_source_lets_answers_through():
    """Peers with answers that it refused had no credit for that work."""
    limits = Limits(credits=1, custody=2)
    relay = new_peer([], limits=limits)
    relay.meets("x", role="source")
    relay.meets("next", [0, 1, 2, 3])
    for number in range(4):
        relay.gets("x", run_of(transfer(number), source="x", budget=60.0))
        for sent in relay.sent(Forward, "next"):
            relay.hears("next", Accept(sent.transfer, 9))
        relay.passes(limits.starved)
    assert len(relay.machine.held) == limits.credits + limits.custody
    answer = transfer(99, hop=3)
    relay.gets("next", run_of(answer, source="x", remaining=(), returning="done"))
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
    peer.passes(2 * Limits().pause)
    assert [sent.to for sent in peer.sent(Forward)] == ["near"]


def announced(sim, name, to):
    return sim.processes[name].machine.rules.state(to).far_blocks


@pytest.mark.parametrize("policy", ["sequential", "nearest"])
@pytest.mark.parametrize("placement", [BACKWARDS, CROSSED])
def test_the_first_block_may_be_many_links_away(placement, policy):
    """Only two links were announced, so the policy that keeps the order found no way and ran nothing."""
    sim = in_a_line(placement)
    for _ in range(10):
        sim.submit(policy=policy, budget=20.0)
    sim.settle()
    assert all(isinstance(outcome, Complete) and outcome.attempts == 1 for outcome in outcomes(sim))
    if policy == "sequential":
        assert {o.itinerary.arrangement.order for o in outcomes(sim)} == {(0, 1, 2, 3, 4)}


def test_blocks_are_announced_with_their_distance_and_not_back_to_their_reporter():
    sim = in_a_line(BACKWARDS)
    assert announced(sim, "a", SOURCE) == ((2,), (1,), (0,))
    assert announced(sim, "b", "a") == ((1,), (0,))
    assert announced(sim, "c", "b") == ((0,),)
    assert announced(sim, "c", "d") == ((4,),)
    assert announced(sim, "d", "c") == ()
    assert announced(FaultySimulation(BACKWARDS, blocks=5), "a", SOURCE) == ()  # everybody is linked with everybody


def test_a_way_that_ends_and_comes_back():
    sim = in_a_line(BACKWARDS)
    sim.cut("c", "d")
    request = sim.submit(policy="sequential", budget=3.0)  # before anybody has heard of it
    sim.run(1.0)
    assert announced(sim, "a", SOURCE) == ((2,),)
    late = sim.submit(policy="sequential", budget=2.0)
    lost = sim.submit(policy="sequential", budget=0.5)
    sim.run(1.0)
    assert not sim.outcomes[request]
    assert isinstance(sim.outcomes[lost][0], Fail)
    sim.restore("c", "d")
    sim.settle()
    assert {type(sim.outcomes[one][0]) for one in (request, late)} == {Complete}
    assert all(not process.machine.held for process in sim.processes.values())


def test_news_of_a_holder_that_has_gone_ends_where_links_form_a_circle_and_nothing_circulates(monkeypatch):
    links = [(SOURCE, "a"), ("a", "b"), ("b", "c"), ("c", "d"), ("b", "d"), ("d", "e")]
    sim = sparse(RING, *links)
    assert 0 in announced(sim, "a", SOURCE)[1]
    sent = []
    execute = FaultySimulation._execute
    monkeypatch.setattr(FaultySimulation, "_execute", lambda self, process, instruction: (
        sent.append(instruction) if isinstance(instruction, Forward) else None, execute(self, process, instruction)
    ))  # fmt: skip
    sim.kill("e")
    request = sim.submit(policy="sequential", budget=4.0)
    sim.run(1.0)
    assert all(0 not in far for name in "abcd" for to in (SOURCE, *"abcd") for far in announced(sim, name, to))
    sim.settle()
    assert isinstance(sim.outcomes[request][0], Fail)
    assert max(forward.transfer.hop for forward in sent) <= 8  # to d and home again
    assert len(sent) < 60
    sim.restart("e")
    sim.run(0.7)
    request = sim.submit(policy="sequential", budget=4.0)
    sim.settle()
    assert isinstance(sim.outcomes[request][0], Complete)


def test_tokens_far_from_their_source_are_not_dropped_while_more_arrive():
    sim = line_of(IN_ORDER)
    for _ in range(100):
        sim.submit(budget=10.0)
        sim.run(0.015)
    settle(sim)
    assert {type(outcome) for outcome in outcomes(sim)} == {Complete}
    assert not sim.notes


def test_a_peer_that_has_lost_its_link_to_the_source_still_answers_through_others():
    """Each second, it dropped the work of a source that it could no longer see."""
    sim = sparse({"a": (0, 1), "b": (2, 3), "c": (4,)}, (SOURCE, "a"), (SOURCE, "c"), ("a", "b"), ("b", "c"))
    sim.cut(SOURCE, "c")
    sim.run(0.5)
    for _ in range(120):
        sim.submit(budget=30.0)
        sim.run(0.02)
    sim.settle()
    assert all(isinstance(outcome, Complete) and outcome.attempts == 1 for outcome in outcomes(sim))


def test_a_block_that_only_waits_for_a_credit_is_not_skipped():
    sim = line_of(IN_ORDER, "d")
    for _ in range(REQUESTS):
        sim.submit(max_skips=2, budget=20.0)
    settle(sim)
    assert {outcome.itinerary.skipped for outcome in outcomes(sim)} == {()}


def test_a_peer_in_the_middle_that_is_killed_and_comes_back():
    sim = line_of(IN_ORDER, "d")
    for _ in range(20):
        sim.submit(budget=30.0)
    sim.run(0.5)
    sim.kill("c")
    sim.run(0.5)
    sim.restart("c")
    settle(sim)
    assert {type(outcome) for outcome in outcomes(sim)} == {Complete}


def test_tokens_that_come_home_before_the_source_of_a_restarted_peer_are_not_missed():
    """The first holder drops them, since it has not heard of their source; the source sent its own copy again."""
    sim = line_of({"a": (0, 1), "b": tuple(range(2, 8))}, "b")
    request = sim.submit(budget=3.0)
    while not sim.busy["b"]:
        sim.run(0.001)
    sim.kill("a")
    sim.restart("a")
    sim.cut(SOURCE, "a")
    began = sim.now
    sim.run(6 * SLOW_S + 0.1)
    assert [note.why for _, name, note in sim.notes if (name, note.what) == ("a", "dropped")] == [
        "its source was never linked"
    ]
    sim.restore(SOURCE, "a")
    settle(sim)
    (outcome,) = sim.outcomes[request]
    assert isinstance(outcome, Complete)
    assert outcome.attempts == 2
    assert sim.ended[request] - began < 2.5 * 6 * SLOW_S


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


def test_between_peers_that_all_have_links_nobody_is_told_what_it_hears_itself():
    """And so nobody goes on hearing of blocks whose only holder has gone: they are skipped after ``skip_grace``."""
    sim = FaultySimulation({name: [number] for number, name in enumerate("abcd")}, blocks=4, block_seconds=0.002)
    sim.run(0.5)
    for name in "abcd":
        machine = sim.processes[name].machine
        assert all(machine.rules.state(other).far_blocks == () for other in (*"abcd", SOURCE) if other != name)
    sim.kill("d")
    request, began = sim.submit(max_skips=1), sim.now
    sim.settle()
    (outcome,) = sim.outcomes[request]
    assert outcome.itinerary.skipped == (3,)
    assert sim.ended[request] - began < Limits().skip_grace + 0.05  # no STATE repeats what is outdated


def test_a_ring_hears_of_both_ways_round():
    """Each of six peers has links to two others, so each is told what lies the other way round."""
    names = "abcdef"
    sim = FaultySimulation({name: [number] for number, name in enumerate(names)}, blocks=6)
    for one, other in itertools.combinations(range(6), 2):
        if other - one not in (1, 5):
            sim.cut(names[one], names[other])
    sim.run(2.0)
    assert sim.processes["a"].machine.rules.state("b").far_blocks == ((4,), (3,), (2,))
    assert sim.processes["a"].machine.rules.state("f").far_blocks == ((2,), (3,), (4,))
