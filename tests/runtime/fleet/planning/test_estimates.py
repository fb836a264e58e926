"""Estimates of placements by formula."""

from dataclasses import replace

from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.fleet.planning.estimates import estimate
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem


def test_bands_take_neighbors_and_cost_a_visit_where_they_are_scattered():
    devices = tuple(PlannedDevice(f"d{i}", 1.0, 4, visit_ms=3.0, wire_ms=0.1) for i in range(2))
    free = PlanningProblem(devices, 6)
    banded = PlanningProblem(devices, 6, bands=((4, 5), (0, 1), (2, 3)))
    planned = plan_placement(banded, "throughput")
    halves = sorted(planned.best.placement.values())
    assert halves in ([(0, 4, 5), (1, 2, 3)], [(1, 4, 5), (0, 2, 3)], [(0, 4, 5), (1, 2, 3)])
    assert planned.best.estimates.latency_ms == 6 * 1.0 + 2 * 3.0
    scattered = {"d0": (4, 0, 2), "d1": (5, 1, 3)}
    assert estimate(free, scattered).latency_ms == 6 * 1.0 + 2 * 3.0
    # each band needs both; they meet at the end of one and the begin of the next
    assert estimate(banded, scattered).latency_ms == 6 * 1.0 + 4 * 3.0
    third = PlanningProblem((*devices, replace(devices[0], name="d2")), 4, bands=((0,), (1, 2), (3,)))
    assert estimate(third, {"d2": (0,), "d0": (1, 3), "d1": (2,)}).latency_ms == 4 * 1.0 + 3 * 3.0


def test_energy_is_unknown_without_power():
    for watts, energy in ((10.0, 80.0), (None, None)):
        estimates = estimate(PlanningProblem((PlannedDevice("a", 2.0, 4, watts=watts),), 4), {"a": (0, 1, 2, 3)})
        assert (estimates.throughput, estimates.energy_mj) == (1e3 / 8, energy)


def test_an_image_takes_at_least_the_time_of_the_engines_whatever_the_links_are_said_to_take():
    devices = tuple(PlannedDevice(f"d{i}", 0.5, 4, visit_ms=0.2, wire_ms=40.0, ends_size=0) for i in range(2))
    source = PlannedDevice("source", 1.0, 0, stem_ms=0.3, head_ms=0.3, visit_ms=0.2, wire_ms=40.0)
    problem = PlanningProblem(devices, 4, source=source, image_share=0.1)
    assert estimate(problem, {"d0": (0, 1, STEM, HEAD), "d1": (2, 3)}).latency_ms >= 4 * 0.5
    assert estimate(problem, {"d0": (0, 1), "d1": (2, 3)}).latency_ms >= 4 * 0.5
