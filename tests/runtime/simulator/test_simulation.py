"""Simulated processes: they compute, fail and return, and a seed gives the same course."""

import pytest

from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.simulator.simulation import Simulation, join_tuples
from tests.faults.simulation import FaultySimulation

EVERYTHING = {"a": (0, 1, 2), "b": (0, 1, 2)}


def linked(sim, name):
    return name in sim.source.neighbors.by_name


def test_an_answer_shows_the_blocks_that_ran_and_takes_their_time():
    sim = Simulation({"a": (0, 1), "b": (2,)}, blocks=3, block_seconds={"a": 0.1, "b": 0.3}, latency=0.01)
    sim.run(0.3)
    began = sim.now
    request = sim.submit()
    sim.settle()
    (answer,) = sim.outcomes[request]
    assert answer.tokens == (0, 1, 2)
    assert sim.ended[request] - began == pytest.approx(2 * 0.1 + 0.3 + 3 * 0.01)
    assert sim.busy == pytest.approx({"a": 0.2, "b": 0.3})


def test_peers_with_stem_and_head_are_sent_images():
    sim = Simulation({"a": (STEM, 0), "b": (1, HEAD)}, blocks=2, transfers=lambda _sender, _to: 1.0, image_share=0.5)
    sim.run(0.3)
    request = sim.submit(budget=20)
    sim.settle()
    assert sim.outcomes[request][0].tokens == (STEM, 0, 1, HEAD)


def test_an_engine_runs_one_call_at_a_time():
    sim = Simulation({"a": (0,)}, blocks=1, block_seconds=0.1)
    sim.run(0.3)
    requests = [sim.submit() for _ in range(3)]
    sim.settle()
    first, second, third = (sim.ended[request] for request in requests)
    assert [second - first, third - second] == pytest.approx([0.1, 0.1])


def test_a_call_for_several_images_takes_what_the_engine_says():
    sim = Simulation(
        {"a": (0,)}, blocks=1, max_batch=4, engine_seconds=lambda _name, parts, images: 0.1 + 0.01 * images
    )
    sim.run(0.3)
    for _ in range(5):
        sim.submit()
    sim.settle()
    assert sim.busy["a"] == pytest.approx(0.11 + 0.14)  # the first alone, the others together


def test_links_of_a_killed_process_are_lost_immediately_and_its_work_runs_elsewhere():
    sim = FaultySimulation(EVERYTHING, blocks=3, block_seconds={"a": 0.1, "b": 0.2})
    sim.run(0.3)
    request = sim.submit()
    sim.run(0.05)
    assert sim.processes["a"].machine.held
    sim.kill("a")
    assert not linked(sim, "a")
    sim.settle()
    assert {holder for _, holder in sim.outcomes[request][0].itinerary.waves[0][0]} == {"b"}
    sim.restart("a")
    sim.run(0.1)
    assert linked(sim, "a")
    assert sim.is_idle("a")


def test_heartbeats_detect_a_stopped_process_and_it_greets_when_it_continues():
    sim = FaultySimulation(EVERYTHING, blocks=3, detection=0.5)
    sim.run(0.3)
    sim.stop("a")
    sim.run(0.4)
    assert linked(sim, "a")
    sim.run(0.2)
    assert not linked(sim, "a")
    sim.cont("a")
    sim.run(0.1)
    assert linked(sim, "a")


def test_a_drained_peer_finishes_its_work_and_is_idle():
    sim = FaultySimulation(EVERYTHING, blocks=3)
    sim.run(0.3)
    requests = [sim.submit() for _ in range(4)]
    sim.run(0.01)
    sim.drain("a")
    assert not sim.is_idle("a")
    sim.settle()
    assert sim.is_idle("a")
    assert all(isinstance(sim.outcomes[request][0], Complete) for request in requests)


def test_the_same_seed_gives_the_same_course():
    def course(seed):
        sim = Simulation(EVERYTHING, blocks=3, seed=seed)
        sim.run(0.3)
        for _ in range(20):
            sim.submit(policy="random")
        sim.run(0.02)
        sim.kill("a")
        sim.settle()
        return sim.ended, {request: outcomes[0].itinerary for request, outcomes in sim.outcomes.items()}

    assert course(1) == course(1) != course(2)


def test_ends_are_announced_to_the_caller():
    sim = Simulation(EVERYTHING, blocks=3)
    sim.run(0.3)
    seen = []
    sim.on_end = seen.append
    requests = [sim.submit(), sim.submit()]
    sim.settle()
    assert sorted(end.request for end in seen) == requests


def test_tracks_are_joined_by_what_each_added():
    assert join_tuples((3, 1), [(3, 1, 0, 5), (3, 1, 2)]) == (3, 1, 0, 5, 2)


def test_repeated_stops_do_not_multiply_the_timers_of_a_process():
    """A process greets each time it continues; the loop that repeats its state is still the same."""
    sim = FaultySimulation({"a": [0], "b": [0]}, blocks=1)
    sim.run(0.5)

    def actions_per_second():
        before = next(sim._counter)
        sim.run(1.0)
        return next(sim._counter) - before

    usual = actions_per_second()
    for _ in range(30):
        sim.stop("a")
        sim.run(0.01)
        sim.cont("a")
        sim.run(0.01)
    sim.run(1.0)
    assert actions_per_second() == pytest.approx(usual, rel=0.2)
