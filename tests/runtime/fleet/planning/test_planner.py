"""Plans against brute force: by counts on random instances, by every placement on tiny ones."""

import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.fleet.planning.estimates import estimate
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import OBJECTIVES, PlannedDevice, PlanningProblem, zones_of


def random_problem(seed, devices=(1, 5), blocks=(1, 8), zones=True):
    """Return a problem that has a placement; devices are sometimes alike, sometimes in zones."""
    rng = random.Random(seed)
    while True:
        count = rng.randint(*devices)
        num_blocks = rng.randint(*blocks)
        kinds = [
            {
                "block_ms": round(rng.uniform(0.2, 5), 2),
                "capacity": rng.randint(0, 10),
                "visit_ms": round(rng.uniform(0, 4), 2),
                "wire_ms": round(rng.uniform(0, 6), 2),
                "watts": round(rng.uniform(2, 30), 1),
                "loss": rng.choice([0.0, 0.01, 0.1, 0.3]),
            }
            for _ in range(rng.randint(1, count))
        ]
        zoned = zones and rng.random() < 0.4
        made = tuple(
            PlannedDevice(f"d{i}", **rng.choice(kinds), zone=rng.choice(["x", "y", None]) if zoned else None)
            for i in range(count)
        )
        losses = {"x": 0.05} if zoned and rng.random() < 0.5 else {}
        replicas, stem_ms = rng.randint(1, 3), round(rng.uniform(0, 3), 2)
        source = PlannedDevice("source", 1.0, 0, stem_ms=stem_ms, visit_ms=0.5, wire_ms=0.1, watts=0.0)
        problem = PlanningProblem(made, num_blocks, replicas, zone_losses=losses, source=source)
        if problem.fits(problem.replicas):
            return problem


@functools.cache
def compositions(total, parts):
    """Return all ways to write ``total`` as a sum of ``parts`` numbers from 0."""
    bars = itertools.combinations(range(total + parts - 1), parts - 1)
    return np.array([np.diff([-1, *bar, total + parts - 1]) - 1 for bar in bars]).reshape(-1, parts)


def counts_with(problem, replicas):
    """Return every count of blocks by device that gives each block ``replicas`` holders."""
    rooms = [min(problem.num_blocks, device.capacity) for device in problem.devices]
    grids = np.meshgrid(*(np.arange(room + 1) for room in rooms), indexing="ij")
    found = np.stack([grid.ravel() for grid in grids], axis=1)
    found = found[found.sum(axis=1) == replicas * problem.num_blocks]
    for members in zones_of(problem.devices).values():
        found = found[found[:, members].sum(axis=1) <= problem.num_blocks]
    return found


def brute_force(problem, objective):
    """Return the least value of an objective over every count, by the formulas written once more."""
    devices = problem.devices
    t, c, o, e = (np.array([getattr(device, key) for device in devices])
                  for key in ("block_ms", "visit_ms", "wire_ms", "block_mj"))  # fmt: skip
    if objective == "latency":
        n = counts_with(problem, 1)
        return problem.source.stem_ms + problem.source.visit_ms + (n @ t + (n > 0) @ c).min()
    if objective == "energy":
        return (counts_with(problem, problem.replicas) @ e).min() / problem.replicas
    best = np.inf
    for replicas in range(problem.replicas, len(devices) + 1):
        if objective == "throughput":
            n = counts_with(problem, replicas)
            if len(n):
                beyond, most = (np.array([getattr(device, key) for device in devices])
                                for key in ("beyond_ms", "blocks_a_call"))  # fmt: skip
                taken = np.maximum(n * t, (n * t + np.ceil(n / most) * beyond) / 2)
                slowest = np.maximum(taken.max(axis=1), ((n > 0) * o).max(axis=1)) / replicas
                best = min(best, -1e3 / max(slowest.min(), problem.source.stem_ms, problem.source.wire_ms))
        else:
            best = min(best, survival(problem, replicas))
    return best


