"""Placements by simple rules, which need no solver and are always at hand.

Each rule gives counts (how many blocks each device holds) or sets of holders, for one number of holders a block.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ls_edge.runtime.fleet.planning.assignment import assign_in_circle, assign_route, assign_sets
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem, zones_of


def heuristic_placement(problem: PlanningProblem, objective: Objective, replicas: int) -> Placement | None:
    """A placement with ``replicas`` holders a block, good by a rule; None where the rule finds none."""
    if not problem.fits(replicas):
        return None
    if objective == "latency":
        return _few_fast_devices(problem, replicas)
    if objective == "throughput":
        return _balanced(problem, replicas)
    if objective == "energy":
        order = sorted(range(len(problem.devices)), key=lambda i: (problem.devices[i].block_mj or 0.0, i))
        counts = fill(problem, order, replicas)
        return None if counts is None else assign_in_circle(problem, counts)
    return _mirrors(problem, replicas)


def fill(
    problem: PlanningProblem, order: Sequence[int], replicas: int, most: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Give devices in this order all that they and their zones have room for; None where that is not enough.

    ``most`` limits each device further.
    """
    counts = [0] * len(problem.devices)
    zone_of = {index: zone for zone, devices in zones_of(problem.devices).items() for index in devices}
    zone_left = dict.fromkeys(zone_of.values(), problem.num_blocks)
    left = replicas * problem.num_blocks
    for index in order:
        room = problem.room(problem.devices[index])
        if most is not None:
            room = min(room, most[index])
        counts[index] = min(left, room, zone_left[zone_of[index]])
        zone_left[zone_of[index]] -= counts[index]
        left -= counts[index]
    return tuple(counts) if left == 0 else None


def _few_fast_devices(problem: PlanningProblem, replicas: int) -> Placement | None:
    """Devices in the order of what a block costs there, visit included, as few as hold the model."""
    devices = problem.devices
    best: tuple[float, tuple[int, ...]] | None = None
    for share in range(1, problem.num_blocks + 1):
        # What a block costs depends on how many share the visit, which is not known before.
        order = sorted(
            (i for i in range(len(devices)) if problem.room(devices[i])),
            key=lambda i: (devices[i].block_ms + devices[i].visit_ms / min(share, problem.room(devices[i])), i),
        )
        counts = fill(problem, order, 1, [problem.num_blocks] * len(devices))
        if counts is None:
            continue
        cost = sum(
            count * device.block_ms + device.visit_ms for count, device in zip(counts, devices, strict=True) if count
        )
        if best is None or cost < best[0]:
            best = cost, counts
    return None if best is None else assign_route(problem, best[1], replicas)


def _balanced(problem: PlanningProblem, replicas: int) -> Placement | None:
    """The least ``T`` such that devices whose blocks take at most ``T``, and whose link allows it, hold all copies."""
    devices = problem.devices
    times = [[device.taken_ms(count) for count in range(1, problem.room(device) + 1)] for device in devices]
    candidates = sorted({ms for one in times for ms in one} | {device.wire_ms for device in devices})

    def counts(most: float) -> tuple[int, ...] | None:
        limits = [
            0 if device.wire_ms > most * (1 + 1e-12) else bisect.bisect_right(one, most * (1 + 1e-12))
            for device, one in zip(devices, times, strict=True)
        ]  # fmt: skip
        order = sorted(range(len(devices)), key=lambda i: (devices[i].busy_ms, devices[i].visit_ms, i))
        return fill(problem, order, replicas, limits)

    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if counts(candidates[middle]) is None:
            low = middle + 1
        else:
            high = middle
    found = counts(candidates[low])
    return None if found is None else assign_in_circle(problem, found)


def _mirrors(problem: PlanningProblem, replicas: int) -> Placement | None:
    """Groups of devices that hold the same blocks, the likeliest survivors and the roomiest first.

    Where what is left over makes no full group, its blocks are given out in a circle instead.
    """
    devices = problem.devices
    zone_of = {index: zone for zone, members in zones_of(devices).items() for index in members}
    held = (index for index in range(len(devices)) if problem.room(devices[index]))
    left = sorted(held, key=lambda index: (-problem.room(devices[index]), devices[index].loss, index))
    sets: list[tuple[frozenset[int], int]] = []
    blocks = problem.num_blocks
    while blocks:
        group: list[int] = []
        for index in left:
            if len(group) < replicas and zone_of[index] not in {zone_of[i] for i in group}:
                group.append(index)
        if len(group) < replicas:
            counts = fill(problem, sorted(range(len(devices)), key=lambda i: (devices[i].loss, i)), replicas)
            return None if counts is None else assign_in_circle(problem, counts)
        count = min(blocks, *(problem.room(devices[index]) for index in group))
        sets.append((frozenset(group), count))
        blocks -= count
        left = [index for index in left if index not in group]
    return assign_sets(problem, sets)
