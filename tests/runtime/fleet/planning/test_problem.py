"""Planning problems: room, zones, bands, and blocks given to devices."""

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.fleet.planning.problem import (
    PlannedDevice,
    PlanningProblem,
    assign_in_circle,
    assign_route,
    assign_sets,
    visit_times,
    with_ends,
)


def test_ends_are_held_where_bands_begin_and_end_and_memory_is_left():
    devices = tuple(PlannedDevice(name, 1.0, 4, stem_ms=0.5, ends_size=size) for name, size in (("a", 1), ("b", 0)))
    free, banded = PlanningProblem(devices, 4), PlanningProblem(devices, 4, bands=((0, 1), (2, 3)))
    assert with_ends(free, {"a": (0, 1), "b": (2, 3)}) == {"a": (0, 1, STEM, HEAD), "b": (2, 3, STEM, HEAD)}
    assert with_ends(banded, {"a": (0, 1), "b": (2, 3)}) == {"a": (0, 1, STEM), "b": (2, 3, HEAD)}
    assert with_ends(free, {"a": (0, 1, 2, 3), "b": ()}) is None


def test_problems_without_a_plan_are_refused():
    device = PlannedDevice("a", 1.0, 3)
    with pytest.raises(UsageError, match="4 copies; the memory of the devices has room for 3"):
        PlanningProblem((device,), 4).check("latency")
    with pytest.raises(UsageError, match="needs the power of every device, which a did not report"):
        PlanningProblem((device,), 3).check("energy")
    twice = (device, PlannedDevice("b", 1.0, 3))
    with pytest.raises(UsageError, match="--max-replicas 1 is below --replicas 2"):
        PlanningProblem(twice, 3, 2, max_replicas=1).check("latency")
    same = tuple(PlannedDevice(name, 1.0, 3, zone="rack") for name in "ab")
    with pytest.raises(UsageError, match="no zone a block twice"):
        PlanningProblem(same, 3, 2).check("latency")


def test_the_cost_of_visits_is_fitted_to_links():
    half = {"s": 0.5, "a": 1.0, "b": 2.0, "c": 0.0}
    links = {(x, y): half[x] + half[y] for x in half for y in half if x != y}
    assert visit_times(list(half), links) == pytest.approx({name: 2 * h for name, h in half.items()})
    assert visit_times(["s", "a"], {("s", "a"): 3.0, ("a", "s"): 3.0}) == {"s": 3.0, "a": 3.0}
    assert visit_times(["s", "a", "b"], {}) == {"s": 0.0, "a": 0.0, "b": 0.0}


def test_a_call_takes_the_measured_time_and_between_measured_sizes_a_share_of_both():
    device = PlannedDevice("a", 2.0, 4, max_batch=8, runtime_mean_ms=4.0, calls_ms=((2, 3.0), (4, 5.0)))
    assert [device.call_ms(images) for images in (1, 2, 3, 4, 8)] == [1.5, 3.0, 4.0, 5.0, 10.0]
    assert (device.busy_ms, device.beyond_ms) == (10.0 / 8, 4.0 / 8)
    assert PlannedDevice("a", 2.0, 4).call_ms(3) == 6.0


def test_blocks_fit_if_the_zones_have_room_for_all_copies():
    """Zone ``x`` has room for six blocks, but holds each of the four once."""
    devices = tuple(PlannedDevice(name, 1.0, 3, zone=zone) for name, zone in (("a", "x"), ("b", "x"), ("c", None)))
    problem = PlanningProblem(devices, 4)
    assert problem.zone_rooms() == {"zone x": 4, "device c": 3}
    assert [problem.fits(replicas) for replicas in (1, 2)] == [True, False]
    assert problem.most_replicas == 1
    assert PlanningProblem(devices, 3).most_replicas == 2


def test_a_placement_is_allowed_if_holders_are_in_different_zones():
    devices = tuple(PlannedDevice(name, 1.0, 2, zone=zone) for name, zone in (("a", "x"), ("b", "x"), ("c", None)))
    problem = PlanningProblem(devices, 2, replicas=2)
    assert problem.allows({"a": (0, 1), "c": (0, 1)})
    assert not problem.allows({"a": (0, 1), "b": (0, 1)})
    assert not problem.allows({"a": (0, 1)})


def test_stretches_go_around_the_circle_of_all_blocks_in_the_order_of_the_bands():
    devices = tuple(PlannedDevice(name, 1.0, 4) for name in "abc")
    problem = PlanningProblem(devices, 4, bands=((3, 1), (0, 2)))
    assert assign_in_circle(problem, (3, 3, 2)) == {"a": (0, 1, 3), "b": (1, 2, 3), "c": (0, 2)}
    assert assign_in_circle(problem, (1, 2, 1), [2, 0, 1]) == {"c": (3,), "a": (1,), "b": (0, 2)}


def test_a_route_keeps_its_stretches_and_full_devices_hand_blocks_on():
    devices = (PlannedDevice("a", 1.0, 3), PlannedDevice("b", 1.0, 2), PlannedDevice("c", 1.0, 1))
    found = assign_route(PlanningProblem(devices, 3), (2, 1, 0), 2)
    assert set(found["a"]) >= {0, 1}
    assert 2 in found["b"]
    assert sorted(block for blocks in found.values() for block in blocks) == [0, 0, 1, 1, 2, 2]
    assert assign_route(PlanningProblem(devices, 3), (3, 0, 0), 3) is None


def test_each_set_of_devices_holds_its_number_of_blocks():
    devices = tuple(PlannedDevice(name, 1.0, 3) for name in "abc")
    found = assign_sets(PlanningProblem(devices, 3), [(frozenset({0, 2}), 2), (frozenset({1}), 1)])
    assert found == {"a": (0, 1), "b": (2,), "c": (0, 1)}


def test_one_noisy_link_leaves_the_cost_of_visits_to_others_as_it_is():
    half = {f"d{i}": 0.5 + i / 10 for i in range(5)}
    links = {(a, b): half[a] + half[b] for a in half for b in half if a != b}
    assert visit_times([*half], links) == pytest.approx({name: 2 * ms for name, ms in half.items()})
    links["d0", "d1"] = links["d1", "d0"] = 100.0
    for name, ms in visit_times([*half], links).items():
        assert 0.5 * half[name] <= ms <= 4 * half[name]
