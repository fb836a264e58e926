"""Members with a key that lie in a sparse network, where the source has no link to some peers."""

import itertools
import random

import msgspec
import pytest

from ls_edge.runtime.protocol.messages import Accept, Progress, Refuse, RefuseReason, Release, Run, State
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.events import Complete, Forward
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults import lies as kinds
from tests.faults.liar import Liar, Lie
from tests.faults.lies import LIES
from tests.faults.simulation import FaultySimulation
from tests.runtime.routing.driver import BY_X, Driver, new_peer, run_of, submits, transfer

BLOCKS = 4
ALL = tuple(range(BLOCKS))
BUDGET = 4.0


def sparse(placement, links, lies=None, **settings):
    """Return a simulation with these links alone; ``lies`` are those of members, by process."""
    sim = FaultySimulation(placement, blocks=BLOCKS, validate=True, **settings)
    for name, lie in (lies or {}).items():
        liar = Liar(name, placement[name], BLOCKS, lie, lambda *_: None, ("spoilt",))
        sim.processes[name].machine = liar
    linked = {frozenset(link) for link in links}
    for one, other in itertools.combinations((SOURCE, *placement), 2):
        if frozenset((one, other)) not in linked:
            sim.cut(one, other)
    sim.run(0.5)
    return sim


def in_a_line(*names):
    return list(itertools.pairwise((SOURCE, *names)))


def answers(sim, requests):
    """Wait for all outcomes; return the answers."""
    sim.settle()
    found = [sim.outcomes[request][0] for request in requests]
    return [outcome for outcome in found if isinstance(outcome, Complete)]


@pytest.mark.parametrize("policy", ["fastest", "parallel"])
@pytest.mark.parametrize("lie", ["releases", "growth"])
@pytest.mark.parametrize("pq", [True, False])
def test_a_liar_out_of_the_source_s_reach_fails_no_request(policy, lie, pq):
    """Its neighbor drops its copy on RELEASE, and would hand each further branch to the liar again."""
    links = [(SOURCE, "p"), (SOURCE, "q"), ("p", "liar"), *([("p", "q")] if pq else [])]
    seconds = {"p": 0.005, "q": 0.005, "liar": 0.0001}
    sim = sparse(dict.fromkeys(seconds, ALL), links, {"liar": LIES[lie]}, block_seconds=seconds)
    requests = []
    for _ in range(8):
        requests.append(sim.submit(policy=policy, budget=BUDGET))
        sim.run(0.5)
    found = answers(sim, requests)
    assert len(found) == len(requests)
    assert all(answer.attempts <= 2 for answer in found)
    assert sim.processes["liar"].machine.counts.received


@pytest.mark.parametrize(("lie", "deadlines"), [("releases", 1), ("progress", 2), ("growth", 3)])
@pytest.mark.parametrize("policy", ["fastest", "parallel"])
def test_in_a_full_mesh_a_liar_that_keeps_a_request_costs_few_deadlines(policy, lie, deadlines):
    """One that reported progress cost half of the budget."""
    seconds = {"p": 0.005, "q": 0.005, "liar": 0.0001}
    links = itertools.combinations((SOURCE, *seconds), 2)
    sim = sparse(dict.fromkeys(seconds, ALL), links, {"liar": LIES[lie]}, block_seconds=seconds)
    for budget in (BUDGET, BUDGET, 60.0, 60.0):
        began, request = sim.now, sim.submit(policy=policy, budget=budget)
        assert answers(sim, [request])
        assert sim.ended[request] - began < deadlines * Limits().hop_floor + 0.1
        sim.run(0.5)
    assert sim.processes["liar"].machine.counts.received


@pytest.mark.parametrize("lie", ["releases", "progress", "growth"])
@pytest.mark.parametrize("policy", ["fastest", "nearest", "parallel", "random"])
def test_a_liar_that_keeps_a_request_fails_none_with_a_budget_of_two_deadlines(policy, lie):
    seconds = {"p": 0.02, "q": 0.02, "liar": 0.0001}
    links = itertools.combinations((SOURCE, *seconds), 2)
    sim = sparse(dict.fromkeys(seconds, ALL), links, {"liar": LIES[lie]}, block_seconds=seconds)
    requests = []
    for _ in range(6):
        requests.append(sim.submit(policy=policy, budget=2 * Limits().hop_floor))
        sim.run(0.2)
    assert len(answers(sim, requests)) == len(requests)


