"""Requests of a site: against queueing theory, closed forms, and with devices that come and go."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, FleetSettings
from ls_edge.runtime.fleet.simulation.site_run import _SiteRun
from ls_edge.runtime.fleet.simulation.sites import sites_of
from ls_edge.runtime.simulator.churn import Churn


def test_one_request_at_a_time_takes_the_sum_of_its_parts(make_problem, simulate):
    """Stem and head 3 ms, four blocks of 2 ms, and two transfers of half of both visits (5 ms each)."""
    (outcome,) = simulate(make_problem(2.0, source_ms=3.0, visit_ms=5.0), devices=1, requests=20, rate=1.0)
    assert outcome.latency_s * 1e3 == pytest.approx(np.full(20, 3 + 4 * 2 + 2 * 5), abs=0.5)
    assert outcome.hops == 20 * 2


@pytest.mark.parametrize(
    ("block_ms", "source_ms", "devices", "rate"),
    [((2.0, 2.0), 0.0, 3, 3 * 1e3 / 8), ((1.0, 1.0), 5.0, 2, 1e3 / 5)],
    ids=["devices", "source"],
)
def test_a_closed_loop_is_as_fast_as_the_devices_or_the_source(
    make_problem, simulate, block_ms, source_ms, devices, rate
):
    (outcome,) = simulate(make_problem(*block_ms, source_ms=source_ms), devices=devices, requests=400)
    assert outcome.throughput == pytest.approx(rate, rel=0.1)
    assert all(outcome.states == WHOLE)
    busy = {name: seconds / outcome.seconds / outcome.devices[name] for name, seconds in outcome.busy_s.items()}
    assert all(share == pytest.approx(rate / (devices * 1e3 / block_ms[0] / 4), rel=0.15) for share in busy.values())


def test_requests_at_a_rate_wait_as_in_a_queue(make_problem, simulate):
    """One device, fixed service, Poisson arrivals: the mean wait of M/D/1, ``load / (2 (1 - load))`` services."""
    service_s, load = 4 * 2.0e-3, 0.6
    (outcome,) = simulate(make_problem(2.0), devices=1, requests=4000, rate=load / service_s)
    wait_s = float(outcome.latency_s.mean()) - service_s - 0.4e-3  # and two transfers of 0.2 ms
    assert wait_s == pytest.approx(load / (2 * (1 - load)) * service_s, rel=0.15)
    assert outcome.seconds == pytest.approx(4000 * service_s / load, rel=0.1)


def test_requests_wait_no_longer_than_their_budget(make_problem, simulate):
    """Images come twice as fast as they can be answered, and wait for their turn at most as long as the budget."""
    (outcome,) = simulate(make_problem(2.0), devices=1, requests=600, rate=250.0, budget_ms=100)
    assert set(outcome.states) == {WHOLE, FAILED}
    assert outcome.latency_s.max() <= 0.1 + 1e-6
    assert (outcome.states == FAILED).mean() > 0.4
    assert set(outcome.errors) <= {"BudgetExceeded", "Overloaded"}
    assert sum(outcome.errors.values()) == (outcome.states == FAILED).sum()


def test_no_request_is_lost_while_devices_come_and_go(make_problem, simulate):
    """Two holders of everything, each up nine tenths of the time: answered whole, or skipped, or out of time."""
    settings = {"devices": 2, "requests": 2500, "rate": 100.0, "max_skips": 1, "budget_ms": 2000}
    (outcome,) = simulate(make_problem(2.0, 2.0), churn=Churn(up=0.9, down=0.1), **settings)
    assert outcome.losses > 20
    assert (outcome.states != FAILED).sum() >= 0.97 * 2500
    assert outcome.latency_s.max() <= 2.0 + 1e-6
    assert outcome.retries > 0
    assert outcome.up_s / (2 * outcome.seconds) == pytest.approx(0.9, abs=0.06)
    assert all(0 <= count <= 2 for _, count in outcome.up)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    devices=st.integers(1, 3),
    churn=st.sampled_from([None, Churn(0.2, 0.05), Churn(1.0, 0.5)]),
    rate=st.sampled_from([None, 20.0, 400.0]),
    budget_ms=st.sampled_from([15.0, 300.0, 3000.0]),
    policy=st.sampled_from(["nearest", "sequential", "fastest", "parallel", "random"]),
    seed=st.integers(0, 1000),
)
def test_each_request_has_one_outcome_within_its_budget(make_problem, devices, churn, **asked):
    given_settings = FleetSettings(devices=devices, requests=40, max_skips=1, **asked)
    (site,) = sites_of(make_problem(*[2.0] * devices), given_settings, 1, churn)
    run = _SiteRun(site)
    ended, close = [], run._close

    def count(number, *outcome):
        ended.append(number)
        close(number, *outcome)

    run._close = count
    outcome = run.run(lambda _over: None)
    assert sorted(ended) == list(range(40))
    assert sum(outcome.errors.values()) == (outcome.states == FAILED).sum()
    assert outcome.latency_s.max() <= asked["budget_ms"] / 1e3 + 1e-3


def test_a_block_without_a_holder_is_skipped_or_fails(make_problem, simulate):
    """Each of 16 devices holds one of four blocks and is down four fifths of the time: all four holders for 0.41."""
    problem = make_problem(2.0, 2.0, capacity=1)
    settings = {"devices": 160, "requests": 400, "replicas": 4, "budget_ms": 500, "churn": Churn(up=5.0, down=20.0)}
    states = np.concatenate([one.states for one in simulate(problem, **settings, policy="sequential")])
    assert (states == WHOLE).mean() == pytest.approx((1 - 0.8**4) ** 4, abs=0.15)
    assert not (states == DEGRADED).any()
    skipping = simulate(problem, **settings, max_skips=4)
    states = np.concatenate([one.states for one in skipping])
    assert (states == FAILED).mean() < 0.1
    assert (states == DEGRADED).mean() > 0.5
    assert max(one.most_skipped for one in skipping) > 1


@pytest.mark.parametrize("boards", [1, 2])
def test_the_share_of_failures_is_that_of_the_closed_form(make_problem, simulate, boards):
    """A request fails if all boards are down and none returns within its budget: for exponential times
    ``(down / (up + down) * exp(-budget / down)) ** boards``. Requests of one outage share its fate."""
    up, down, budget = 2.0, 2.0, 0.4
    truth = (down / (up + down) * math.exp(-budget / down)) ** boards
    (outcome,) = simulate(
        make_problem(2.0), churn=Churn(up, down), devices=boards, requests=4000, rate=2.5, budget_ms=budget * 1e3
    )
    assert (outcome.states == FAILED).mean() == pytest.approx(truth, abs=4 * math.sqrt(truth / (1600 / (up + down))))


def test_time_without_requests_costs_no_events(make_problem):
    """Hours between two requests: no heartbeats, no STATE, no ticks."""
    (site,) = sites_of(make_problem(2.0, 2.0, 2.0), FleetSettings(devices=3, requests=2, rate=2 / 36000))
    handled = []
    run = _SiteRun(site)
    handle = run._sim._handle
    run._sim._handle = lambda process, *groups: (handled.append(run._sim.now), handle(process, *groups))
    run.run(lambda _over: None)
    assert run._sim.now > 3600
    assert len(handled) < 200
