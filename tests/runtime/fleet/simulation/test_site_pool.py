"""Sites that run in several processes."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ls_edge.evaluation.simulation_summary import FleetSettings, summarize_simulation
from ls_edge.runtime.fleet.simulation.site_pool import process_pool, simulate_fleet, simulate_sites
from ls_edge.runtime.fleet.simulation.sites import simulation_context, sites_of
from ls_edge.runtime.simulator.churn import LOSSES, Churn


@pytest.mark.leaks_ok("multiprocessing keeps the process that cleans up after the others")
def test_the_same_seed_gives_the_same_document_in_any_number_of_processes(make_problem):
    def document(jobs, seed):
        settings = FleetSettings(devices=12, requests=240, rate=100.0, max_skips=1, seed=seed)
        churn = [Churn(1.0, 0.2, dict.fromkeys(LOSSES, 1.0))]
        sites, assumptions = sites_of(make_problem(2.0, 3.0), settings, site_size=4, churn=churn)
        context = simulation_context(sites, bundle_id="bundle", churn=(), assumptions=assumptions)
        with process_pool(jobs) as pool:
            return msgspec.json.encode(summarize_simulation(simulate_sites(sites, pool), context))

    assert document(1, 5) == document(2, 5) != document(1, 6)


@pytest.mark.leaks_ok("multiprocessing keeps the process that cleans up after the others")
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_ended_request_is_reported(make_problem, jobs):
    sites, _ = sites_of(make_problem(2.0), FleetSettings(devices=4, requests=90), site_size=2)
    steps = []
    with process_pool(jobs) as pool:
        simulate_sites(sites, pool, lambda done, total: steps.append((done, total)))
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
