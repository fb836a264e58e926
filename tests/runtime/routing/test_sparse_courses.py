"""Random courses in sparse networks: trees with a few more links, slow links, a peer that is killed, a liar."""

import random
from collections import Counter

import pytest

from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.lies import LIES
from tests.runtime.routing.test_sparse_liars import ALL, BLOCKS, answers, sparse
from tests.simulate_forever import line, star, two_cliques_with_a_bridge

SLACK = 6
"""Transfers of the slowest link after which no copy remains, whatever happened, counted from the end of the budgets."""
MEMBERS = sorted(
    name
    for name, lie in LIES.items()
    if lie.role == "peer"
    and lie.tempts
    and not lie.spoils
    and not lie.needs_bands
    and name not in ("malformed", "nan", "poisons")
)
"""Lies of members about transfers; messages that are dropped on arrival have no place in a simulation."""


def course(seed, lie=""):
    """Run a course; return the simulation and its requests."""
    rng = random.Random(seed)
    names = "abcdef"[: rng.choice((4, 5, 6))]
    placement = {name: tuple(sorted(rng.sample(ALL, rng.choice((1, 2, BLOCKS))))) for name in names}
    links = [(SOURCE, "a"), *((names[i], names[rng.randrange(i)]) for i in range(1, len(names)))]
    links += [(SOURCE, rng.choice(names)), *(rng.sample(names, 2) for _ in range(rng.randrange(3)))]
    lies = {rng.choice(names): LIES[lie]} if lie else {}
    latency = rng.choice((0.001, 0.001, 0.2, 0.4))
    sim = sparse(placement, links, lies, seed=seed, latency=latency)
    sim.run(3.0)
    requests, end = [], 0.0
    for _ in range(8):
        policy = rng.choice(("fastest", "nearest", "random", "sequential", "parallel"))
        more = {} if policy == "parallel" else {"via_source": rng.random() < 0.2}
        budget = rng.choice((1.0, 2.0, 4.0))
        requests.append(sim.submit(policy=policy, budget=budget, **more))
        end = max(end, sim.now + budget)
        sim.run(0.02)
    if not lie and rng.random() < 0.5:
        lost = rng.choice(names)
        sim.kill(lost)
        sim.run(rng.choice((0.2, 1.0)))
        sim.restart(lost)
    sim.settle()
    for name in lies:
        sim.kill(name)
    sim.run(max(0.0, end - sim.now) + SLACK * latency + (8.0 if lie else 0.0))
    return sim, requests


@pytest.mark.parametrize("seed", [*range(6), 619, 724])
def test_honest_members_end_each_request_once_and_keep_nothing(seed):
    sim, requests = course(seed)
    for request in requests:
        (outcome,) = sim.outcomes[request]
        if isinstance(outcome, Complete):
            assert Counter(outcome.tokens) == Counter(ALL)
    assert not any(process.machine.held for process in sim.processes.values())


@pytest.mark.parametrize(
    ("seed", "lie"), [*((seed, random.Random(seed).choice(MEMBERS)) for seed in range(6)), (1, "floods"), (3, "floods")]
)
def test_one_liar_cannot_prevent_an_outcome_or_leave_copies(seed, lie):
    sim, requests = course(seed, lie)
    assert all(len(sim.outcomes[request]) == 1 for request in requests)
    assert not any(process.machine.held for process in sim.processes.values() if process.alive)


@pytest.mark.parametrize("links", [line, star, two_cliques_with_a_bridge])
@pytest.mark.parametrize("seed", range(2))
def test_honest_members_answer_everything_through_relays(links, seed):
    rng = random.Random(seed)
    names = "abcdef"
    placement = {name: tuple(sorted(rng.sample(ALL, rng.choice((1, 2, BLOCKS))))) for name in names}
    placement[rng.choice(names)] = ALL
    sim = sparse(placement, links(names, rng), seed=seed, latency=rng.choice((0.001, 0.02)))
    sim.run(3.0)
    requests = []
    for policy in ("fastest", "nearest", "random", "sequential", "parallel"):
        requests.append(sim.submit(policy=policy, budget=8.0))
        sim.run(0.02)
    assert len(answers(sim, requests)) == len(requests)
    sim.run(8.0)
    assert not any(process.machine.held for process in sim.processes.values())
