"""Fleets of devices with given times, in simulated time."""

import pytest

from ls_edge.evaluation.simulation_summary import FleetSettings
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.simulation.site_run import simulate_site
from ls_edge.runtime.fleet.simulation.sites import sites_of


@pytest.fixture
def make_problem():
    """Return the problem of a model of four blocks and devices ``a``, ``b`` ... that take ``block_ms`` each."""

    def make(*block_ms, source_ms=0.0, visit_ms=0.0, capacity=4):
        devices = tuple(
            PlannedDevice(name=chr(ord("a") + number), block_ms=ms, capacity=capacity, visit_ms=visit_ms)
            for number, ms in enumerate(block_ms)
        )
        source = PlannedDevice("source", 1.0, 0, stem_ms=source_ms, visit_ms=visit_ms)
        return PlanningProblem(devices=devices, num_blocks=4, source=source)

    return make


@pytest.fixture
def simulate():
    """Return the outcomes of the sites of a fleet."""

    def run(problem, *, replicas=None, churn=None, **settings):
        return [simulate_site(site) for site in sites_of(problem, FleetSettings(**settings), replicas, churn)]

    return run