@pytest.mark.parametrize("others", [True, False])
def test_a_holder_that_reports_progress_keeps_a_request_only_if_no_other_could_continue(others):
    """In a full mesh every neighbor announces the blocks of all, and seemed to lead to another holder."""
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    source.meets("only", [0], reaches=("other",), reach_blocks=(0, 1, 2, 3))
    source.meets("other", [0, 1, 2, 3] if others else [1, 2, 3], reaches=("only",), reach_blocks=(0, 1, 2, 3))
    submits(source, budget=BUDGET, policy="sequential")
    (sent,) = source.sent(Forward)
    source.hears(sent.to, Accept(sent.transfer, 9))
    again = []
    for _ in range(30):
        again += source.hears(sent.to, Progress(sent.transfer, 0), 0.05)
        again += source.passes(0.05)
    assert any(isinstance(one, Forward) for one in again) == others


@pytest.mark.parametrize("policy", ["nearest", "fastest", "sequential"])
def test_the_only_way_is_taken_again_after_both_processes_with_the_tokens_were_lost(policy):
    sim = sparse({"a": (0,), "b": (1, 2), "c": (3,)}, in_a_line("a", "b", "c"), block_seconds=0.05)
    sim.run(1.0)
    request = sim.submit(policy=policy, budget=BUDGET)
    while not sim.busy["c"]:
        sim.run(0.005)
    sim.run(0.02)
    assert not sim.processes["a"].machine.held
    sim.kill("b")
    sim.kill("c")
    sim.run(0.1)
    sim.restart("b")
    sim.restart("c")
    assert answers(sim, [request])


@pytest.mark.parametrize("policy", ["fastest", "nearest", "random"])
def test_a_faster_holder_that_the_source_cannot_reach_does_not_stop_requests_through_the_source(policy):
    """The linked holder returned each request without running a block, since another would be faster."""
    seconds = {"slow": 0.005, "fast": 0.0001}
    sim = sparse(dict.fromkeys(seconds, ALL), in_a_line("slow", "fast"), block_seconds=seconds)
    requests = [sim.submit(policy=policy, budget=BUDGET, via_source=True) for _ in range(4)]
    found = answers(sim, requests)
    assert len(found) == len(requests)
    assert all(answer.attempts == 1 for answer in found)
    assert not sim.busy["fast"]


@pytest.mark.parametrize("policy", ["fastest", "parallel"])
def test_copies_that_a_liar_makes_a_peer_keep_have_a_bound(policy):
    """The only holder of a block accepts, returns the tokens for lack of credit, and reports progress on each copy."""
    keeps = Lie(kinds._return("credit"), kinds._progress(0))
    placement = {"a": (0, 1, 2), "liar": (3,)}
    limits = Limits().with_credits(4)
    sim = sparse(placement, itertools.combinations((SOURCE, *placement), 2), {"liar": keeps}, limits=limits)
    request, most = sim.submit(policy=policy, budget=BUDGET), 0
    while not sim.outcomes[request]:
        sim.run(0.05)
        most = max(most, len(sim.processes["a"].machine.held))
    assert sim.processes["liar"].machine.counts.received > limits.credits + limits.custody
    assert most <= limits.credits + limits.custody


@pytest.mark.release
@pytest.mark.parametrize("at", [("a",), ("b", "c")])
def test_a_line_answers_again_after_a_flood_of_work_without_a_source(at):
    """A peer that does not see all processes cannot know that a source does not exist; its work had 600 s."""
    placement = {"a": (0,), "b": (1,), "c": (2, 3), "liar": ALL}
    links = [*in_a_line("a", "b", "c"), *(("liar", name) for name in at)]
    sim = sparse(placement, links, {"liar": LIES["floods"]})
    sim.run(2.0)
    assert any(sim.processes[name].machine.held for name in "abc")
    sim.kill("liar")
    sim.run(3.0)
    requests = [sim.submit(policy="sequential", budget=BUDGET) for _ in range(8)]
    assert len(answers(sim, requests)) == len(requests)
    assert not any(sim.processes[name].machine.held for name in "abc")


