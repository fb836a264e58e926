"""The best placement with a given number of holders of each block, by objective."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ls_edge.runtime.fleet.planning.problem import (
    Count,
    Objective,
    Placement,
    PlanningProblem,
    assign_in_circle,
    assign_route,
)


@dataclass(frozen=True)
class Found:
    """A placement with a given number of holders of each block."""

    placement: Placement
    is_exact: bool
    """Whether no placement with the same number of holders is better."""
    route: tuple[str, ...] = ()
    """Devices that a single request visits, if the placement was made for that."""


def best_placement(problem: PlanningProblem, objective: Objective, replicas: int) -> Found:
    """Return the best placement with ``replicas`` holders of each block."""
    if objective == "latency":
        return _fastest_route(problem, replicas)
    if objective == "throughput":
        return _balanced(problem, replicas)
    return _filled(problem, replicas, [device.block_mj or 0.0 for device in problem.devices], is_exact=True)


def fill(
    problem: PlanningProblem, replicas: int, order: Sequence[int], most: Sequence[int] | None = None
) -> Count | None:
    """Give devices, in this order, as many blocks as fit; None if copies are left over.

    ``most`` limits each device further.
    """
    counts = [0] * len(problem.devices)
    left = replicas * problem.num_blocks
    for index in order:
        room = problem.room(problem.devices[index])
        counts[index] = min(left, room if most is None else min(room, most[index]))
        left -= counts[index]
    return tuple(counts) if left == 0 else None


def _filled(problem: PlanningProblem, replicas: int, costs: Sequence[float], *, is_exact: bool) -> Found:
    """Fill the cheapest devices first."""
    counts = fill(problem, replicas, sorted(range(len(costs)), key=lambda index: (costs[index], index)))
    assert counts is not None, "the planner asks for no more holders than fit"
    return Found(assign_in_circle(problem, counts), is_exact)


def _fastest_route(problem: PlanningProblem, replicas: int) -> Found:
    """Find the devices and counts of the fastest route, then further holders of its blocks."""
    best: list[tuple[float, Count]] = [(0.0, ()), *[(math.inf, ())] * problem.num_blocks]
    for device in problem.devices:
        room, before = problem.room(device), best
        best = []
        for blocks in range(problem.num_blocks + 1):
            options = [before[blocks][0]]
            options += [
                before[blocks - n][0] + device.visit_ms + n * device.block_ms for n in range(1, min(room, blocks) + 1)
            ]
            n = options.index(min(options))
            best.append((options[n], (*before[blocks - n][1], n)))
    placement = assign_route(problem, best[-1][1], replicas)
    if placement is None:  # the other devices have too little memory for further holders
        return _filled(problem, replicas, [device.block_ms for device in problem.devices], is_exact=False)
    route = (device.name for device, count in zip(problem.devices, best[-1][1], strict=True) if count)
    return Found(placement, is_exact=len(problem.bands) <= 1, route=tuple(route))


def _balanced(problem: PlanningProblem, replicas: int) -> Found:
    """Find the least time in which all devices can run their blocks and all links can carry the tokens."""
    devices = problem.devices
    times = [[device.taken_ms(count) for count in range(1, problem.room(device) + 1)] for device in devices]
    candidates = sorted({ms for one in times for ms in one} | {device.wire_ms for device in devices})
    order = sorted(range(len(devices)), key=lambda i: (devices[i].busy_ms, devices[i].visit_ms, i))

    def counts(most: float) -> Count | None:
        limits = [
            0 if device.wire_ms > most else bisect.bisect_right(one, most)
            for device, one in zip(devices, times, strict=True)
        ]
        return fill(problem, replicas, order, limits)

    least = bisect.bisect_left(candidates, True, key=lambda most: counts(most) is not None)
    found = counts(candidates[least])
    assert found is not None, "the planner asks for no more holders than fit"
    return Found(assign_in_circle(problem, found), is_exact=len(problem.bands) <= 1)
