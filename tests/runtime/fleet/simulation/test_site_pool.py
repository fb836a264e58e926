"""Sites that run in several processes."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ls_edge.core.errors import UsageError
from ls_edge.evaluation.simulation_summary import FleetSettings, summarize_simulation
from ls_edge.runtime.fleet.simulation.site_pool import process_pool, simulate_fleet
from ls_edge.runtime.fleet.simulation.sites import simulation_context, sites_of
from ls_edge.runtime.simulator.churn import LOSSES, Churn
from ls_edge.runtime.simulator.traces import Trace


@pytest.mark.leaks_ok("multiprocessing keeps the process that cleans up after the others")
def test_the_same_seed_gives_the_same_document_in_any_number_of_processes(make_problem):
    def document(jobs, seed):
        settings = FleetSettings(devices=12, requests=240, rate=100.0, max_skips=1, seed=seed)
        churn = [Churn(1.0, 0.2, dict.fromkeys(LOSSES, 1.0))]
        sites, assumptions = sites_of(make_problem(2.0, 3.0), settings, site_size=4, churn=churn)
        context = simulation_context(sites, bundle_id="bundle", churn=(), assumptions=assumptions)
        with process_pool(jobs) as pool:
            return msgspec.json.encode(summarize_simulation(simulate_fleet(sites, pool), context))

    assert document(1, 5) == document(2, 5) != document(1, 6)


@pytest.mark.leaks_ok("multiprocessing keeps the process that cleans up after the others")
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_ended_request_is_reported(make_problem, jobs):
    sites, _ = sites_of(make_problem(2.0), FleetSettings(devices=4, requests=90), site_size=2)
    steps = []
    with process_pool(jobs) as pool:
        simulate_fleet(sites, pool, lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == ((0, 90), (90, 90))


def test_a_fleet_is_simulated_until_the_interval_is_narrow(make_problem):
    """Rounds differ in their random numbers; their number is the same for any executor."""

    def document(until, executor=None):
        churn = [Churn(2.0, 0.2)]
        settings = FleetSettings(
            devices=2, requests=60, rate=20.0, max_skips=0, budget_ms=100, outage_s=0.2, until=until
        )
        sites, _ = sites_of(make_problem(2.0), settings, site_size=1, churn=churn)
        context = simulation_context(sites, bundle_id="bundle", churn=["up=2s,down=200ms"], assumptions=())
        return summarize_simulation(simulate_fleet(sites, executor), context)

    once, narrow = document(None), document(0.5)
    assert once.requests == 60 < narrow.requests
    assert narrow.whole_share.spread <= 0.5 < once.whole_share.spread
    assert narrow.whole_share.more_hours is None
    assert (narrow.sites, narrow.profiles["a"].devices) == (2, 2)
    assert narrow.throughput == pytest.approx(once.throughput, rel=0.4), "not the sum over rounds"
    with ThreadPoolExecutor(2) as threads:
        assert document(0.5, threads) == narrow


@pytest.mark.parametrize(
    ("rate", "churn", "message"),
    [
        (1e-9, (), r"60 requests at 1e-09 per second take 6e\+10 s, with about 0 losses of devices at a site"),
        (5e-324, (), r"at most 1e\+10 s"),
        (1e-6, [Churn(3600.0, 180.0)] * 4, r"with about 2.54e\+05 losses of devices .*; at most 1e\+10 s and 250,000"),
        (1e-4, [Trace((((0.0, "up"), (8.0, "stop")),), 9.0, 1.0)], r"about 2.67e\+05 losses .* raise --rate"),
    ],
)
def test_a_rate_that_would_take_decades_of_losses_is_refused(make_problem, rate, churn, message):
    """At a site of four devices, by the mean number of losses; nothing is simulated first."""
    settings = FleetSettings(devices=4, requests=60, rate=rate)
    sites, _ = sites_of(make_problem(2.0), settings, churn=churn)
    with pytest.raises(UsageError, match=message):
        simulate_fleet(sites)


def test_a_closed_loop_with_too_many_losses_ends(make_problem, monkeypatch):
    """No rate tells how long it will take: requests of a fleet that is hardly ever up need their whole budget."""
    monkeypatch.setattr("ls_edge.runtime.simulator.churn.MOST_LOSSES", 1000)
    sites, _ = sites_of(
        make_problem(2.0), FleetSettings(devices=2, requests=500), churn=[Churn(0.001, 0.1), Churn(0.001, 3600.0)]
    )
    with pytest.raises(
        UsageError, match=r"devices of a site were lost too often to simulate in .*longer times in --churn, or fewer"
    ):
        simulate_fleet(sites)


@pytest.mark.parametrize(("up", "share"), [(1e6, 1.0), (0.001, 0.0)])
def test_repetition_ends_for_a_fleet_that_never_fails_or_never_answers(make_problem, up, share):
    settings = FleetSettings(devices=1, requests=3, rate=1.0, budget_ms=1, outage_s=1.0, until=0.1)
    if share:
        settings = msgspec.structs.replace(settings, budget_ms=1000)
    down = 0.001 if share else 1e6
    sites, _ = sites_of(make_problem(2.0), settings, churn=[Churn(up, down)])
    context = simulation_context(sites, bundle_id="", churn=["up,down"], assumptions=())
    found = summarize_simulation(simulate_fleet(sites), context)
    assert (found.whole_share.share, found.requests) == (share, 64 * 3)
    assert found.warnings


def test_repetition_ends_at_ten_million_requests(make_problem, monkeypatch):
    monkeypatch.setattr("ls_edge.runtime.fleet.simulation.site_pool.MOST_REQUESTS", 500)
    settings = FleetSettings(devices=1, requests=60, rate=20.0, budget_ms=100, outage_s=0.2, until=1e-9)
    sites, _ = sites_of(make_problem(2.0), settings, churn=[Churn(2.0, 0.2)])
    context = simulation_context(sites, bundle_id="", churn=["up=2s,down=200ms"], assumptions=())
    found = summarize_simulation(simulate_fleet(sites), context)
    assert found.requests == 480
    assert "; --until 1e-07% was not reached, so give more --requests or a lower --rate" in found.warnings[0]
