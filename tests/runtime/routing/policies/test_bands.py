"""Bands in routing: what may run next, for every policy; what happens to blocks that nobody holds any more."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ls_edge.core.bands import Bands
from ls_edge.core.errors import BudgetExceeded
from ls_edge.runtime.protocol.messages import Accept, Itinerary
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.routing.policies.policy import RunHere, SendTo
from ls_edge.runtime.routing.policies.wave_planner import plan_wave
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.candidates import LocalNode, Model
from ls_edge.runtime.routing.state.events import Arrived, Complete, Fail, Forward
from ls_edge.runtime.routing.state.limits import Limits
from tests.faults.simulation import FaultySimulation
from tests.runtime.routing.driver import Candidate, Driver, run_of, submits

BLOCKS = 8
ENDS = Bands.from_json("0/1-6/7")


def way(outcome):
    return [block for wave in outcome.itinerary.waves for track in wave for block, _ in track]


def outcome_of(sim, request):
    (one,) = sim.outcomes[request]
    return one


@st.composite
def situations(draw):
    bands = Bands(BLOCKS, tuple(cut for cut in range(1, BLOCKS) if draw(st.booleans())))
    some = st.sets(st.integers(0, BLOCKS - 1)).map(frozenset)
    remaining = bands.sort(draw(st.permutations(sorted(draw(st.sets(st.integers(0, BLOCKS - 1), min_size=1))))))
    others = [
        Candidate(name, draw(some), draw(some), draw(st.integers(0, 2)), draw(st.integers(0, 9000)), 1000, 500, 900)
        for name in "bcd"
    ]
    return bands, remaining, draw(some), others


@pytest.mark.parametrize("policy", list(POLICIES))
@given(situation=situations(), seed=st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_every_policy_chooses_what_may_run(policy, situation, seed):
    bands, remaining, own, others = situation
    local = LocalNode(own, 0, 1000, Model(bands))
    itinerary = Itinerary("s", policy, remaining, 0, waves_wanted=2)
    permitted = set(bands.permitted(remaining))
    choice = POLICIES[policy].next_step(itinerary, local, others, patient=False, tie_break=seed)
    if isinstance(choice, RunHere):
        assert choice.block in permitted & own
    elif isinstance(choice, SendTo):
        chosen = next(c for c in others if c.name == choice.holder)
        assert permitted & (chosen.reach_blocks if choice.relay else chosen.blocks)
    else:
        assert not own & (permitted if POLICIES[policy].may_reorder else set(remaining[:1]))
    tracks = plan_wave(itinerary, "a", local, others)
    assert (not tracks) == (not permitted & own)
    if tracks:
        blocks = [block for track in tracks for block in track.blocks]
        assert set(blocks) <= permitted
        assert len(set(blocks)) == len(blocks) > 0
    order = POLICIES[policy].wanted_order(bands, seed, 5)
    assert sorted(order) == list(range(BLOCKS))
    assert list(map(bands.band_of, order)) == sorted(map(bands.band_of, order))


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_answer_of_a_swarm_is_within_the_bands(policy):
    bands = Bands.from_json("0-1/2-6/7")
    placement = {"a": [1, 4, 5, 7], "b": [0, 2, 6], "c": [0, 1, 3, 4, 5], "d": [2, 3, 6, 7]}
    sim = FaultySimulation(placement, blocks=BLOCKS, bands=bands, max_batch=2, validate=True)
    sim.run(0.3)
    requests = [sim.submit(policy=policy, budget=20.0) for _ in range(12)]
    sim.settle()
    found = [outcome_of(sim, request) for request in requests]
    assert all(isinstance(one, Complete) for one in found)
    for one in found:
        assert not bands.fault(one.itinerary.arrangement)
        assert one.tokens == tuple(way(one))
    orders = {tuple(way(one)) for one in found}
    if policy == "sequential":
        assert orders == {tuple(range(BLOCKS))}
    elif policy == "random":
        assert len(orders) > 1


def test_waves_are_those_of_a_band():
    sim = FaultySimulation({name: range(BLOCKS) for name in "abc"}, blocks=BLOCKS, bands=ENDS, latency=0.0002)
    sim.run(0.3)
    answer = None
    for _ in range(4):
        request = sim.submit(policy="parallel", waves_wanted=1)
        sim.settle()
        answer = outcome_of(sim, request)
    wide = [wave for wave in answer.itinerary.waves if len(wave) > 1]
    assert len(wide) == 1
    assert sorted(block for track in wide[0] for block, _ in track) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.may_skip])
def test_without_the_only_holder_of_a_first_band_it_is_skipped_and_the_rest_runs(policy):
    sim = FaultySimulation({"a": range(1, BLOCKS), "b": [0]}, blocks=BLOCKS, bands=ENDS)
    sim.run(0.3)
    sim.kill("b")
    request = sim.submit(policy=policy, max_skips=1, budget=10.0)
    sim.settle()
    answer = outcome_of(sim, request)
    assert isinstance(answer, Complete)
    assert answer.itinerary.skipped == (0,)
    assert sorted(way(answer)) == [1, 2, 3, 4, 5, 6, 7]
    assert way(answer)[-1] == 7
    assert answer.why_skipped == "block 0 of band [0] (1 of 3) had no reachable holder"
    assert sim.ended[request] < sim.now


@pytest.mark.parametrize(("policy", "skips"), [("sequential", 0), ("nearest", 0), ("fastest", 0)])
def test_a_request_that_may_skip_nothing_waits_until_its_budget_ends(policy, skips):
    sim = FaultySimulation({"a": range(1, BLOCKS), "b": [0]}, blocks=BLOCKS, bands=ENDS)
    sim.run(0.3)
    sim.kill("b")
    request = sim.submit(policy=policy, max_skips=skips, budget=1.0)
    begun = sim.now
    sim.settle()
    failed = outcome_of(sim, request)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, BudgetExceeded)
    assert 0.9 < sim.ended[request] - begun <= 1.0
    assert way(failed) == []
    assert str(failed.error).endswith(
        "block 0 of band [0] (1 of 3) had no reachable holder within the budget, so blocks 1-7 could not run; "
        "at most 0 may be skipped; check the peers, or raise --budget-ms" + " or --max-skips" * (policy != "sequential")
    )


def test_a_holder_that_returns_in_time_costs_only_the_wait():
    sim = FaultySimulation({"a": range(1, BLOCKS), "b": [0]}, blocks=BLOCKS, bands=ENDS)
    sim.run(0.3)
    sim.kill("b")
    request = sim.submit(policy="nearest", budget=5.0)
    sim.run(1.0)
    assert not sim.outcomes[request]
    sim.restart("b")
    sim.settle()
    assert way(outcome_of(sim, request)) == list(range(BLOCKS))


def test_in_the_middle_the_other_blocks_of_a_band_run_first():
    sim = FaultySimulation({"a": [0, 2, 3, 4, 5, 6, 7], "b": [1]}, blocks=BLOCKS, bands=ENDS)
    sim.run(0.3)
    sim.kill("b")
    request = sim.submit(max_skips=1, budget=10.0)
    sim.settle()
    answer = outcome_of(sim, request)
    assert way(answer) == [0, 2, 3, 4, 5, 6, 7]
    assert answer.why_skipped == "block 1 of band [1-6] (2 of 3) had no reachable holder"


def test_several_bands_are_skipped_one_after_the_other():
    sim = FaultySimulation({"a": range(1, 7), "b": [0, 7]}, blocks=BLOCKS, bands=ENDS)
    sim.run(0.3)
    sim.kill("b")
    both, one = (sim.submit(max_skips=skips, budget=3.0) for skips in (2, 1))
    sim.settle()
    answer = outcome_of(sim, both)
    assert answer.itinerary.skipped == (0, 7)
    assert answer.why_skipped == "blocks 0, 7 had no reachable holder"
    failed = outcome_of(sim, one)
    assert way(failed) == [1, 2, 3, 4, 5, 6]
    assert "block 7 of band [7] (3 of 3) had no reachable holder within the budget; at most 1" in str(failed.error)


def test_a_fixed_order_is_one_band_a_block():
    sim = FaultySimulation({"a": [3, 1], "b": [0, 2]}, blocks=4, bands=Bands.ladder(4)[0])
    sim.run(0.3)
    requests = [sim.submit(policy=policy) for policy in ("nearest", "random", "fastest", "parallel")]
    sim.settle()
    assert {tuple(way(outcome_of(sim, request))) for request in requests} == {(0, 1, 2, 3)}


def source_with(bands, **peers):
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0), model=Model(bands)))
    for name, blocks in peers.items():
        source.meets(name, blocks)
    return source


def test_tokens_from_before_a_skip_are_still_good():
    """A branch that was given up comes back after its source has skipped a block, and has run that block."""
    source = source_with(Bands.from_json("0/1-2/3"), a=[0], b=[1, 2, 3])
    submits(source, max_skips=1)
    (old,) = source.sent(Forward, "a")
    source.hears("a", Accept(old.transfer, 5))
    (skipped,) = [one for one in source.passes(0.4) if isinstance(one, Forward)]
    assert (skipped.to, skipped.itinerary.skipped, skipped.itinerary.remaining) == ("b", (0,), (1, 2, 3))
    waves = ((((0, "a"),),),)
    late = run_of(old.transfer._replace(hop=2), remaining=(1, 2, 3), waves=waves, returning="unreachable")
    source(Arrived("a", late, ()))
    assert source.machine.rules.rejected == {}
    (onward,) = source.sent(Forward, "b")
    assert (onward.itinerary.skipped, onward.itinerary.waves) == ((), waves)
    done = ((((0, "a"), (1, "b"), (2, "b"), (3, "b")),),)
    source(Arrived("b", run_of(onward.transfer._replace(hop=3), remaining=(), waves=done, returning="done"), ()))
    assert source.only(Complete).why_skipped == ""
