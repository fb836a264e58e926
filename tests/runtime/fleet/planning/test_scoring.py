"""Placements in simulated time, compared with the formulas."""

import dataclasses

import pytest

from ls_edge.runtime.fleet.planning.estimates import Estimates, estimate, throughput_of
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem, with_ends
from ls_edge.runtime.fleet.planning.scoring import best_policy, simulate_placement


@pytest.mark.parametrize(("beyond_ms", "max_batch", "replicas"), [(12.0, 1, 1), (30.0, 1, 2)])
def test_the_formula_for_throughput_agrees_with_the_simulation(make_source, beyond_ms, max_batch, replicas):
    devices = tuple(
        PlannedDevice(f"d{i}", 2.0, 12, visit_ms=0.5, wire_ms=0.1, runtime_ms=beyond_ms, runtime_mean_ms=beyond_ms,
                      max_batch=max_batch)
        for i in range(2 * replicas)
    )  # fmt: skip
    problem = PlanningProblem(devices, 6, replicas, source=make_source(0.1))
    placement = {device.name: (0, 1, 2) if i % 2 else (3, 4, 5) for i, device in enumerate(devices)}
    simulated = simulate_placement(problem, placement, "nearest").throughput
    assert throughput_of(problem, placement) == pytest.approx(simulated, rel=0.05)
    without = [dataclasses.replace(device, runtime_mean_ms=0.0) for device in devices]
    free = throughput_of(dataclasses.replace(problem, devices=tuple(without)), placement)
    assert free > 1.08 * simulated


@pytest.mark.parametrize("shape", ["chain", "copies", "two of each"])
def test_the_formulas_agree_with_the_simulation_where_devices_run_stem_and_head(make_source, shape):
    """Images and logits take a tenth and none of the links' time; the tokens' is what a chain waits for."""
    devices = tuple(
        PlannedDevice(f"d{i}", 2.0, 8, stem_ms=1.0, head_ms=0.5, visit_ms=2.0, wire_ms=1.0, ends_size=0)
        for i in range(4)
    )
    source = make_source(5.0, visit_ms=2.0, wire_ms=1.0)
    problem = PlanningProblem(devices, 8, source=source, image_share=0.1)
    halves = {
        f"d{i}": tuple(range(4)) if i % 2 else tuple(range(4, 8)) for i in range(4 if shape == "two of each" else 2)
    }
    blocks = dict.fromkeys(("d0", "d1"), tuple(range(8))) if shape == "copies" else halves
    placement = with_ends(problem, blocks)
    estimates, simulated = estimate(problem, placement), simulate_placement(problem, placement, "nearest")
    assert estimates.latency_ms == pytest.approx(1.5 + 8 * 2 + 2 + (2 if shape == "copies" else 4) - 0.9 - 1.0)
    assert simulated.latency_ms == pytest.approx(estimates.latency_ms, rel=0.05)
    assert simulated.throughput == pytest.approx(estimates.throughput, rel=0.1)
    at_source = simulate_placement(problem, blocks, "nearest")
    assert at_source.latency_ms == pytest.approx(simulated.latency_ms + 5.0 - 1.5 + 0.9 + 1.0, rel=0.05)
    assert at_source.throughput <= 1e3 / 5.0


@pytest.mark.parametrize(
    ("objective", "estimates", "chosen"),
    [
        ("throughput", {"nearest": (88.0, 38.41), "parallel": (47.0, 38.38)}, "parallel"),  # equal but for 0.1 %
        ("throughput", {"nearest": (88.0, 38.41), "parallel": (47.0, 37.0)}, "nearest"),
        ("throughput", {"nearest": (47.0, 38.0), "fastest": (47.0, 38.1)}, "fastest"),
        ("latency", {"nearest": (47.2, 38.0), "parallel": (47.0, 30.0)}, "parallel"),
        ("energy", {"nearest": (88.0, 38.0), "parallel": (47.0, 30.0)}, "parallel"),  # not known of either
    ],
)
def test_the_best_policy_wins_and_of_equal_ones_the_fastest(objective, estimates, chosen):
    simulated = [Estimates(*values, policy=name) for name, values in estimates.items()]
    assert best_policy(simulated, objective).policy == chosen


def test_the_latency_of_two_copies_that_take_turns_is_between_those_of_each(make_source):
    """Half of the requests go over the slow link, so neither copy's latency is the median."""
    devices = tuple(PlannedDevice(f"d{i}", 0.25, 8, visit_ms=0.4, wire_ms=0.05, ends_size=0) for i in range(2))
    names = ("source", "d0", "d1")
    links = {(one, other): 9.0 if {one, other} == {"source", "d1"} else 0.4 for one in names for other in names}
    problem = PlanningProblem(devices, 8, source=make_source(0.2, visit_ms=0.4, wire_ms=0.05), links_ms=links)
    whole = tuple(range(8))
    fast, slow = (simulate_placement(problem, {name: whole}, "nearest").latency_ms for name in ("d0", "d1"))
    both = simulate_placement(problem, {"d0": whole, "d1": whole}, "nearest").latency_ms
    assert both == pytest.approx((fast + slow) / 2, rel=0.05)
