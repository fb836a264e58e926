"""Requests of a site: against queueing theory, closed forms, and with devices that come and go."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ls_edge.core.errors import UsageError
from ls_edge.core.text import show_nines
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, FleetSettings, summarize_simulation
from ls_edge.runtime.fleet.simulation.site_pool import simulate_fleet
from ls_edge.runtime.fleet.simulation.site_run import _SiteRun
from ls_edge.runtime.fleet.simulation.sites import simulation_context, sites_of
from ls_edge.runtime.simulator.churn import LOSSES, Churn


@pytest.fixture
def summarize():
    """Return the document of a fleet."""

    def run(problem, *, churn=(), site_size=16, **settings):
        sites, assumptions = sites_of(problem, FleetSettings(**settings), churn=churn, site_size=site_size)
        written = [f"up={loss.up}s,down={loss.down}s" for loss in churn]
        context = simulation_context(sites, bundle_id="bundle", churn=written, assumptions=assumptions)
        return summarize_simulation(simulate_fleet(sites), context)

    return run


def test_one_request_at_a_time_takes_the_sum_of_its_parts(make_problem, simulate):
    """Stem and head 3 ms, four blocks of 2 ms, and two transfers of half of both visits (5 ms each)."""
    problem = make_problem(2.0, source_ms=3.0, visit_ms=5.0)
    (outcome,) = simulate(problem, devices=1, requests=20, concurrency=1)
    assert outcome.latency_s * 1e3 == pytest.approx(np.full(20, 3 + 4 * 2 + 2 * 5), abs=0.5)
    assert outcome.throughput == pytest.approx(1e3 / 21, rel=0.03)
    assert outcome.hops == 20 * 2


def test_a_closed_loop_keeps_all_devices_busy(make_problem, summarize):
    """Three devices of 8 ms an image answer three images in 8 ms."""
    summary = summarize(make_problem(2.0, 2.0), devices=3, requests=400)
    assert summary.throughput == pytest.approx(1e3 * 3 / 8, rel=0.1)
    assert summary.answered == 400
    assert {name: one.devices for name, one in summary.profiles.items()} == {"a": 2, "b": 1}
    assert all(one.busy > 0.85 for one in summary.profiles.values())


def test_requests_at_a_rate_wait_as_in_a_queue(make_problem, simulate):
    """One device, fixed service, Poisson arrivals: the mean wait of M/D/1, ``load / (2 (1 - load))`` services."""
    service_s, load = 4 * 2.0e-3, 0.6
    (outcome,) = simulate(make_problem(2.0), devices=1, requests=4000, concurrency=64, rate=load / service_s)
    wait_s = float(outcome.latency_s.mean()) - service_s - 0.4e-3  # and two transfers of 0.2 ms
    assert wait_s == pytest.approx(load / (2 * (1 - load)) * service_s, rel=0.15)
    assert outcome.seconds == pytest.approx(4000 * service_s / load, rel=0.1)


def test_requests_wait_no_longer_than_their_budget(make_problem, simulate):
    """Images come twice as fast as they can be answered, and wait for their turn at most as long as the budget."""
    (outcome,) = simulate(make_problem(2.0), devices=1, requests=600, concurrency=2, rate=250.0, budget_ms=100)
    assert set(outcome.states) == {WHOLE, FAILED}
    assert outcome.latency_s.max() <= 0.1 + 1e-6
    assert (outcome.states == FAILED).mean() > 0.45
    assert set(outcome.errors) <= {"BudgetExceeded", "Overloaded"}
    assert sum(outcome.errors.values()) == (outcome.states == FAILED).sum()


def test_power_and_battery_follow_from_the_share_of_computing(make_problem, summarize):
    """Two boards of 10 W, 2 W idle, that compute 8 ms for each of 50 images a second: a fifth of their time."""
    (board,) = make_problem(2.0).devices
    boards = [dataclasses.replace(board, name=name, watts=10.0, idle_watts=2.0, battery_wh=36.0) for name in "ab"]
    problem = dataclasses.replace(make_problem(2.0, 2.0), devices=tuple(boards))
    summary = summarize(problem, devices=2, requests=2000, rate=50.0)
    for one in summary.profiles.values():
        assert one.watts == pytest.approx(2.0 + 8.0 * one.busy)
        assert one.battery_h == pytest.approx(36.0 / one.watts)
    apart = summarize(problem, devices=2, requests=200, rate=50.0, site_size=1)
    assert all(one.watts == pytest.approx(2.0 + 8.0 * one.busy) for one in apart.profiles.values())
    busy = sum(one.busy for one in summary.profiles.values())
    assert busy == pytest.approx(50 * 4 * 0.002, rel=0.1)
    assert summary.energy_mj == pytest.approx(1e3 * (4.0 + 8.0 * busy) * summary.seconds / 2000, rel=0.01)
    boards[1] = dataclasses.replace(boards[1], watts=None)
    summary = summarize(dataclasses.replace(problem, devices=tuple(boards)), devices=2, requests=20, rate=50.0)
    assert (summary.profiles["b"].watts, summary.energy_mj) == (None, None)


def test_a_battery_lasts_as_long_in_the_summary_as_between_two_losses(make_problem, summarize):
    """0.1 Wh at 36 W are ten seconds; charging takes twenty, so a board is up a third of the time."""
    (board,) = make_problem(0.0).devices
    problem = dataclasses.replace(
        make_problem(0.0), devices=(dataclasses.replace(board, watts=36.0, idle_watts=36.0, battery_wh=0.1),)
    )
    summary = summarize(problem, churn=[Churn.parse("up=battery,down=20s")], devices=1, requests=2000, rate=2.0)
    assert summary.losses.count == pytest.approx(summary.seconds / 30, rel=0.1)
    assert summary.losses.up_share == pytest.approx(1 / 3, rel=0.1)
    assert summary.profiles["a"].watts == pytest.approx(36 * summary.losses.up_share, rel=1e-4)
    assert summary.profiles["a"].battery_h == pytest.approx(10 / 3600, abs=1e-6)
    boards = problem.devices[0], dataclasses.replace(problem.devices[0], name="b", battery_wh=1e5)
    summary = summarize(
        dataclasses.replace(make_problem(0.0, 0.0), devices=boards),
        churn=[Churn.parse("up=battery,down=20s")], devices=2, requests=2000, rate=2.0,
    )  # fmt: skip
    assert summary.profiles["b"].watts == pytest.approx(36), "it outlives the simulation"
    assert summary.profiles["a"].watts == pytest.approx(12, rel=0.1)
    assert summary.losses.up_share == pytest.approx(2 / 3, rel=0.1)


@pytest.mark.parametrize("churn", [(), (Churn.parse("up=20s,down=1s"),)])
def test_sites_of_different_speeds_have_an_interval_around_the_sum_of_their_throughputs(make_problem, summarize, churn):
    """Sites of 250 and 12.5 images a second; the fast one ends after a twentieth of the time of the slow one."""
    summary = summarize(make_problem(1.0, 20.0), churn=churn, devices=2, requests=1000, site_size=1)
    low, high = summary.throughput_interval
    assert low < summary.throughput < high
    assert summary.throughput == pytest.approx(262.5, rel=0.1)
    assert high - low < (60 if churn else 30)


def test_a_source_that_is_slower_than_the_devices_limits_throughput(make_problem, summarize):
    summary = summarize(make_problem(1.0, 1.0, source_ms=5.0), devices=2, requests=200)
    assert summary.throughput == pytest.approx(200.0, rel=0.03)


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "slow"])
def test_no_request_is_lost_while_devices_come_and_go(make_problem, simulate, kind):
    """Two holders of everything, each up nine tenths of the time: answered whole, or skipped, or out of time."""
    churn = [Churn(up=0.9, down=0.1, weights={kind: 1.0})]
    (outcome,) = simulate(
        make_problem(2.0, 2.0), devices=2, requests=2500, rate=100.0, churn=churn, max_skips=1, budget_ms=2000
    )
    assert outcome.losses[kind] == sum(outcome.losses.values()) > 20
    assert (outcome.states == WHOLE).sum() + (outcome.states == DEGRADED).sum() >= 0.97 * 2500
    assert outcome.latency_s.max() <= 2.0 + 1e-6
    assert (outcome.latency_s[outcome.states != FAILED] > 0).all()
    assert outcome.retries > 0 or kind == "drain"
    up = 1 - sum(outcome.lost_s.values()) / (2 * outcome.seconds)
    assert up == pytest.approx(0.9, abs=0.06 if kind != "drain" else 0.12)
    assert all(0 <= count <= 2 for _, count in outcome.up)


LOSS = st.builds(
    Churn,
    up=st.sampled_from([0.2, 1.0]),
    down=st.sampled_from([0.05, 0.5]),
    weights=st.sampled_from([{kind: 1.0} for kind in LOSSES]),
    zone=st.integers(1, 2),
)


@example(
    devices=1,
    churn=[Churn(0.5, 0.2, is_source=True)],
    rate=None,
    concurrency=1,
    budget_ms=15.0,
    policy="nearest",
    seed=0,
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    devices=st.integers(1, 3),
    churn=st.lists(st.one_of(LOSS, st.just(Churn(0.5, 0.2, is_source=True))), max_size=3),
    rate=st.sampled_from([None, 20.0, 400.0]),
    concurrency=st.sampled_from([1, 8]),
    budget_ms=st.sampled_from([15.0, 300.0, 3000.0]),
    policy=st.sampled_from(["nearest", "sequential", "fastest", "parallel", "random"]),
    seed=st.integers(0, 1000),
)
def test_requests_in_are_answers_failures_and_requests_in_flight(make_problem, devices, churn, **asked):
    """Conservation after every event; at the end each request has one outcome, within its budget."""
    given_settings = FleetSettings(devices=devices, requests=40, max_skips=1, replicas=1, **asked)
    ((site,), _) = sites_of(make_problem(*[2.0] * devices), given_settings, churn=churn)
    run = _SiteRun(site)
    ended, run_next = [], run._sim.run_next
    close = run._close

    def count(number, *outcome):
        ended.append(number)
        close(number, *outcome)

    def step():
        run_next()
        assert run._submitted == len(ended) + len(run._open)
        assert {*run._open}.isdisjoint(ended)
        assert len(run._waiting) + run._under_way <= len(run._open) or not run._has_source

    run._close, run._sim.run_next = count, step
    outcome = run.run(lambda _over: None)
    assert sorted(ended) == list(range(40))
    assert sum(outcome.errors.values()) == (outcome.states == FAILED).sum()
    assert outcome.latency_s.max() <= asked["budget_ms"] / 1e3 + 1e-3


@pytest.mark.parametrize("rate", [None, 200.0])
def test_requests_of_a_lost_source_fail_and_later_ones_are_answered(make_problem, simulate, rate):
    """The source of two boards is up nine tenths of the time."""
    churn = [Churn(0.9, 0.1, is_source=True)]
    (outcome,) = simulate(
        make_problem(2.0, 2.0), devices=2, requests=2000, rate=rate, churn=churn, budget_ms=2000, outage_s=0.1
    )
    assert outcome.losses["source"] == sum(outcome.losses.values()) > 3
    assert outcome.errors["SourceLost"] == sum(outcome.errors.values()) == (outcome.states == FAILED).sum()
    if rate is None:  # 16 in flight at each loss; nobody asks while the source is down
        assert outcome.errors["SourceLost"] <= 16 * (outcome.losses["source"] + 1)
    else:
        assert 0.02 < (outcome.states == FAILED).mean() < 0.3
    late = outcome.submitted_s > outcome.submitted_s[outcome.states == FAILED].min()
    assert (outcome.states[late] == WHOLE).mean() > 0.5
    assert outcome.latency_s.max() <= 2.0 + 1e-6
    assert not outcome.lost_s, "the devices were up"


def test_slow_devices_make_answers_late(make_problem, simulate):
    usual, slow = (
        simulate(make_problem(2.0), devices=1, requests=400, rate=20.0, churn=churn)[0].latency_s
        for churn in ((), [Churn(1.0, 1.0, {"slow": 1.0}, times=5.0)])
    )
    assert np.quantile(slow, 0.2) < 1.2 * np.quantile(usual, 0.2)
    assert np.quantile(slow, 0.9) > 3 * np.quantile(usual, 0.9)


def test_a_battery_needs_a_profile_with_its_capacity_and_power(make_problem, simulate):
    (board,) = make_problem(2.0).devices
    problem = dataclasses.replace(make_problem(2.0), devices=(board,))
    settings = {"devices": 1, "requests": 300, "rate": 0.1, "churn": [Churn(math.nan, 300.0)], "outage_s": 300.0}
    with pytest.raises(UsageError, match="the profile of a has no capacity or power of its battery"):
        simulate(problem, **settings)
    board = dataclasses.replace(board, watts=10.0, idle_watts=2.0, battery_wh=0.5)  # 900 s idle
    (outcome,) = simulate(dataclasses.replace(problem, devices=(board,)), **settings)
    assert (outcome.states == WHOLE).mean() == pytest.approx(0.75, abs=0.05)
    assert outcome.losses["kill"] == pytest.approx(3000 / 1200, abs=1)


def test_a_block_without_a_holder_is_skipped_or_fails(make_problem, simulate):
    """Each device holds half of the model and is down half of the time, for long."""
    problem = make_problem(2.0, 2.0, capacity=2)
    churn = [Churn(up=20.0, down=20.0)]
    settings = {"devices": 40, "requests": 400, "site_size": 2, "replicas": 1, "budget_ms": 500, "churn": churn}
    states = np.concatenate([one.states for one in simulate(problem, **settings, policy="sequential")])
    assert (states == WHOLE).mean() == pytest.approx(0.25, abs=0.15)
    assert not (states == DEGRADED).any()
    skipping = simulate(problem, **settings, max_skips=2)
    states = np.concatenate([one.states for one in skipping])
    assert (states == FAILED).mean() == pytest.approx(0.25, abs=0.15)
    assert (states == DEGRADED).mean() == pytest.approx(0.5, abs=0.2)
    assert max(one.most_skipped for one in skipping) == 2
    assert any(one.reasons for one in skipping)


@pytest.mark.parametrize("boards", [1, 2])
def test_closed_forms_lie_within_the_intervals(make_problem, summarize, boards):
    """A request fails if all boards are down and none returns within its budget: for exponential times
    ``(down / (up + down) * exp(-budget / down)) ** boards``. Of eight intervals of 95 %, one misses it in 6 % of cases
    more than once."""
    up, down, budget = 20.0, 4.0, 0.4
    truth = (down / (up + down) * math.exp(-budget / down)) ** boards
    contained = 0
    for seed in range(8):
        summary = summarize(
            make_problem(2.0), churn=[Churn(up, down)], devices=boards, requests=600, rate=0.25, max_skips=0,
            budget_ms=budget * 1e3, outage_s=down, seed=seed,
        )  # fmt: skip
        found = summary.whole_share
        contained += found.low < 1 - truth < found.high
        assert found.high - found.low < 4 * truth, "the interval says something"
        assert found.share == summary.answered_share.share == summary.answered / 600
        assert summary.answer.startswith(f"{show_nines(found.share)} of the requests get a whole answer (95 % interval")
    assert contained >= 7


def test_a_short_simulation_says_how_uncertain_it_is(make_problem, summarize):
    settings = {"devices": 1, "rate": 2.0, "max_skips": 0, "budget_ms": 100.0}
    none = summarize(make_problem(2.0), churn=[Churn(3600.0, 1.0)], requests=100, outage_s=1.0, **settings)
    assert none.whole_share.low < 0.95 < none.whole_share.share == 1.0
    assert "no device was lost in 5" in none.warnings[0]
    begun = summarize(
        make_problem(2.0, 2.0),
        churn=[Churn(3600.0, 3600.0)],
        requests=9,
        outage_s=1.0,
        **{**settings, "devices": 2, "seed": 1},
    )
    assert (begun.losses.count, begun.losses.up_share, begun.whole_share.outages) == (0, 0.5, 0)
    assert begun.warnings[0].startswith("no outage was seen"), "one of two devices was down from the beginning"
    few = summarize(make_problem(2.0), churn=[Churn(20.0, 2.0)], requests=160, outage_s=2.0, **settings)
    assert 1 <= few.whole_share.outages <= 8
    assert f"{few.whole_share.outages} outages seen: the answer is uncertain; about " in few.warnings[0]
    assert "are enough (--until 50%)" in few.warnings[0]
    gone = summarize(make_problem(2.0), churn=[Churn(0.001, 3600.0)], requests=50, outage_s=3600.0, **settings)
    assert gone.warnings[0].startswith("1 outage seen: the answer is uncertain"), "down from the start to the end"
    assert not summarize(make_problem(2.0), requests=100, **settings).warnings


def test_time_without_requests_costs_no_events(make_problem):
    """Hours between two requests: no heartbeats, no STATE, no ticks."""
    (site,), _ = sites_of(make_problem(2.0, 2.0, 2.0), FleetSettings(devices=3, requests=2, rate=2 / 36000))
    handled = []
    run = _SiteRun(site)
    handle = run._sim._handle
    run._sim._handle = lambda process, *groups: (handled.append(run._sim.now), handle(process, *groups))
    run.run(lambda _over: None)
    assert run._sim.now > 3600
    assert len(handled) < 200
