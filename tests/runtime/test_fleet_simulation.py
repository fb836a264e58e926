"""Fleets in simulated time: against queueing theory, closed forms, and with devices that come and go."""

import math

import msgspec
import numpy as np
import pytest

from ls_edge.core.errors import UsageError
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, summarise_simulation
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.simulation.fleet import FleetSettings, simulate_sites, simulation_context, sites_of
from ls_edge.runtime.simulator.churn import LOSSES, Churn
from ls_edge.runtime.simulator.simulation import Simulation

BLOCKS = 4


def problem_of(*block_ms, source_ms=0.0, visit_ms=0.0, capacity=BLOCKS, links_ms=None):
    """Devices ``a``, ``b`` ... with these times of a block."""
    devices = tuple(
        PlannedDevice(name=chr(ord("a") + number), block_ms=ms, capacity=capacity, visit_ms=visit_ms)
        for number, ms in enumerate(block_ms)
    )
    source = PlannedDevice("source", 1.0, 0, stem_ms=source_ms, visit_ms=visit_ms)
    return PlanningProblem(devices=devices, num_blocks=BLOCKS, source=source, links_ms=links_ms or {})


def outcomes_of(problem, jobs=1, **settings):
    sites, _ = sites_of(problem, FleetSettings(**settings))
    return simulate_sites(sites, jobs)


def summary_of(problem, jobs=1, **settings):
    sites, assumptions = sites_of(problem, FleetSettings(**settings))
    context = simulation_context(sites, bundle_id="bundle", churn=None, assumptions=assumptions)
    return summarise_simulation(simulate_sites(sites, jobs), context)


def test_one_request_at_a_time_takes_the_sum_of_its_parts():
    """Stem and head 3 ms, four blocks of 2 ms, and two transfers of half of both visits (5 ms each)."""
    problem = problem_of(2.0, source_ms=3.0, visit_ms=5.0)
    (outcome,) = outcomes_of(problem, devices=1, requests=20, concurrency=1)
    assert outcome.latency_s * 1e3 == pytest.approx(np.full(20, 3 + 4 * 2 + 2 * 5), abs=0.5)
    assert outcome.throughput == pytest.approx(1e3 / 21, rel=0.03)
    assert outcome.hops == 20 * 2


def test_a_closed_loop_keeps_all_devices_busy():
    """Three devices of 8 ms an image answer three images in 8 ms."""
    summary = summary_of(problem_of(2.0, 2.0), devices=3, requests=400)
    assert summary.throughput == pytest.approx(1e3 * 3 / 8, rel=0.1)
    assert summary.answered == 400
    assert {name: one.devices for name, one in summary.profiles.items()} == {"a": 2, "b": 1}
    assert all(one.busy > 0.85 for one in summary.profiles.values())


def test_waiting_at_a_rate_is_that_of_a_queue():
    """One device, fixed service, Poisson arrivals: the mean wait of M/D/1, ``load / (2 (1 - load))`` services."""
    service_s, load = 4 * 2.0e-3, 0.6
    (outcome,) = outcomes_of(problem_of(2.0), devices=1, requests=4000, concurrency=64, rate=load / service_s)
    wait_s = float(outcome.latency_s.mean()) - service_s - 0.4e-3  # and two transfers of 0.2 ms
    assert wait_s == pytest.approx(load / (2 * (1 - load)) * service_s, rel=0.15)
    assert outcome.seconds == pytest.approx(4000 * service_s / load, rel=0.1)


def test_what_waits_longer_than_its_budget_ends_then():
    """Images come twice as fast as they can be answered, and wait for their turn at most as long as the budget."""
    (outcome,) = outcomes_of(problem_of(2.0), devices=1, requests=600, concurrency=2, rate=250.0, budget_s=0.1)
    assert set(outcome.states) == {WHOLE, FAILED}
    assert outcome.latency_s.max() <= 0.1 + 1e-6
    assert (outcome.states == FAILED).mean() > 0.45
    assert set(outcome.errors) <= {"BudgetExceeded", "Overloaded"}
    assert sum(outcome.errors.values()) == (outcome.states == FAILED).sum()


