"""The probability that every block keeps a holder, against sums over all states and closed forms."""

import itertools
import math
import random

import pytest

from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.planning.survival import EXACT, RARE, SAMPLES, completed_share, loss_states, whole_share


def make_problem(losses, zones=None, zone_losses=None, blocks=4):
    devices = tuple(
        PlannedDevice(f"d{number}", 1.0, blocks, loss=loss, zone=(zones or {}).get(number))
        for number, loss in enumerate(losses)
    )
    return PlanningProblem(devices, blocks, zone_losses=zone_losses or {})


def brute_force(problem, placement):
    """Sum over every combination of lost devices and zones."""
    zones = sorted(problem.zone_losses)
    total = 0.0
    for fails in itertools.product((False, True), repeat=len(problem.devices) + len(zones)):
        losses = [*(device.loss for device in problem.devices), *(problem.zone_losses[zone] for zone in zones)]
        lost_zones = set(itertools.compress(zones, fails[len(problem.devices) :]))
        alive = {
            device.name
            for device, failed in zip(problem.devices, fails, strict=False)
            if not failed and device.zone not in lost_zones
        }
        if all(any(block in placement[name] for name in alive) for block in range(problem.num_blocks)):
            total += math.prod(loss if failed else 1 - loss for loss, failed in zip(losses, fails, strict=True))
    return total


def placed(problem, holders):
    """Return the placement in which ``holders`` hold each block."""
    return {
        device.name: tuple(block for block, held in enumerate(holders) if number in held)
        for number, device in enumerate(problem.devices)
    }


@pytest.mark.parametrize("seed", range(60))
def test_the_share_is_the_sum_over_all_states(seed):
    rng = random.Random(seed)
    count, blocks = rng.randint(1, 7), rng.randint(1, 5)
    zones = {number: rng.choice("xyz") for number in range(count) if rng.random() < 0.5}
    problem = make_problem(
        [rng.choice([0.0, 0.01, 0.3, 0.9]) for _ in range(count)],
        zones,
        rng.choice([{}, {"x": 0.1}, {"x": 0.2, "y": 0.5}]),
        blocks,
    )
    holders = [rng.sample(range(count), rng.randint(1, count)) for _ in range(blocks)]
    placement = placed(problem, holders)
    assert whole_share(problem, placement) == pytest.approx(brute_force(problem, placement), abs=1e-12)


def test_a_block_without_a_holder_is_never_whole():
    problem = make_problem([0.1, 0.1], blocks=2)
    assert whole_share(problem, {"d0": (0,), "d1": (0,)}) == 0.0


def test_holders_of_one_set_are_exact_in_a_fleet_of_any_size():
    problem = make_problem([0.8] * 20, dict.fromkeys(range(10), "rack"), {"rack": 0.3}, blocks=1)
    share = whole_share(problem, placed(problem, [range(20)]))
    assert share == pytest.approx(1 - (0.3 + 0.7 * 0.8**10) * 0.8**10)


def test_fleets_whose_blocks_share_no_device_are_exact():
    problem = make_problem([0.2] * 40, blocks=20)
    assert whole_share(problem, placed(problem, [(2 * n, 2 * n + 1) for n in range(20)])) == pytest.approx(0.96**20)


@pytest.mark.parametrize("loss", [0.5, 0.8])
def test_large_fleets_are_on_the_safe_side_if_losses_are_rare_and_close_otherwise(loss):
    """Two blocks share a device, among more devices than are examined state by state."""
    problem = make_problem([loss] * 20, blocks=2)
    exact = 1 - loss**8 - loss**13 + loss**20
    share = whole_share(problem, placed(problem, [range(8), range(7, 20)]))
    if loss**8 + loss**13 < RARE:
        assert share == pytest.approx(exact - loss**20, rel=1e-12)
    else:
        assert share == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / SAMPLES))


@pytest.mark.parametrize("count", [EXACT - 1, EXACT])
def test_states_have_probabilities_that_add_up_to_one_and_to_the_loss_of_each_device(count):
    """With one zone, all states of ``EXACT - 1`` devices are examined, and random ones of more."""
    losses = [0.05 * (number + 1) for number in range(count)]
    problem = make_problem(losses, {0: "x", 1: "x"}, {"x": 0.25})
    lost, chances = loss_states(problem, range(count))
    wanted = [0.25 + 0.75 * loss if number < 2 else loss for number, loss in enumerate(losses)]
    assert chances.sum() == pytest.approx(1)
    assert lost @ chances == pytest.approx(wanted, abs=1e-12 if count < EXACT else 0.01)
    assert (lost[0] & lost[1]) @ chances == pytest.approx(
        0.25 + 0.75 * 0.05 * 0.1, abs=1e-12 if count < EXACT else 0.01
    )


@pytest.mark.parametrize(
    ("up", "run", "budget"), [(1.0, 0.5, 2.0), (1.0, 1.5, 2.0), (10.0, 0.5, 0.9), (0.1, 0.3, 1.5), (1.0, 1.0, 15.0)]
)
def test_restarted_runs_get_through_as_often_as_drawn_ones(up, run, budget):
    rng, count, through = random.Random(1), 20_000, 0
    for _ in range(count):
        at = 0.0
        while at + run <= budget and (lost := rng.expovariate(1 / up)) < run:
            at += lost
        through += at + run <= budget
    share = completed_share(up, run, budget)
    assert share == pytest.approx(through / count, abs=4 * math.sqrt(share * (1 - share) / count) + 1e-4)


def test_a_run_has_to_fit_into_the_budget():
    assert completed_share(10.0, 1.01, 1.0) == 0.0
    assert completed_share(10.0, 1.0, 1.0) == pytest.approx(math.exp(-0.1))
    assert completed_share(10.0, 0.0, 1.0) == pytest.approx(1.0)
    assert completed_share(60.0, 0.001, 600.0) == pytest.approx(1.0)


def test_many_losses_in_a_budget_are_counted_on_the_safe_side():
    """Runs across the middle of the budget are left out."""
    half = completed_share(1.0, 5.0, 15.0)
    assert half < completed_share(1.0, 5.0, 30.0) <= 1 - (1 - half) ** 2 < 1
