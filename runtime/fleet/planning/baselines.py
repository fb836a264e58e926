"""Placements that need no planner, to compare a plan with."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ls_edge.runtime.fleet.planning.assignment import assign_in_circle
from ls_edge.runtime.fleet.planning.figures import Figures
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlannedDevice, PlanningProblem, zones_of


def _single_figures(problem: PlanningProblem, device: PlannedDevice) -> Figures:
    """Estimate a device that has the images itself and runs the whole model without a network."""
    chain = device.stem_ms + problem.num_blocks * device.block_ms + device.head_ms
    ends = device.stem_ms + device.head_ms if device.ends_ms is None else device.ends_ms
    busy = ends + problem.num_blocks * device.busy_ms
    gone = problem.zone_losses.get(device.zone, 0.0) if device.zone is not None else 0.0
    battery = None
    if device.battery_wh is not None and device.watts:
        battery = device.battery_wh / device.watts
    return Figures(
        latency_ms=chain,
        throughput=1e3 / busy if busy > 0 else float("inf"),
        energy_mj=None if device.watts is None else device.watts * busy,
        battery_h=battery,
        whole_share=(1 - device.loss) * (1 - gone),
        route=(device.name,),
    )


def best_single(problem: PlanningProblem, objective: Objective) -> Figures | None:
    """Estimate the best device alone that has memory for the whole model; None if there is none."""
    alone = [_single_figures(problem, device) for device in problem.devices if device.whole]
    return min(alone, key=lambda one: (one.value(objective), one.latency_ms, one.route), default=None)


def round_robin(problem: PlanningProblem) -> Placement | None:
    """Give each block to the next device with room in another zone; None if a block finds no device."""
    zone_of = {index: zone for zone, devices in zones_of(problem.devices).items() for index in devices}
    held: list[list[int]] = [[] for _ in problem.devices]
    turn = 0
    for block in problem.band_order:
        zones: set[str] = set()
        for _ in range(problem.replicas):
            for step in range(len(held)):
                index = (turn + step) % len(held)
                if zone_of[index] not in zones and len(held[index]) < problem.room(problem.devices[index]):
                    break
            else:
                return None
            held[index].append(block)
            zones.add(zone_of[index])
            turn = index + 1
    return {device.name: tuple(sorted(given)) for device, given in zip(problem.devices, held, strict=True)}


def equal_split(problem: PlanningProblem) -> Placement | None:
    """Give each device a stretch of equal length; None if a device has no room for it."""
    each, more = divmod(problem.num_blocks * problem.replicas, len(problem.devices))
    counts = [each + (index < more) for index in range(len(problem.devices))]
    return _in_stretches(problem, counts)


def trained_order(problem: PlanningProblem) -> Placement | None:
    """Plan a pipeline in trained order with longer stretches on faster devices; None if memory does not allow it.

    Each device holds as many blocks as it runs within ``T``, for the least possible ``T``.
    """
    wanted = problem.num_blocks * problem.replicas
    times = [[device.taken_ms(n) for n in range(1, problem.num_blocks + 1)] for device in problem.devices]
    for most in sorted({ms for one in times for ms in one}):
        counts = []
        left = wanted
        for device, one in zip(problem.devices, times, strict=True):
            count = min(left, problem.room(device), bisect.bisect_right(one, most * (1 + 1e-12)))
            counts.append(count)
            left -= count
        if left == 0:
            return _in_stretches(problem, counts)
    return None


def _in_stretches(problem: PlanningProblem, counts: Sequence[int]) -> Placement | None:
    """Assign in the order of the devices; None if one has no room or a zone would hold a block twice."""
    if any(count > problem.room(device) for count, device in zip(counts, problem.devices, strict=True)):
        return None
    for devices in zones_of(problem.devices).values():
        if sum(counts[index] for index in devices) > problem.num_blocks:
            return None
    return assign_in_circle(problem, tuple(counts))
