"""Plan a placement: the best by the formulas, next to placements that need no planner.

For throughput and survival more holders per block can be better than the fewest that were asked for, so every number
that memory allows is tried; for latency and energy they cannot.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ls_edge.runtime.fleet.planning.figures import Figures, figures_of
from ls_edge.runtime.fleet.planning.placements import best_placement
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem, assign_in_circle, zones_of
from ls_edge.runtime.fleet.planning.survival import whole_share
from ls_edge.runtime.routing.limits import Limits

NEGLIGIBLE_LOSS = 1e-9
"""Probability of a loss for which fewer holders are not tried."""
ORIGINS = ("plan", "trained_order", "equal_split", "round_robin")
"""Names of candidates; of equally good ones the first wins."""


@dataclass(frozen=True)
class Candidate:
    """A placement, its origin, and its estimates."""

    name: str
    placement: Placement
    figures: Figures
    """Estimates by the formulas."""
    replicas: int
    simulated: Figures | None = None

    def value(self, objective: Objective) -> float:
        """Return the cost by simulation if there is one; survival by formula, which is exact."""
        return (self.figures if self.simulated is None or objective == "survival" else self.simulated).value(objective)


@dataclass(frozen=True)
class PlannedPlacement:
    """The best placement that was found, and those that it is compared with."""

    best: Candidate
    is_exact: bool
    """Whether no placement is better by the formulas."""
    single: Candidate | None
    """All blocks on the best device."""
    copies: Candidate | None
    """The whole model on each device that has room, as independent processes; it has no placement."""
    baselines: dict[str, Candidate | None]
    """Placements that need no planner; None if memory does not allow one."""


def plan_placement(problem: PlanningProblem, objective: Objective) -> PlannedPlacement:
    """Find the best placement; raise :class:`UsageError` if there is none or the profiles lack what it needs."""
    problem.check(objective)
    numbers = [problem.replicas]
    if objective in ("throughput", "survival"):
        numbers = list(range(problem.most_replicas, problem.replicas - 1, -1))
    candidates: list[Candidate] = []
    is_exact = True
    for replicas in numbers:
        found = best_placement(problem, objective, replicas)
        figures = figures_of(problem, found.placement, found.route)
        candidates.append(Candidate("plan", found.placement, figures, replicas))
        is_exact = is_exact and found.is_exact
        if objective == "survival" and figures.value(objective) < NEGLIGIBLE_LOSS - 1:
            break
    baselines: dict[str, Candidate | None] = {}
    for name, make in (("round_robin", round_robin), ("equal_split", equal_split), ("trained_order", trained_order)):
        placement = make(problem)
        baselines[name] = (
            None if placement is None else Candidate(name, placement, figures_of(problem, placement), problem.replicas)
        )
    candidates += [candidate for candidate in baselines.values() if candidate is not None]
    best = min(candidates, key=lambda one: rank(one, objective))
    alone, independent = best_single(problem, objective), copies_figures(problem)
    return PlannedPlacement(
        best=best,
        is_exact=is_exact,
        single=None if alone is None else Candidate("single", *alone, 1),
        copies=None if independent is None else Candidate("copies", {}, independent, len(problem.devices)),
        baselines=baselines,
    )


def rank(candidate: Candidate, objective: Objective) -> tuple[float, float, float, int]:
    """Return a key that is smaller for a better candidate: its objective, then latency, throughput and origin."""
    figures = candidate.figures
    value = float(f"{figures.value(objective):.6e}")  # more digits are rounding errors
    return value, round(figures.latency_ms, 6), -round(figures.throughput, 6), ORIGINS.index(candidate.name)


def best_single(problem: PlanningProblem, objective: Objective) -> tuple[Placement, Figures] | None:
    """Return all blocks on the device that is best alone, and its estimate; None if no device has room for them.

    The source runs stem and head and sends tokens, as with any other placement.
    """
    found = []
    for device in problem.devices:
        if problem.room(device) == problem.num_blocks:
            placement = {device.name: tuple(range(problem.num_blocks))}
            found.append((placement, figures_of(problem, placement)))
    return min(found, key=lambda one: (one[1].value(objective), one[1].latency_ms, one[1].route), default=None)


def copies_figures(problem: PlanningProblem) -> Figures | None:
    """Estimate independent copies: each device runs the whole model on images that it gets as JPEG.

    No device ever waits, and images of a lost device are sent to another one. None unless two devices have room.
    """
    devices = [device for device in problem.devices if device.whole]
    if len(devices) < 2:
        return None
    latency: dict[str, float] = {}
    engine: dict[str, float] = {}
    rate: dict[str, float] = {}
    for device in devices:
        sent = device.wire_ms * problem.image_share
        link = max(0.0, problem.source_visit_ms + device.visit_ms - device.runtime_ms - 2 * device.wire_ms) + sent
        chain = device.stem_ms + problem.num_blocks * device.block_ms + device.head_ms
        latency[device.name] = link + device.runtime_ms + chain
        ends = device.stem_ms + device.head_ms if device.ends_ms is None else device.ends_ms
        engine[device.name] = ends + problem.num_blocks * device.busy_ms
        busy = max(engine[device.name], (engine[device.name] + device.beyond_ms) / Limits.engine_calls, sent)
        rate[device.name] = 1e3 / busy if busy > 0 else float("inf")
    sent = problem.source_wire_ms * problem.image_share
    throughput = min(sum(rate.values()), 1e3 / sent if sent > 0 else float("inf"))
    energy = None
    if math.isfinite(throughput) and all(device.watts is not None for device in devices):
        joules = sum(rate[device.name] * engine[device.name] * (device.watts or 0.0) for device in devices)
        energy = joules / sum(rate.values())
    hours = [one.battery_wh / one.watts for one in devices if one.battery_wh is not None and one.watts]
    return Figures(
        latency_ms=min(latency.values()),
        throughput=throughput,
        energy_mj=energy,
        battery_h=min(hours, default=None),
        whole_share=whole_share(problem, {one.name: tuple(range(problem.num_blocks)) for one in devices}),
        route=(min(latency, key=lambda name: latency[name]),),
    )


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
