"""Survival: the probabilities that every block keeps a holder when devices fail, and that a request completes.

Devices fail independently, and so do zones, with all of their devices. A placement is whole unless all holders of a
block are lost. The probability is a sum over states of the devices: all states if few devices matter, else random ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from ls_edge.runtime.fleet.planning.problem import Placement, PlanningProblem, holders_of

EXACT = 14
"""Largest number of devices and zones for which all states are examined; one more doubles the time."""
SAMPLES = 40_000
"""Number of random states otherwise: the standard error of a share of 0.9 is 0.0015."""
RARE = 0.01
"""Largest probability of a loss for which a sum over sets of holders replaces random states, whose resolution would be
too low. The sum counts coinciding losses twice: a smaller error, on the safe side."""
_SEED = 0
_MOST_LOSSES = 16.0
"""Largest expected number of losses in a budget for which the sum of :func:`completed_share` is accurate."""
_TERMS = 100
"""Number of terms of that sum; further ones are below 1e-30."""


def whole_share(problem: PlanningProblem, placement: Placement) -> float:
    """Return the probability that every block keeps a holder."""
    index = {device.name: number for number, device in enumerate(problem.devices)}
    sets = {frozenset(index[name] for name in held) for held in holders_of(problem, placement).values()}
    if frozenset() in sets:
        return 0.0
    return math.prod(_share(problem, members) for members in _components(problem, sets))


def completed_share(up_s: float, run_s: float, budget_s: float) -> float:
    """Return the probability that a request, restarted whenever its board is lost, completes a run in the budget.

    Losses are a Poisson process, one per ``up_s``, and the next run starts immediately, so this is the probability of a
    gap of ``run_s`` between two losses, the start, or the end. A budget with many losses is divided into two parts, and
    runs across both do not count.
    """
    losses, gap = budget_s / up_s, run_s / up_s
    if losses > _MOST_LOSSES:
        return 1 - (1 - completed_share(up_s, run_s, budget_s / 2)) ** 2
    share = 0.0
    most = _TERMS if gap * _TERMS <= losses else math.floor(losses / gap)
    for n in range(1, most + 1):
        left = losses - n * gap
        share -= (-1) ** n * math.exp(-n * gap) * left ** (n - 1) / math.factorial(n - 1) * (1 + left / n)
    return share


def loss_states(problem: PlanningProblem, members: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the devices ``members`` are lost, ``[members, states]``, and the probability of each state."""
    zones = _zones(problem, members)
    chances = np.array([*(problem.devices[m].loss for m in members), *(problem.zone_losses[zone] for zone in zones)])
    if len(chances) > EXACT:
        fails = np.random.default_rng(_SEED).random((len(chances), SAMPLES)) < chances[:, None]
        likely = np.full(SAMPLES, 1 / SAMPLES)
    else:
        fails = (np.arange(2 ** len(chances)) >> np.arange(len(chances))[:, None]) & 1 > 0
        likely = np.where(fails, chances[:, None], 1 - chances[:, None]).prod(axis=0)
    lost = fails[: len(members)]
    for zone, zone_fails in zip(zones, fails[len(members) :], strict=True):
        lost[[problem.devices[m].zone == zone for m in members]] |= zone_fails
    return lost, likely


def _zones(problem: PlanningProblem, members: Collection[int]) -> list[str]:
    """Return the zones of these devices that can fail as a whole."""
    return sorted(problem.zone_losses.keys() & {problem.devices[m].zone for m in members})


def _components(problem: PlanningProblem, sets: Collection[frozenset[int]]) -> list[list[frozenset[int]]]:
    """Group sets of holders so that groups share neither a device nor a zone that can fail."""
    groups: list[tuple[set[object], list[frozenset[int]]]] = []
    for held in sorted(sets, key=sorted):
        touched: set[object] = {*held, *_zones(problem, held)}
        joined = [held]
        apart = []
        for nodes, members in groups:
            if nodes & touched:
                touched |= nodes
                joined += members
            else:
                apart.append((nodes, members))
        groups = [*apart, (touched, joined)]
    return [members for _, members in groups]


def _share(problem: PlanningProblem, sets: Sequence[frozenset[int]]) -> float:
    """Return the probability that no set of holders is lost completely."""
    members = sorted(frozenset().union(*sets))
    if len(members) + len(_zones(problem, members)) > EXACT:
        lost_at_most = sum(_all_lost(problem, held) for held in sets)
        if len(sets) == 1 or lost_at_most <= RARE:
            return 1 - lost_at_most
    lost, chances = loss_states(problem, members)
    row = {m: number for number, m in enumerate(members)}
    broken = np.any([lost[[row[m] for m in held]].all(axis=0) for held in sets], axis=0)
    return float(sum(chances[~broken].tolist()))


def _all_lost(problem: PlanningProblem, members: Collection[int]) -> float:
    """Return the probability that all devices are lost."""
    zones = _zones(problem, members)
    devices = [problem.devices[m] for m in sorted(members)]
    chance = math.prod(device.loss for device in devices if device.zone not in zones)
    for zone in zones:
        lost = problem.zone_losses[zone]
        chance *= lost + (1 - lost) * math.prod(device.loss for device in devices if device.zone == zone)
    return chance
