"""Fleets of devices with given times, in simulated time."""

import pytest

from ls_edge.evaluation.simulation_summary import FleetSettings
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.simulation.site_pool import simulate_fleet
from ls_edge.runtime.fleet.simulation.sites import sites_of


@pytest.fixture
def make_problem():
    """Return the problem of a model of four blocks and devices ``a``, ``b`` ... that take ``block_ms`` each."""

    def make(*block_ms, source_ms=0.0, visit_ms=0.0, capacity=4, links_ms=None):
        devices = tuple(
            PlannedDevice(name=chr(ord("a") + number), block_ms=ms, capacity=capacity, visit_ms=visit_ms)
            for number, ms in enumerate(block_ms)
        )
        source = PlannedDevice("source", 1.0, 0, stem_ms=source_ms, visit_ms=visit_ms)
        return PlanningProblem(devices=devices, num_blocks=4, source=source, links_ms=links_ms or {})

    return make


@pytest.fixture
def simulate():
    """Return the outcomes of the sites of a fleet."""

    def run(problem, *, site_size=16, churn=(), **settings):
        return simulate_fleet(sites_of(problem, FleetSettings(**settings), site_size=site_size, churn=churn)[0])

    return run
