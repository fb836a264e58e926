"""The best placement with a given number of holders, by objective."""

import pytest

from ls_edge.runtime.fleet.planning.placements import best_placement, fill
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem


def test_devices_are_filled_in_order_within_their_room_and_their_limit():
    problem = PlanningProblem(tuple(PlannedDevice(name, 1.0, 3) for name in "abc"), 4)
    assert fill(problem, 1, [2, 0, 1]) == (1, 0, 3)
    assert fill(problem, 1, [0, 1, 2], [1, 1, 9]) == (1, 1, 2)
    assert fill(problem, 3, [0, 1, 2]) is None


def test_the_fastest_route_weighs_visits_against_the_time_of_blocks():
    """The fast device has room for two blocks; the next visit is worth it only for more than one of them."""
    fast, slow = PlannedDevice("fast", 1.0, 2, visit_ms=1.5), PlannedDevice("slow", 2.0, 9, visit_ms=1.5)
    assert best_placement(PlanningProblem((fast, slow), 2), "latency", 1).route == ("fast",)
    assert best_placement(PlanningProblem((fast, slow), 4), "latency", 1).route == ("fast", "slow")
    dear = PlannedDevice("fast", 1.0, 2, visit_ms=3.5)
    assert best_placement(PlanningProblem((dear, slow), 4), "latency", 1).route == ("slow",)


def test_blocks_of_the_fastest_route_get_further_holders():
    devices = (PlannedDevice("a", 1.0, 3), PlannedDevice("b", 2.0, 2, visit_ms=0.1), PlannedDevice("c", 3.0, 1))
    found = best_placement(PlanningProblem(devices, 3, 2), "latency", 2)
    assert found.route == ("a",)
    assert sorted(block for name in "bc" for block in found.placement[name]) == [0, 1, 2]


@pytest.mark.parametrize(("wire_ms", "counts"), [(0.0, (4, 2)), (9.0, (6, 0))])
def test_throughput_balances_devices_unless_a_link_is_slower(wire_ms, counts):
    fast, slow = PlannedDevice("fast", 1.0, 9), PlannedDevice("slow", 2.0, 9, wire_ms=wire_ms)
    found = best_placement(PlanningProblem((fast, slow), 6), "throughput", 1).placement
    assert tuple(len(found[name]) for name in ("fast", "slow")) == counts


def test_energy_fills_the_most_economical_devices():
    hungry, frugal = PlannedDevice("hungry", 1.0, 9, watts=9.0), PlannedDevice("frugal", 3.0, 4, watts=1.0)
    found = best_placement(PlanningProblem((hungry, frugal), 6), "energy", 1)
    assert (len(found.placement["hungry"]), len(found.placement["frugal"]), found.is_exact) == (2, 4, True)
