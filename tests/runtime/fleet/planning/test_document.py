"""The document of a plan: what is recommended, and what it is compared with."""

import msgspec
import pytest

from ls_edge.runtime.fleet.planning.document import PlanDocument, plan_document
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem


@pytest.fixture
def plan(make_source):
    """Return the document of a plan for devices and a model of eight blocks."""

    def make(devices, objective, **more):
        problem = PlanningProblem(tuple(devices), 8, **{"source": make_source(1.0, visit_ms=1.0), **more})
        return plan_document(problem, objective, plan_placement(problem, objective), ["assumed"], bundle_id="id")

    return make


def devices(count, **more):
    kind = {"block_ms": 2.0, "capacity": 8, "visit_ms": 1.0, **more}
    return [PlannedDevice(f"d{number}", **kind) for number in range(count)]


def test_a_model_that_fits_no_device_is_split(plan):
    found = plan(devices(2, capacity=4.5, block_bytes=100 << 20), "latency")
    assert found.recommendation == "split"
    assert found.reason == "no device has memory for the whole model; split over 2 devices: 400 of 450 MiB each"
    assert (found.baselines["single"], found.baselines["replicate"]) == (None, None)
    assert msgspec.json.decode(msgspec.json.encode(found), type=PlanDocument) == found


def test_one_device_wins_where_visits_cost_more_than_they_save(plan):
    found = plan(devices(2, visit_ms=50.0), "latency")
    assert found.recommendation == "one"
    assert found.reason == "d0 alone, 68.0 ms; more devices are no better"
    assert found.expected.latency_ms == found.baselines["single"].latency_ms
    assert list(found.baselines["single"].placement) == ["d0"]


def test_copies_win_where_they_have_the_higher_throughput(plan):
    found = plan(devices(3, ends_size=0, wire_ms=20.0), "throughput", image_share=0.01, logits_share=0.01)
    assert found.recommendation == "replicate"
    assert found.baselines["replicate"].throughput == found.expected.throughput
    assert found.reason.startswith(f"{found.expected.throughput:.0f} images a second, against ")


def test_replicas_win_where_no_device_has_room_for_stem_and_head(plan):
    """Both devices hold all blocks; the source runs stem and head, in less time than a device needs for its part."""
    found = plan(devices(2), "throughput")
    assert found.recommendation == "replicate"
    assert found.expected.throughput == pytest.approx(2 * 1e3 / 16)
    assert found.reason == "125 images a second, against 62.5 images a second for d0 alone (100 % more)"
    assert (found.policy, found.concurrency) == ("fastest", 12)


def test_a_known_value_is_better_than_an_unknown_one(plan):
    """No device has room for stem and head besides all blocks, and the power of the source is unknown."""
    boards = devices(2, capacity=8.2, ends_size=0.5, watts=5.0)
    found = plan(boards, "energy", source=PlannedDevice("source", 1.0, 0, stem_ms=1.0))
    assert found.baselines["single"].energy_mj is None
    assert found.recommendation == "split"
    assert found.reason.endswith(" mJ an image, against unknown energy for d0 alone")
