"""STATE messages that can only inform later decisions are no events, and every decision stays the same."""

import random

import numpy as np
import pytest

from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.churn import Churn
from ls_edge.runtime.simulator.simulation import Simulation

HELD = {"a": (0, 1, 2, 3), "b": (2, 3, 4, 5), "c": (0, 1, 4, 5), "d": (0, 2, 4), "e": (1, 3, 5)}


@pytest.fixture
def with_events(monkeypatch):
    """Return a function that makes each STATE an event."""
    return lambda: monkeypatch.setattr(Machine, "may_act_on", lambda _self, _event: True)


@pytest.fixture
def actions(monkeypatch):
    """Return the times of all actions that run."""
    ran, run_next = [], Simulation.run_next

    def counted(sim):
        run_next(sim)
        ran.append(sim.now)

    monkeypatch.setattr(Simulation, "run_next", counted)
    return ran


def course(policy, seed):
    """Run a course with faults; return its outcomes, and what each process knows of the others in the end."""
    rng = random.Random(seed)
    wire, limits = dict.fromkeys(HELD, 0.002), Limits(credits=2, custody=8)
    sim = Simulation(HELD, blocks=6, seed=seed, limits=limits, latency=0.02, transfers=lambda _a, _b: 0.03, wire=wire)
    sim.run(0.5)
    for _ in range(40):
        for _ in range(rng.choice((0, 0, 1, 12))):
            sim.submit(policy=policy, budget=rng.choice((0.3, 2.0)), max_skips=rng.randrange(2))
        sim.run(rng.choice((0.0, 0.003, 0.05, 0.4)))
        process, fault = sim.processes[rng.choice("abcde")], rng.choice(("", "", "kill", "stop", "hang", "slow"))
        if fault == "kill":
            (sim.kill if process.alive else sim.restart)(process.name)
        elif fault == "stop" and process.alive:
            (sim.cont if process.stopped else sim.stop)(process.name)
        elif fault == "hang" and process.alive:
            sim.hang_engine(process.name, hangs=not process.engine_hangs)
        elif fault == "slow":
            sim.slowness[process.name] = rng.choice((1.0, 20.0))
    sim.settle()
    known = {
        name: {
            n.name: (n.state, round(n.state_at, 4), n.credits, n.pause.reason, n.pause.count)
            for n in one.machine.neighbors
        }
        for name, one in sim.processes.items()
    }
    arrangements = {
        request: [(one.itinerary.waves, one.itinerary.skipped) for one in ends]
        for request, ends in sim.outcomes.items()
    }
    # Ticks are a microsecond late, so times may differ by that much.
    return {request: round(at, 4) for request, at in sim.ended.items()}, arrangements, known


@pytest.mark.parametrize(("policy", "seed"), [("nearest", 1), ("fastest", 2), ("parallel", 3), ("fastest", 4)])
def test_decisions_are_those_with_an_event_for_each_state(policy, seed, actions, with_events):
    waited, fewer = course(policy, seed), len(actions)
    with_events()
    assert course(policy, seed) == waited
    assert len(actions) - fewer > fewer


def test_a_site_has_the_same_outcomes_with_an_event_for_each_state(make_problem, simulate, actions, with_events):
    def outcome():
        (one,) = simulate(
            make_problem(5.0, 8.0, capacity=3), devices=6, requests=300, rate=40, policy="fastest", max_skips=1,
            churn=Churn(4.0, 0.7),
        )  # fmt: skip
        return one

    waited, fewer = outcome(), len(actions)
    with_events()
    each = outcome()
    assert np.array_equal(each.states, waited.states)
    assert np.array_equal(each.latency_s, waited.latency_s)
    assert (each.hops, each.retries, each.losses) == (waited.hops, waited.retries, waited.losses)
    assert len(actions) - fewer > 1.1 * fewer
