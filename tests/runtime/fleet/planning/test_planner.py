"""Plans against brute force: by counts on random instances, by every placement on tiny ones."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.fleet.planning.estimates import estimate
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import OBJECTIVES, PlannedDevice, PlanningProblem
from ls_edge.runtime.routing.state.limits import Limits


def random_problem(seed, devices=(1, 5), blocks=(1, 8)):
    """Return a problem that has a placement; devices are sometimes alike."""
    rng = random.Random(seed)
    while True:
        count = rng.randint(*devices)
        kinds = [
            {
                "block_ms": round(rng.uniform(0.2, 5), 2),
                "capacity": rng.randint(0, 10),
                "visit_ms": round(rng.uniform(0, 4), 2),
                "wire_ms": round(rng.uniform(0, 6), 2),
                "watts": round(rng.uniform(2, 30), 1),
            }
            for _ in range(rng.randint(1, count))
        ]
        made = tuple(PlannedDevice(f"d{i}", **rng.choice(kinds)) for i in range(count))
        source = PlannedDevice(
            "source", 1.0, 0, stem_ms=round(rng.uniform(0, 3), 2), visit_ms=0.5, wire_ms=0.1, watts=0.0
        )
        problem = PlanningProblem(made, rng.randint(*blocks), rng.randint(1, 3), source=source)
        if problem.most_replicas >= problem.replicas:
            return problem


def counts_with(problem, replicas):
    """Return every count of blocks by device that gives each block ``replicas`` holders."""
    rooms = [min(problem.num_blocks, device.capacity) for device in problem.devices]
    grids = np.meshgrid(*(np.arange(room + 1) for room in rooms), indexing="ij")
    found = np.stack([grid.ravel() for grid in grids], axis=1)
    return found[found.sum(axis=1) == replicas * problem.num_blocks]


def brute_force(problem, objective):
    """Return the least value of an objective over every count, by the formulas written once more."""
    devices = problem.devices
    t, c, o, e, call, batch = (
        np.array([getattr(device, key) for device in devices])
        for key in ("block_ms", "visit_ms", "wire_ms", "block_mj", "runtime_ms", "max_batch")
    )
    if objective == "latency":
        n = counts_with(problem, 1)
        return problem.source.stem_ms + problem.source.visit_ms + (n @ t + (n > 0) @ c).min()
    if objective == "energy":
        return (counts_with(problem, problem.replicas) @ e).min() / problem.replicas
    best = np.inf
    most = np.maximum(1, (Limits().chain * 1e3 / (t * batch)).astype(int))  # blocks of an engine call
    for replicas in range(problem.replicas, len(devices) + 1):
        n = counts_with(problem, replicas)
        if len(n):
            taken = np.maximum(n * t, (n * t + np.ceil(n / most) * call / batch) / 2)
            slowest = np.maximum(taken.max(axis=1), ((n > 0) * o).max(axis=1)) / replicas
            best = min(best, -1e3 / max(slowest.min(), problem.source.stem_ms, problem.source.wire_ms))
    return best


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_plans_of_200_random_instances_are_as_good_as_brute_force(objective):
    for seed in range(200):
        problem = random_problem(seed)
        planned = plan_placement(problem, objective)
        best = brute_force(problem, objective)
        assert planned.best.value(objective) == pytest.approx(best, rel=1e-9), (seed, planned)
        assert planned.is_exact or objective == "latency", seed
        check(problem, planned.best.placement, planned.best.replicas)


def test_plans_count_the_overhead_of_engine_calls():
    for seed in range(60):
        plain = random_problem(2000 + seed, blocks=(4, 12))
        rng = random.Random(seed)
        drawn = {device.block_ms: {"runtime_ms": round(rng.uniform(0, 40), 2), "max_batch": rng.choice([1, 4])}
                 for device in plain.devices}  # fmt: skip
        devices = tuple(dataclasses.replace(device, **drawn[device.block_ms]) for device in plain.devices)
        problem = dataclasses.replace(plain, devices=devices)
        planned = plan_placement(problem, "throughput")
        assert planned.best.value("throughput") == pytest.approx(brute_force(problem, "throughput"), rel=1e-9), seed
        assert planned.is_exact, seed


def check(problem, placement, replicas):
    """Check that each block has ``replicas`` holders, and that no device holds more than fits."""
    assert set(placement) == {device.name for device in problem.devices}
    for device in problem.devices:
        held = placement[device.name]
        assert len(set(held)) == len(held) <= device.capacity
    for block in range(problem.num_blocks):
        assert sum(block in held for held in placement.values()) == replicas


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_of_a_tiny_instance_is_better(seed):
    """Counts suffice: no placement with as many holders of each block is better than the best counts."""
    problem = random_problem(1000 + seed, devices=(2, 4), blocks=(2, 4))
    names = [device.name for device in problem.devices]
    placements = []
    for holders in itertools.product(
        itertools.combinations(range(len(names)), problem.replicas), repeat=problem.num_blocks
    ):
        held = {name: tuple(b for b, who in enumerate(holders) if i in who) for i, name in enumerate(names)}
        if all(len(held[device.name]) <= device.capacity for device in problem.devices):
            placements.append(held)
    for objective in OBJECTIVES:
        best = min(estimate(problem, placement).value(objective) for placement in placements)
        planned = plan_placement(problem, objective)
        if objective == "throughput":  # more holders than asked for may be better still
            assert planned.best.value(objective) <= best + 1e-9
            continue
        assert planned.best.value(objective) == pytest.approx(best, rel=1e-9), objective


@pytest.mark.release
@pytest.mark.parametrize("kinds", [4, pytest.param(100, marks=pytest.mark.release)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_plans_of_a_hundred_devices_are_no_worse_than_their_baselines(make_source, objective, kinds):
    rng = random.Random(1)
    drawn = [
        {"block_ms": rng.uniform(0.3, 3), "capacity": rng.randint(3, 48), "visit_ms": rng.uniform(0.2, 3),
         "wire_ms": rng.uniform(0.1, 2), "watts": rng.uniform(3, 20)}
        for _ in range(kinds)
    ]  # fmt: skip
    devices = tuple(PlannedDevice(f"d{i}", **drawn[i % kinds]) for i in range(100))
    problem = PlanningProblem(devices, 48, 2, source=make_source(1.0))
    planned = plan_placement(problem, objective)
    check(problem, planned.best.placement, planned.best.replicas)
    for baseline in planned.baselines.values():
        assert planned.best.value(objective) <= baseline.value(objective)


def test_one_device_alone_is_compared(make_source):
    """It gets its tokens from the same source over the same link as devices that share the blocks."""
    fast = PlannedDevice("fast", 1.0, 8, stem_ms=0.5, head_ms=0.5, visit_ms=5.0, watts=10.0)
    small = PlannedDevice("small", 0.1, 2, visit_ms=5.0, watts=1.0)
    problem = PlanningProblem((fast, small), 8, source=make_source(1.0, watts=3.0))
    planned = plan_placement(problem, "latency")
    estimates = planned.single.estimates
    assert planned.single.placement == {"fast": tuple(range(8))}
    assert (*estimates.route, estimates.latency_ms, estimates.throughput) == ("fast", 1.0 + 8 * 1.0 + 5.0, 1e3 / 8)
    assert estimates.energy_mj == 83.0
    assert planned.best.estimates == estimates
    assert planned.copies is None  # small has no room
    assert plan_placement(PlanningProblem((small, dataclasses.replace(small, name="s")), 4), "latency").single is None


def test_energy_needs_the_power_of_a_source_that_no_device_replaces(make_source):
    device = PlannedDevice("d", 1.0, 10, visit_ms=1.0, ends_size=0, watts=10.0)
    source = make_source(1.0, watts=None)
    known = plan_placement(PlanningProblem((device,), 8, source=source), "energy")
    assert known.best.estimates.energy_mj == 80.0
    device = dataclasses.replace(device, ends_size=3)
    with pytest.raises(UsageError, match="power of the source"):
        plan_placement(PlanningProblem((device,), 8, source=source), "energy")


def test_independent_copies_are_compared(make_source):
    """They run stem and head, and get JPEGs of a tenth of the tokens over the same links, with equal call overhead."""
    kinds = {
        "stem_ms": 0.5,
        "head_ms": 0.5,
        "visit_ms": 5.0,
        "runtime_ms": 1.0,
        "wire_ms": 1.0,
        "ends_size": 0,
    }
    devices = (PlannedDevice("a", 1.0, 8, watts=10.0, **kinds), PlannedDevice("b", 3.0, 8, watts=2.0, **kinds))
    source = make_source(1.0, visit_ms=2.0, wire_ms=1.0)
    problem = PlanningProblem(devices, 8, source=source, image_share=0.1)
    planned = plan_placement(problem, "throughput")
    assert planned.copies.placement == dict.fromkeys("ab", (*range(8), STEM, HEAD))
    alike = tuple(dataclasses.replace(devices[0], name=name) for name in "ab")
    busy = plan_placement(
        dataclasses.replace(problem, devices=alike, source=make_source(20.0, visit_ms=2.0, wire_ms=1.0)), "throughput"
    )
    assert (busy.best.placement, busy.is_exact) == (planned.copies.placement, False)
    copies = planned.copies.estimates
    assert copies.throughput == pytest.approx(1e3 / 9 + 1e3 / 25)
    assert copies.latency_ms == pytest.approx((2.0 + 4.0 - 2.0) + 0.1 + 1.0 + 9.0)
    assert copies.energy_mj == pytest.approx((10.0 * 1e3 + 2.0 * 1e3) / (1e3 / 9 + 1e3 / 25))
    slow = dataclasses.replace(problem, source=dataclasses.replace(source, wire_ms=100.0))
    assert plan_placement(slow, "throughput").copies.estimates.throughput == pytest.approx(100.0)
    beyond = dataclasses.replace(problem, devices=tuple(dataclasses.replace(d, runtime_ms=100.0) for d in devices))
    assert plan_placement(beyond, "throughput").copies.estimates.throughput == pytest.approx(2e3 / 109 + 2e3 / 125)