def test_a_source_that_is_slower_than_the_devices_is_the_limit():
    summary = summary_of(problem_of(1.0, 1.0, source_ms=5.0), devices=2, requests=200)
    assert summary.throughput == pytest.approx(200.0, rel=0.03)


@pytest.mark.leaks_ok("multiprocessing keeps the process that cleans up after the others")
def test_the_same_seed_gives_the_same_figures_in_any_number_of_processes():
    settings = {
        "devices": 12, "requests": 240, "site_size": 4, "rate": 100.0, "max_skips": 1,
        "churn": Churn(1.0, 0.2, dict.fromkeys(LOSSES, 1.0)),
    }  # fmt: skip
    problem = problem_of(2.0, 3.0)
    one, two, other = (
        msgspec.json.encode(summary_of(problem, jobs, **settings, seed=seed)) for jobs, seed in ((1, 5), (2, 5), (1, 6))
    )
    assert one == two
    assert one != other


@pytest.mark.parametrize("kind", LOSSES)
def test_no_request_is_lost_while_devices_come_and_go(kind):
    """Two holders of everything, each up nine tenths of the time: answered whole, or skipped, or out of time."""
    churn = Churn(up=0.9, down=0.1, weights={kind: 1.0})
    (outcome,) = outcomes_of(
        problem_of(2.0, 2.0), devices=2, requests=2500, rate=100.0, churn=churn, max_skips=1, budget_s=2.0
    )
    assert outcome.losses[kind] == sum(outcome.losses.values()) > 20
    assert (outcome.states == WHOLE).sum() + (outcome.states == DEGRADED).sum() >= 0.97 * 2500
    assert outcome.latency_s.max() <= 2.0 + 1e-6
    assert (outcome.latency_s[outcome.states != FAILED] > 0).all()
    assert outcome.retries > 0 or kind == "drain"
    up = outcome.up_seconds / (2 * outcome.seconds)
    assert up == pytest.approx(0.9, abs=0.06 if kind != "drain" else 0.12)
    assert all(0 <= count <= 2 for _, count in outcome.up)


def test_a_block_without_a_holder_is_skipped_or_fails():
    """Each device holds half of the model and is down half of the time, for long."""
    problem = problem_of(2.0, 2.0, capacity=2)
    churn = Churn(up=20.0, down=20.0)
    settings = {"devices": 40, "requests": 400, "site_size": 2, "replicas": 1, "budget_s": 0.5, "churn": churn}
    states = np.concatenate([one.states for one in outcomes_of(problem, **settings, policy="sequential")])
    assert (states == WHOLE).mean() == pytest.approx(0.25, abs=0.15)
    assert not (states == DEGRADED).any()
    skipping = outcomes_of(problem, **settings, max_skips=2)
    states = np.concatenate([one.states for one in skipping])
    assert (states == FAILED).mean() == pytest.approx(0.25, abs=0.15)
    assert (states == DEGRADED).mean() == pytest.approx(0.5, abs=0.2)
    assert max(one.most_skipped for one in skipping) == 2
    assert any(one.reasons for one in skipping)


def test_a_fleet_is_divided_into_sites_that_are_alike():
    sites, assumed = sites_of(problem_of(2.0, 3.0), FleetSettings(devices=35, requests=100, site_size=16))
    assert [len(site.kinds) for site in sites] == [12, 12, 11]
    assert [site.requests for site in sites] == [34, 33, 33]
    assert sorted(sites[0].kinds.values()) == ["a"] * 6 + ["b"] * 6
    assert all(set(site.placement) == set(site.kinds) for site in sites)
    assert {"a", "a-2", "b", "b-6"} <= set(sites[0].kinds)
    held = [block for blocks in sites[0].placement.values() for block in blocks]
    assert all(held.count(block) >= 2 for block in range(BLOCKS))
    assert "3 sites of up to 16 devices" in assumed[0]
    few, assumed = sites_of(problem_of(2.0), FleetSettings(devices=32, requests=1, site_size=8))
    assert [site.requests for site in few] == [1]
    assert "3 sites have no request" in assumed[1]


