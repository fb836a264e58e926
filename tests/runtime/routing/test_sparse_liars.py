"""Members with a key that lie in a sparse network, where the source has no link to some peers."""

import itertools

import pytest

from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.liar import Liar
from tests.faults.lies import LIES
from tests.faults.simulation import FaultySimulation

BLOCKS = 4
ALL = tuple(range(BLOCKS))
BUDGET = 4.0


def sparse(placement, links, lies=None, **settings):
    """Return a simulation with these links alone; ``lies`` names what liars do, by process."""
    sim = FaultySimulation(placement, blocks=BLOCKS, validate=True, **settings)
    for name, lie in (lies or {}).items():
        liar = Liar(name, placement[name], BLOCKS, LIES[lie], lambda *_: None, ("spoilt",))
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
    sim = sparse(dict.fromkeys(seconds, ALL), links, {"liar": lie}, block_seconds=seconds)
    requests = []
    for _ in range(8):
        requests.append(sim.submit(policy=policy, budget=BUDGET))
        sim.run(0.5)
    found = answers(sim, requests)
    assert len(found) == len(requests)
    assert all(answer.attempts <= 2 for answer in found)
    assert sim.processes["liar"].machine.counts.received


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