@pytest.mark.release
@pytest.mark.parametrize(("at", "latency"), [("a", 0.005), ("bc", 0.005), ("bc", 0.05), ("ab", 0.1), ("c", 0.0005)])
def test_a_line_answers_during_a_flood_of_work_without_a_source(at, latency):
    """Peers share credits and turns among neighbors; work that comes back counts for those that it came from first.

    The flood made the peers full of work that waited for credits of one another, and its returns filled them too.
    """
    placement = {"a": (0,), "b": (1,), "c": (2, 3), "liar": ALL}
    links = [*in_a_line("a", "b", "c"), *(("liar", name) for name in at)]
    sim = sparse(placement, links, {"liar": LIES["floods"]}, latency=latency)
    sim.run(2.0)
    requests = []
    for _ in range(4):
        requests.append(sim.submit(policy="sequential", budget=BUDGET))
        sim.run(0.5)
    assert len(answers(sim, requests)) == len(requests)


@pytest.mark.parametrize("policy", ["sequential", "fastest"])
def test_a_holder_that_never_has_a_credit_does_not_hide_the_way_to_others(policy):
    """It refuses everything as busy; its neighbors waited for it instead of going through ``b``."""
    placement = {"a": (0,), "b": (0,), "c": (1, 2, 3), "liar": ALL}
    sim = sparse(placement, [*in_a_line("a", "b", "c"), ("liar", "a")], {"liar": LIES["forges"]})
    requests = [sim.submit(policy=policy, budget=BUDGET) for _ in range(2)]
    assert len(answers(sim, requests)) == len(requests)


def test_tokens_return_to_the_keeper_of_their_copy_without_a_credit_and_count_for_their_first_sender():
    """Two peers that fill each other up would wait until they give up."""
    peer = new_peer([0], limits=Limits().with_credits(1))
    peer.meets("b", [1, 2, 3], credit=0)
    peer.gets("b", run_of(source="far"))
    peer.computes_next()
    (back,) = peer.sent(Forward)
    assert back.to == "b"
    keeper = new_peer([1], limits=Limits().with_credits(1))
    keeper.meets("first")
    keeper.meets("next", [0])
    keeper.meets("full", [2, 3], credit=0)
    keeper.gets("first", run_of(source="far"))
    (sent,) = keeper.sent(Forward)
    keeper.hears(sent.to, Accept(sent.transfer, 0))
    keeper.gets("first", run_of(transfer(1), source="far", remaining=(2, 3)))
    again = run_of(transfer(hop=3), source="far", remaining=(1, 2, 3))
    keeper.gets("next", again)
    assert [accept.transfer for accept in keeper.sent(Accept, "next")] == [again.transfer]
    assert keeper.machine.custody.credits.working_of == {"first": 2}


def test_a_source_that_never_was_linked_gets_nothing_back():
    """Returns of such work filled a relay, which then refused those that have a way home."""
    peer = new_peer(blocks=())
    peer.meets("liar", [])
    peer.meets("next", [0, 1, 2, 3], reaches=("further",))
    peer.gets("liar", run_of(source="ghost"))
    (sent,) = peer.sent(Forward)
    peer.hears("next", Accept(sent.transfer, 9))
    visited = sent.itinerary.visits
    peer.gets("next", run_of(transfer(hop=3), source="ghost", returning="unreachable", visits=visited))
    assert not peer.machine.held


