"""Searches for the safest placement, against every placement of tiny fleets."""

import itertools
import random

import pytest

from ls_edge.runtime.fleet.planning.holder_search import HolderExchange
from ls_edge.runtime.fleet.planning.placements import best_placement
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem, assign_sets
from ls_edge.runtime.fleet.planning.survival import whole_share


def make_problem(seed, count=4, blocks=3):
    """Return devices with room for a few blocks, some of them in zones that may fail."""
    rng = random.Random(seed)
    devices = tuple(
        PlannedDevice(
            f"d{number}",
            1.0,
            rng.randint(2, blocks),
            loss=rng.choice([0.01, 0.1, 0.4]),
            zone=rng.choice([None, None, "x"]),
        )
        for number in range(count)
    )
    return PlanningProblem(devices, blocks, 2, zone_losses={"x": 0.05})


def placements_of(problem):
    """Yield every placement with two holders of each block in different zones, within the memory of the devices."""
    devices = problem.devices
    pairs = [
        frozenset(pair)
        for pair in itertools.combinations(range(len(devices)), 2)
        if len({devices[index].zone or index for index in pair}) == 2
    ]
    for chosen in itertools.product(pairs, repeat=problem.num_blocks):
        placement = assign_sets(problem, [(pair, 1) for pair in chosen])
        if all(len(placement[device.name]) <= device.capacity for device in devices):
            yield placement


SEEDS = [seed for seed in range(40) if next(placements_of(make_problem(seed)), None) is not None]


@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_from_several_starts_find_the_safest_placement(seed):
    problem = make_problem(seed)
    shares = [whole_share(problem, placement) for placement in placements_of(problem)]
    found = best_placement(problem, "survival", 2).placement
    assert whole_share(problem, found) == pytest.approx(max(shares), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_keep_the_rules_and_never_make_a_placement_less_safe(seed):
    problem = make_problem(seed)
    allowed = list(placements_of(problem))
    for start in random.Random(seed).sample(allowed, min(3, len(allowed))):
        found = HolderExchange(problem, start).run()
        assert all(len(found[device.name]) <= device.capacity for device in problem.devices)
        assert problem.allows(found)
        assert whole_share(problem, found) >= whole_share(problem, start) * (1 - 1e-9)


def test_exchanges_move_blocks_to_the_safest_devices():
    devices = tuple(
        PlannedDevice(name, 1.0, 4, loss=loss) for name, loss in zip("abcd", (0.3, 0.2, 0.1, 0.01), strict=True)
    )
    problem = PlanningProblem(devices, 4, 2)
    found = HolderExchange(problem, {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3), "c": (), "d": ()}).run()
    assert found == {"a": (), "b": (), "c": (0, 1, 2, 3), "d": (0, 1, 2, 3)}