def survival(problem, replicas):
    """Return the best probability that no block is lost, negated, over all divisions of the blocks among sets."""
    devices = problem.devices
    sets = [
        held for held in itertools.combinations(range(len(devices)), replicas)
        if len({devices[i].zone or i for i in held}) == replicas
    ]  # fmt: skip
    if not sets:
        return np.inf
    n = compositions(problem.num_blocks, len(sets))
    member = np.array([[i in held for held in sets] for i in range(len(devices))])
    n = n[(n @ member.T <= [device.capacity for device in devices]).all(axis=1)]
    best = np.inf
    zones = sorted(problem.zone_losses)
    for used in {tuple(row) for row in n > 0}:
        whole = 0.0
        for states in itertools.product((0, 1), repeat=len(devices) + len(zones)):
            chance, lost = 1.0, set()
            for zone, gone in zip(zones, states[len(devices) :], strict=True):
                chance *= problem.zone_losses[zone] if gone else 1 - problem.zone_losses[zone]
                lost |= {zone} if gone else set()
            dead = set()
            for i, gone in enumerate(states[: len(devices)]):
                chance *= devices[i].loss if gone else 1 - devices[i].loss
                dead |= {i} if gone or devices[i].zone in lost else set()
            if not any(u and dead.issuperset(held) for u, held in zip(used, sets, strict=True)):
                whole += chance
        best = min(best, -whole)
    return best


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_plans_of_200_random_instances_are_as_good_as_brute_force(objective):
    for seed in range(200):
        problem = random_problem(seed)
        planned = plan_placement(problem, objective)
        best = brute_force(problem, objective)
        assert planned.best.formula.value(objective) == pytest.approx(best, rel=1e-9), (seed, planned)
        assert planned.is_exact == (objective != "survival"), seed
        check(problem, planned.best.placement, planned.best.replicas)


def test_plans_count_the_overhead_of_engine_calls():
    """Up to 16 devices, the simulation counts it too; beyond that, only the formulas do."""
    for seed in range(60):
        plain = random_problem(2000 + seed, blocks=(4, 12))
        rng = random.Random(seed)
        drawn = {device.block_ms: {"runtime_mean_ms": round(rng.uniform(0, 40), 2), "max_batch": rng.choice([1, 4])}
                 for device in plain.devices}  # fmt: skip
        devices = tuple(dataclasses.replace(device, **drawn[device.block_ms]) for device in plain.devices)
        problem = dataclasses.replace(plain, devices=devices)
        best = brute_force(problem, "throughput")
        planned = plan_placement(problem, "throughput")
        assert planned.best.formula.value("throughput") == pytest.approx(best, rel=1e-9), (seed, planned)
        assert planned.is_exact, seed


def check(problem, placement, replicas):
    """Check that each block has ``replicas`` holders in different zones, and that no device holds more than fits."""
    zone_of = {problem.devices[i].name: zone for zone, members in zones_of(problem.devices).items() for i in members}
    assert set(placement) == set(zone_of)
    for device in problem.devices:
        held = placement[device.name]
        assert len(set(held)) == len(held) <= device.capacity
    for block in range(problem.num_blocks):
        zones = [zone_of[name] for name, held in placement.items() if block in held]
        assert len(zones) == len(set(zones)) == replicas


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
        distinct = all(
            len({problem.devices[i].zone or i for i in who}) == problem.replicas for who in holders
        )  # fmt: skip
        if distinct and all(len(held[device.name]) <= device.capacity for device in problem.devices):
            placements.append(held)
    only = PlanningProblem(**{**vars(problem), "max_replicas": problem.replicas})
    for objective in OBJECTIVES:
        best = min(estimate(problem, placement).value(objective) for placement in placements)
        planned = plan_placement(only, objective)
        assert planned.best.formula.value(objective) == pytest.approx(best, rel=1e-9), objective