@pytest.mark.parametrize("lie", ["releases", "silent"])
def test_a_liar_with_all_blocks_is_avoided_for_holders_out_of_sight(lie):
    """It seemed to be the only holder, so nobody was told to avoid it, and ``a`` handed each branch to it again."""
    links = [*in_a_line("a", "b", "c"), (SOURCE, "liar"), ("liar", "a")]
    sim = sparse({"a": (0,), "b": (0,), "c": (1, 2, 3), "liar": ALL}, links, {"liar": LIES[lie]})
    request = sim.submit(policy="nearest", budget=BUDGET)
    assert answers(sim, [request])


def test_tokens_that_come_back_by_another_way_wait_before_they_go_out_again():
    """Peers may announce a holder that is gone; tokens went round some hundred times in a second."""
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    source.meets("out", [], reaches=("x", "home"), reach_blocks=(0, 1, 2, 3))
    source.meets("home", [], reaches=("x", "out"))
    submits(source, budget=BUDGET)
    (sent,) = source.sent(Forward)
    source.hears("out", Accept(sent.transfer, 9))
    back = Run(sent.transfer._replace(hop=3), 10**6, sent.itinerary, "raw", 1, 1, "unreachable")
    source.gets("home", back)
    assert not source.sent(Forward)
    source.passes(Limits().pause + Limits().look_again)
    assert [again.to for again in source.sent(Forward)] == ["out"]


def test_tokens_that_a_full_relay_refuses_wait_before_they_are_offered_again():
    peer = new_peer(limits=Limits())
    peer.meets("relay", [2, 3])
    peer.hears_state("relay", reaches=("far",))
    peer.gets("relay", run_of(source="far", returning="done", remaining=(), waves=BY_X))
    (home,) = peer.sent(Forward)
    peer.said.clear()
    peer.hears("relay", Refuse(home.transfer, RefuseReason.BUSY, 0), 0.001)
    assert not peer.sent(Forward)
    peer.passes(Limits().pause)
    assert [again.to for again in peer.sent(Forward)] == ["relay"]


def test_a_request_of_a_lost_source_is_dropped_by_the_keeper_of_the_copy_too():
    """The keeper sees further peers, so it would offer its copy again and again, until the end of the budget."""
    peer = new_peer()
    peer.meets("keeper", [2, 3])
    peer.gets("keeper", run_of(source="lost", budget=600.0))
    peer.passes(2 * Limits().away_floor)
    assert [dropped.transfer for dropped in peer.sent(Release, "keeper")] == [transfer()]
    assert not peer.machine.held


def test_a_budget_is_reduced_by_the_time_of_the_transfer():
    """Tokens that go from peer to peer on slow links must not outlive their budget."""
    seconds = 0.8
    peer = new_peer(blocks=())
    peer.meets("next", [0, 1, 2, 3])
    peer.gets("laptop", run_of(budget=5.0))
    (first,) = peer.sent(Forward)
    peer.hears("next", Accept(first.transfer, 9), seconds)
    peer.gets("laptop", run_of(transfer(2), budget=5.0))
    (second,) = peer.sent(Forward)
    assert (first.budget_us, second.budget_us) == (5_000_000, round((5.0 - seconds / 2) * 1e6))


def test_state_tells_a_relay_of_the_room_that_is_kept_for_it():
    """All credits are held by work of another peer; a relay may be the only way of sources, so it may send some."""
    peer = new_peer(limits=Limits().with_credits(4))
    for name in ("relay", "other"):
        peer.meets(name, [2, 3])
    peer.hears_state("relay", reaches=("far",))
    for number in range(4):
        peer.gets("other", run_of(transfer(number), source="far"))
    rules = peer.machine.rules
    assert rules.state("relay").credits == rules.credits_for("relay") > 0
    assert not rules.state("other").credits


def test_a_relay_that_has_more_than_its_share_is_told_of_no_credits():
    """The number was negative, which makes the message malformed."""
    peer = new_peer(limits=Limits().with_credits(4))
    peer.meets("relay", [2, 3])
    peer.hears_state("relay", reaches=("far",))
    for number in range(4):
        peer.gets("relay", run_of(transfer(number), source="far"))
    peer.gets("laptop", run_of(transfer(4)))
    state = peer.machine.rules.state("relay")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State).credits == 0
