"""Planning problems: room, bands, and blocks given to devices."""

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.fleet.planning.problem import (
    PlannedDevice,
    PlanningProblem,
    assign_in_circle,
    assign_route,
    with_ends,
)


def test_ends_are_held_where_bands_begin_and_end_and_memory_is_left():
    devices = tuple(PlannedDevice(name, 1.0, 4, stem_ms=0.5, ends_size=size) for name, size in (("a", 1), ("b", 0)))
    free, banded = PlanningProblem(devices, 4), PlanningProblem(devices, 4, bands=((0, 1), (2, 3)))
    assert with_ends(free, {"a": (0, 1), "b": (2, 3)}) == {"a": (0, 1, STEM, HEAD), "b": (2, 3, STEM, HEAD)}
    assert with_ends(banded, {"a": (0, 1), "b": (2, 3)}) == {"a": (0, 1, STEM), "b": (2, 3, HEAD)}
    assert with_ends(free, {"a": (0, 1, 2, 3), "b": ()}) is None
    one, two = (PlanningProblem((PlannedDevice("a", 1.0, 1.5, ends_size=0.5, files=files),), 4) for files in (1, 2))
    assert (one.room(one.devices[0]), two.room(two.devices[0])) == (4, 1), "blocks that share a file need it once"
    assert with_ends(one, {"a": (0, 1, 2, 3)}) == {"a": (0, 1, 2, 3, STEM, HEAD)}


def test_problems_without_a_plan_are_refused():
    device, shared = PlannedDevice("a", 1.0, 3), PlannedDevice("a", 1.0, 0.9, files=1, block_bytes=7 << 20)
    for held, objective, message in (
        ((device, 4), "latency", "4 copies; the memory of the devices has room for 3"),
        ((shared, 4), "latency", "has room for 0, and 7 MiB are missing"),
        ((device, 3), "energy", "needs the power of every device, which a did not report"),
    ):
        with pytest.raises(UsageError, match=message):
            PlanningProblem((held[0],), held[1]).check(objective)


def test_a_call_takes_the_measured_time_and_between_measured_sizes_a_share_of_both():
    device = PlannedDevice("a", 2.0, 4, max_batch=8, calls_ms=((2, 3.0), (4, 5.0)))
    assert [device.call_ms(images) for images in (1, 2, 3, 4, 8)] == [1.5, 3.0, 4.0, 5.0, 10.0]
    assert device.busy_ms == 10.0 / 8
    assert PlannedDevice("a", 2.0, 4).call_ms(3) == 6.0


def test_stretches_go_around_the_circle_of_all_blocks_in_the_order_of_the_bands():
    devices = tuple(PlannedDevice(name, 1.0, 4) for name in "abc")
    problem = PlanningProblem(devices, 4, bands=((3, 1), (0, 2)))
    assert assign_in_circle(problem, (3, 3, 2)) == {"a": (0, 1, 3), "b": (1, 2, 3), "c": (0, 2)}


def test_a_route_keeps_its_stretches_and_gets_further_holders():
    devices = (PlannedDevice("a", 1.0, 3), PlannedDevice("b", 1.0, 2), PlannedDevice("c", 1.0, 1))
    found = assign_route(PlanningProblem(devices, 3), (2, 1, 0), 2)
    assert set(found["a"]) >= {0, 1}
    assert 2 in found["b"]
    assert sorted(block for blocks in found.values() for block in blocks) == [0, 0, 1, 1, 2, 2]
    assert assign_route(PlanningProblem(devices, 3), (3, 0, 0), 3) is None