@pytest.mark.release
@pytest.mark.parametrize("kinds", [4, pytest.param(100, marks=pytest.mark.release)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_plans_of_a_hundred_devices_are_no_worse_than_their_baselines(make_source, objective, kinds):
    rng = random.Random(1)
    drawn = [
        {"block_ms": rng.uniform(0.3, 3), "capacity": rng.randint(3, 48), "visit_ms": rng.uniform(0.2, 3),
         "wire_ms": rng.uniform(0.1, 2), "watts": rng.uniform(3, 20), "loss": rng.uniform(0.01, 0.1)}
        for _ in range(kinds)
    ]  # fmt: skip
    devices = tuple(PlannedDevice(f"d{i}", **drawn[i % kinds]) for i in range(100))
    problem = PlanningProblem(devices, 48, 2, source=make_source(1.0))
    planned = plan_placement(problem, objective)
    check(problem, planned.best.placement, planned.best.replicas)
    for baseline in planned.baselines.values():
        assert planned.best.formula.value(objective) <= baseline.formula.value(objective)


def test_one_device_alone_is_compared(make_source):
    """It gets its tokens from the same source over the same link as devices that share the blocks."""
    fast = PlannedDevice("fast", 1.0, 8, stem_ms=0.5, head_ms=0.5, visit_ms=5.0, watts=10.0, loss=0.1)
    small = PlannedDevice("small", 0.1, 2, visit_ms=5.0, watts=1.0)
    problem = PlanningProblem((fast, small), 8, source=make_source(1.0, watts=3.0))
    planned = plan_placement(problem, "latency")
    estimates = planned.single.formula
    assert planned.single.placement == {"fast": tuple(range(8))}
    assert (*estimates.route, estimates.latency_ms, estimates.throughput) == ("fast", 1.0 + 8 * 1.0 + 5.0, 1e3 / 8)
    assert (estimates.energy_mj, estimates.whole_share) == (83.0, 0.9)
    assert planned.best.formula == estimates
    assert planned.copies is None  # small has no room
    assert plan_placement(PlanningProblem((small, dataclasses.replace(small, name="s")), 4), "latency").single is None


def test_energy_needs_the_power_of_a_source_that_no_device_replaces(make_source):
    device = PlannedDevice("d", 1.0, 10, visit_ms=1.0, ends_size=0, watts=10.0)
    source = make_source(1.0, watts=None)
    known = plan_placement(PlanningProblem((device,), 8, source=source), "energy")
    assert known.best.formula.energy_mj == 80.0
    device = dataclasses.replace(device, ends_size=3)
    with pytest.raises(UsageError, match=r"power of the source.*--source"):
        plan_placement(PlanningProblem((device,), 8, source=source), "energy")


def test_independent_copies_are_compared(make_source):
    """They run stem and head, and get JPEGs of a tenth of the tokens over the same links, with equal call overhead."""
    kinds = {
        "stem_ms": 0.5,
        "head_ms": 0.5,
        "visit_ms": 5.0,
        "runtime_ms": 1.0,
        "wire_ms": 1.0,
        "loss": 0.1,
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
    copies = planned.copies.formula
    assert copies.throughput == pytest.approx(1e3 / 9 + 1e3 / 25)
    assert copies.latency_ms == pytest.approx((2.0 + 4.0 - 2.0) + 0.1 + 1.0 + 9.0)
    assert copies.energy_mj == pytest.approx((10.0 * 1e3 + 2.0 * 1e3) / (1e3 / 9 + 1e3 / 25))
    assert copies.whole_share == pytest.approx(0.99)
    slow = dataclasses.replace(problem, source=dataclasses.replace(source, wire_ms=100.0))
    assert plan_placement(slow, "throughput").copies.formula.throughput == pytest.approx(100.0)
    beyond = dataclasses.replace(problem, devices=tuple(dataclasses.replace(d, runtime_mean_ms=100.0) for d in devices))
    assert plan_placement(beyond, "throughput").copies.formula.throughput == pytest.approx(2e3 / 109 + 2e3 / 125)
