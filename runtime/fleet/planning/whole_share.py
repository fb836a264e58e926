"""The probability that every block keeps a holder when devices fail, so that answers stay whole.

Devices fail independently, and so do zones, which take all of their devices with them. A placement is whole if no block
has lost all of its holders, so only the different sets of holders count.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ls_edge.runtime.fleet.planning.problem import Placement, PlannedDevice, PlanningProblem, holders_of

EXACT = 14
"""Number of devices and zones that may fail up to which all combinations are examined; one more doubles the time."""
RARE = 0.01
"""Beyond that, a sum over sets of holders up to this probability replaces the exact loss. It counts coinciding losses
twice: a smaller error, on the safe side."""
SAMPLES = 40_000
"""Number of draws otherwise: the standard error of a share of 0.9 is 0.0015."""
_SEED = 0


def whole_share(problem: PlanningProblem, placement: Placement) -> float:
    """Return the probability that every block keeps a holder; by a bound or by draws if there are many devices."""
    index = {device.name: number for number, device in enumerate(problem.devices)}
    sets = {frozenset(index[name] for name in held) for held in holders_of(problem, placement).values()}
    if frozenset() in sets:
        return 0.0
    share = 1.0
    for component in _components(problem, sets):
        share *= _share(problem, component)
    return share


def dead_sets(problem: PlanningProblem, members: Sequence[int]) -> Iterator[tuple[frozenset[int], float]]:
    """Yield every set of ``members`` (indices of devices) that may be lost together, and its probability."""
    zones = sorted(
        {zone for m in members if (zone := problem.devices[m].zone) is not None} & problem.zone_losses.keys()
    )
    for gone in itertools.product((False, True), repeat=len(zones)):
        likely = 1.0
        for zone, lost in zip(zones, gone, strict=True):
            likely *= problem.zone_losses[zone] if lost else 1 - problem.zone_losses[zone]
        lost_zones = {zone for zone, lost in zip(zones, gone, strict=True) if lost}
        taken = {m for m in members if problem.devices[m].zone in lost_zones}
        left = [m for m in members if m not in taken]
        for fails in itertools.product((False, True), repeat=len(left)):
            chance = likely
            for m, failed in zip(left, fails, strict=True):
                chance *= problem.devices[m].loss if failed else 1 - problem.devices[m].loss
            if chance > 0:
                yield frozenset(taken | {m for m, failed in zip(left, fails, strict=True) if failed}), chance


def _components(problem: PlanningProblem, sets: Collection[frozenset[int]]) -> list[list[frozenset[int]]]:
    """Group sets of holders so that groups share neither a device nor a zone that may fail."""
    groups: list[tuple[set[object], list[frozenset[int]]]] = []
    for held in sorted(sets, key=sorted):
        touched: set[object] = set(held)
        touched |= {zone for m in held if (zone := problem.devices[m].zone) in problem.zone_losses}
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
    members = sorted(frozenset().union(*sets))
    zones = {zone for m in members if (zone := problem.devices[m].zone) in problem.zone_losses}
    if len(members) + len(zones) <= EXACT:
        return sum(chance for dead, chance in dead_sets(problem, members) if not any(held <= dead for held in sets))
    if len(sets) == 1:
        return 1 - _all_gone(problem.devices, problem, members)
    gone_at_most = sum(_all_gone(problem.devices, problem, sorted(held)) for held in sets)
    if gone_at_most <= RARE:
        return 1 - gone_at_most
    rng = np.random.default_rng(_SEED)
    gone = {m: rng.random(SAMPLES) < problem.devices[m].loss for m in members}
    lost = {zone: rng.random(SAMPLES) < problem.zone_losses[zone] for zone in sorted(map(str, zones))}
    for m in members:
        zone = problem.devices[m].zone
        if zone is not None and zone in lost:
            gone[m] |= lost[zone]
    whole = np.ones(SAMPLES, dtype=bool)
    for held in sets:
        whole &= ~np.logical_and.reduce([gone[m] for m in held])
    return float(whole.mean())


def _all_gone(devices: Sequence[PlannedDevice], problem: PlanningProblem, members: Sequence[int]) -> float:
    """Return the probability that all ``members`` are lost; zones fail independently."""
    chance = 1.0
    for zone in {devices[m].zone for m in members}:
        alone = 1.0
        for m in members:
            if devices[m].zone == zone:
                alone *= devices[m].loss
        lost = problem.zone_losses.get(zone, 0.0) if zone is not None else 0.0
        chance *= lost + (1 - lost) * alone
    return chance
