"""The document of a plan: which candidate wins, and what it is compared with."""

import msgspec
import pytest

from ls_edge.runtime.fleet.planning.document import PlanDocument, plan_document
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem


@pytest.fixture
def plan(make_source):
    """Return the document of a plan for devices and a model of eight blocks."""

    def make(devices, objective, *, simulate=True, on_step=lambda *_: None, **more):
        problem = PlanningProblem(tuple(devices), 8, **{"source": make_source(1.0, visit_ms=1.0), **more})
        return plan_document(
            problem, objective, plan_placement(problem, objective), ["assumed"], bundle_id="id", simulate=simulate,
            on_step=on_step,
        )  # fmt: skip

    return make


def devices(count, **more):
    kind = {"block_ms": 2.0, "capacity": 8, "visit_ms": 1.0, **more}
    return [PlannedDevice(f"d{number}", **kind) for number in range(count)]


def test_distribution_wins_where_no_device_has_room_for_the_model(plan):
    found = plan(devices(2, capacity=4), "latency")
    assert (found.recommendation, found.winner) == ("distribute", "distribute")
    assert found.reason == "no device has memory for the whole model"
    assert (found.baselines["single"], found.baselines["copies"], found.advantages) == (None, None, [])


def test_one_device_wins_where_visits_cost_more_than_they_save(plan):
    found = plan(devices(2, visit_ms=50.0), "latency")
    assert (found.recommendation, found.winner) == ("single", "single")
    assert found.reason.startswith("d0 alone, ")
    assert found.expected.latency_ms == found.baselines["single"].latency_ms
    assert found.baselines["single"].device == "d0"


def test_copies_win_where_they_have_the_higher_throughput(plan):
    found = plan(devices(3, ends_size=0, wire_ms=20.0), "throughput", image_share=0.01, logits_share=0.01)
    assert (found.recommendation, found.winner) == ("single", "copies")
    assert found.baselines["copies"].throughput == found.expected.throughput
    assert found.reason.startswith(f"{found.expected.throughput:.0f} images a second, against ")


@pytest.mark.parametrize("simulate", [True, False])
def test_a_known_value_is_better_than_an_unknown_one(plan, simulate):
    """No device has room for stem and head beside all blocks, and the power of the source is unknown."""
    boards = devices(2, capacity=8.2, ends_size=0.5, watts=5.0)
    found = plan(boards, "energy", simulate=simulate, source=PlannedDevice("source", 1.0, 0, stem_ms=1.0))
    assert found.baselines["single"].energy_mj is None
    assert found.winner == "distribute"
    assert found.reason.endswith(" mJ an image, against unknown energy for d0 alone")


def test_the_simulation_chooses_the_policy_and_formulas_are_kept(plan):
    found = plan(devices(2, capacity=4), "throughput")
    assert found.expected.policy == found.policy
    assert found.policy in ("nearest", "fastest", "parallel")
    assert found.formula.policy is None
    formula = plan(devices(2, capacity=4), "throughput", simulate=False)
    assert formula.policy is None
    assert formula.expected == formula.formula == found.formula


def test_a_battery_lasts_as_long_as_the_throughput_next_to_it_allows(plan):
    """Two devices of 10 W, 2 W idle, share 16 ms of each image."""
    power = {"ends_size": 0, "watts": 10.0, "idle_watts": 2.0, "battery_wh": 10.0}
    found = plan(devices(2, visit_ms=8.0, runtime_ms=5.0, runtime_mean_ms=5.0, **power), "throughput")
    for one in (found.formula, found.expected, *found.baselines.values()):
        busy = one.throughput * 0.016 / sum(map(bool, one.placement.values()))
        assert one.battery_h == pytest.approx(10.0 / (2.0 + 8.0 * busy), rel=0.01)


def test_fleets_too_large_to_simulate_are_estimated_by_formula(plan):
    found = plan(devices(24, capacity=1), "throughput", replicas=3)
    assert found.warnings == ["24 devices are too many to simulate, so all estimates are by formula"]
    assert found.policy is None
    assert found.expected == found.formula


def test_survival_lists_what_distribution_offers_besides(plan):
    found = plan(devices(3, loss=0.1, ends_size=0), "survival", max_replicas=2)
    assert found.winner == "copies"
    assert found.baselines["copies"].whole_share == pytest.approx(0.999)
    assert found.expected.whole_share == pytest.approx(0.99)


def test_progress_is_reported_by_candidate(plan):
    steps = []
    plan(devices(2, capacity=4), "throughput", on_step=lambda done, total, text: steps.append((done, total, text)))
    assert [done for done, _, _ in steps] == list(range(len(steps)))
    assert steps[0][2] == "plan"
    assert steps[-1][0] == steps[-1][1]


def test_a_document_can_be_read_again(plan):
    found = plan(devices(2), "latency")
    assert msgspec.json.decode(msgspec.json.encode(found), type=PlanDocument) == found