def test_measured_links_hold_for_the_devices_that_were_measured():
    links = {(a, b): 4.0 for a in ("source", "a", "b") for b in ("source", "a", "b") if a != b}
    problem = problem_of(2.0, 2.0, visit_ms=1.0, links_ms=links)
    (site,), assumed = sites_of(problem, FleetSettings(devices=2, requests=1))
    assert site.problem.links_ms == links
    assert len(assumed) == 1
    (site,), assumed = sites_of(problem, FleetSettings(devices=3, requests=1))
    assert site.problem.links_ms == {}
    assert "on average" in assumed[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 1}, "--devices 1 is less than there are profiles .2.; raise it"),
        ({"devices": 2, "replicas": 2}, "a site of 2 devices: 4 blocks with 2 holders each are 8 copies.*--site-size"),
    ],
)
def test_fleets_that_cannot_be(settings, message):
    with pytest.raises(UsageError, match=message):
        sites_of(problem_of(2.0, 3.0, capacity=3), FleetSettings(requests=1, **settings))


def test_one_holder_where_memory_has_no_room_for_two():
    (site,), _ = sites_of(problem_of(2.0, 3.0, capacity=3), FleetSettings(devices=2, requests=1))
    assert site.problem.replicas == 1


@pytest.mark.parametrize(
    ("text", "churn"),
    [
        ("up=10m,down=30s", Churn(600.0, 30.0, {"kill": 1.0})),
        ("down=500ms, up=1.5h,stop=1,hang=0,kill=0.5", Churn(5400.0, 0.5, {"stop": 1.0, "kill": 0.5})),
    ],
)
def test_churn_is_read(text, churn):
    assert Churn.parse(text) == churn


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' cannot be read; write up=10m,down=30s"),
        ("up=10m", "has no down"),
        ("up=10m,up=5m,down=1s", "has 'up' twice"),
        ("up=10,down=1s", "'10' is not a time"),
        ("up=0s,down=1s", "'0s' is not a time"),
        ("up=inf,down=1s", "'inf' is not a time"),
        ("up=9999999h,down=1s", "is not a time"),
        ("up=1m,down=1s,burn=1", "'burn=1' cannot be read"),
        ("up=1m,down=1s,kill=-1", "'-1' is not a weight of kill"),
        ("up=1m,down=1s,kill=nan", "'nan' is not a weight of kill"),
        ("up=1m,down=1s,kill=0", "all weights are 0"),
    ],
)
def test_churn_that_cannot_be_read(text, message):
    with pytest.raises(UsageError, match=message):
        Churn.parse(text)


def test_the_share_of_devices_that_are_down_at_first_is_that_of_the_long_run():
    sites, _ = sites_of(
        problem_of(2.0), FleetSettings(devices=320, requests=40, site_size=8, churn=Churn(30.0, 10.0), max_skips=BLOCKS)
    )
    outcomes = simulate_sites(sites)
    up = sum(one.up[0][1] for one in outcomes) / sum(one.used for one in outcomes)
    assert up == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 320))


def test_a_process_that_is_stopped_often_tells_its_state_no_more_often():
    """Each time it goes on it greets, but the loop that repeats its state is the one of before."""
    sim = Simulation({"a": [0], "b": [0]}, blocks=1)
    sim.run(0.5)

    def events_of_a_second():
        before = next(sim._counter)
        sim.run(1.0)
        return next(sim._counter) - before

    usual = events_of_a_second()
    for _ in range(30):
        sim.stop("a")
        sim.run(0.01)
        sim.cont("a")
        sim.run(0.01)
    sim.run(1.0)
    assert events_of_a_second() == pytest.approx(usual, rel=0.2)
