"""Several routing machines together, in simulated time: partial reach, processes that go, peers that are full."""

import itertools

import pytest

from ls_edge.core.errors import BudgetExceeded
from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.simulation import FaultySimulation


def outcome(sim, request):
    (one,) = sim.outcomes[request]
    return one


def way_of(answer):
    return [step for wave in answer.itinerary.waves for track in wave for step in track]


def test_partial_reachability_uses_the_one_in_between():
    """The source reaches A, A reaches B, B reaches C, and nobody else anybody."""
    sim = FaultySimulation({"a": [0, 1], "b": [2], "c": [3]}, blocks=4)
    for pair in ((SOURCE, "b"), (SOURCE, "c"), ("a", "c")):
        sim.cut(*pair)
    sim.run(0.3)
    request = sim.submit()
    sim.settle()
    answer = outcome(sim, request)
    assert isinstance(answer, Complete)
    assert way_of(answer) == [(0, "a"), (1, "a"), (2, "b"), (3, "c")]
    assert answer.attempts == 1


def test_a_chain_of_five_goes_all_the_way_and_all_the_way_back():
    names = "abcde"
    sim = FaultySimulation({name: [number] for number, name in enumerate(names)}, blocks=5)
    chain = (SOURCE, *names)
    for one, other in itertools.combinations(range(6), 2):
        if other - one > 1:
            sim.cut(chain[one], chain[other])
    sim.run(0.3)
    requests = [sim.submit() for _ in range(5)]
    sim.settle()
    for request in requests:
        answer = outcome(sim, request)
        assert isinstance(answer, Complete)
        assert way_of(answer) == list(enumerate(names))
        assert answer.attempts == 1
    sim.run(1.0)
    assert all(not process.machine.held for name, process in sim.processes.items() if name != SOURCE)


def test_a_relay_without_blocks_of_its_own_left():
    """A has only block 0; what remains is behind B, which holds nothing that is wanted."""
    sim = FaultySimulation({"a": [0], "b": [0], "c": [1, 2, 3]}, blocks=4)
    sim.cut(SOURCE, "b")
    sim.cut(SOURCE, "c")
    sim.cut("a", "c")
    sim.run(0.3)
    request = sim.submit()
    sim.settle()
    answer = outcome(sim, request)
    assert isinstance(answer, Complete)
    assert way_of(answer) == [(0, "a"), (1, "c"), (2, "c"), (3, "c")]


def test_peers_that_reach_only_the_source_work_through_it():
    sim = FaultySimulation({"a": [0, 2], "b": [1, 3]}, blocks=4)
    sim.cut("a", "b")
    sim.run(0.3)
    requests = [sim.submit(policy="sequential"), sim.submit()]
    sim.settle()
    orders = [[block for block, _ in way_of(outcome(sim, request))] for request in requests]
    assert orders[0] == [0, 1, 2, 3]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_holder_and_keeper_killed_in_one_moment():
    sim = FaultySimulation({"a": [0, 1], "b": [2, 3], "c": [0, 1, 2, 3]}, blocks=4, block_seconds=0.05)
    sim.block_seconds["c"] = 0.2
    sim.run(0.3)
    requests = [sim.submit() for _ in range(4)]
    sim.run(0.15)
    sim.kill("a")
    sim.kill("b")
    sim.settle()
    answers = [outcome(sim, request) for request in requests]
    assert all(isinstance(answer, Complete) for answer in answers)
    assert all(answer.tokens == tuple(block for block, _ in way_of(answer)) for answer in answers)
    assert max(answer.attempts for answer in answers) == 2


def test_the_only_holder_gone_for_good_costs_a_skip():
    sim = FaultySimulation({"a": [0, 1, 2], "b": [3]}, blocks=4)
    sim.run(0.3)
    sim.kill("b")
    with_skips, without = sim.submit(max_skips=1), sim.submit(max_skips=0, budget=1.0)
    sim.settle()
    assert outcome(sim, with_skips).itinerary.skipped == (3,)
    assert isinstance(outcome(sim, without).error, BudgetExceeded)


def test_a_holder_that_comes_back_in_time_costs_nothing_but_the_wait():
    sim = FaultySimulation({"a": [0, 1, 2], "b": [3]}, blocks=4)
    sim.run(0.3)
    sim.kill("b")
    request = sim.submit(max_skips=0, budget=5.0)
    sim.run(1.0)
    sim.restart("b")
    sim.settle()
    assert [block for block, _ in way_of(outcome(sim, request))] == [0, 1, 2, 3]


def test_a_drained_peer_leaves_nothing_behind_and_nobody_waits():
    sim = FaultySimulation({"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}, blocks=4)
    sim.run(0.3)
    requests = [sim.submit() for _ in range(10)]
    sim.run(0.02)
    sim.drain("a")
    sim.settle()
    assert all(isinstance(outcome(sim, request), Complete) for request in requests)
    assert not sim.processes["a"].machine.held


def test_more_requests_than_credits_are_all_answered_in_time():
    sim = FaultySimulation({"a": [0, 1], "b": [2, 3]}, blocks=4, limits=Limits(credits=2, custody=4))
    sim.run(0.3)
    requests = [sim.submit(budget=20) for _ in range(40)]
    sim.settle()
    assert all(isinstance(outcome(sim, request), Complete) for request in requests)


@pytest.mark.parametrize("policy", ["random", "fastest"])
def test_requests_that_wait_in_long_queues_are_not_sent_again(policy):
    placement = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7], "c": [2, 3, 4, 5]}
    sim = FaultySimulation(placement, blocks=8, block_seconds=0.05)
    sim.run(0.5)
    requests = []
    for _ in range(48):
        requests.append(sim.submit(policy=policy, budget=60.0))
        sim.run(0.01)
    sim.settle()
    assert {outcome(sim, request).attempts for request in requests} == {1}


@pytest.mark.parametrize("policy", ["nearest", "parallel"])
def test_budgets_that_slow_peers_just_meet_are_not_wasted_on_branches(policy):
    """Queues of half a second took half of the budget: requests were sent again, and their engine calls lost."""
    front, back = (0, 1, 2, 3), (4, 5, 6, 7)
    placement = {"a": front, "b": front, "c": back, "d": back}
    sim = FaultySimulation(placement, blocks=8, block_seconds=0.04)
    sim.run(0.3)
    requests = []
    while len(requests) < 60:
        waiting = [request for request in requests if not sim.outcomes[request]]
        requests += [sim.submit(policy=policy, budget=1.0) for _ in range(8 - len(waiting))]
        sim.run(0.01)
    sim.settle()
    answered = [request for request in requests if isinstance(outcome(sim, request), Complete)]
    assert len(answered) >= 0.9 * len(requests)


def test_a_relative_of_a_deadlock_two_full_peers_that_need_each_other():
    """Each holds all it may and wants to send to the other: waiting is bounded and ends at the source."""
    sim = FaultySimulation({"a": [0, 2], "b": [1, 3]}, blocks=4, limits=Limits(credits=1, custody=1))
    sim.run(0.3)
    requests = [sim.submit(policy="sequential", budget=30) for _ in range(8)]
    sim.settle(120)
    assert all(isinstance(outcome(sim, request), Complete) for request in requests)


def test_a_skip_does_not_wait_for_the_budget_where_nobody_is_left():
    sim = FaultySimulation({"a": range(3), "b": range(3)}, blocks=3)
    sim.run(0.2)
    sim.kill("a")
    sim.kill("b")
    request = sim.submit(max_skips=3, budget=10.0)
    sim.run(0.5)
    (answer,) = sim.outcomes[request]
    assert answer.itinerary.skipped == (0, 1, 2)
