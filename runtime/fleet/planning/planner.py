"""The best placement by the formulas, and simple placements to compare it with.

For throughput and survival, more holders per block than required can help, so every number that memory allows is
tried; for latency and energy, they cannot.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import STEM
from ls_edge.runtime.fleet.planning.estimates import Estimates, FormulaEstimates, estimate
from ls_edge.runtime.fleet.planning.placements import best_placement
from ls_edge.runtime.fleet.planning.problem import (
    Objective,
    Placement,
    PlanningProblem,
    assign_in_circle,
    with_ends,
    zones_of,
)
from ls_edge.runtime.simulator.simulation import SOURCE

NEGLIGIBLE_LOSS = 1e-9
"""Probability of losing a block below which fewer holders are not tried."""
ORIGINS = ("plan", "trained_order", "equal_split", "round_robin", "side_by_side", "copies", "single")
"""Names of candidates; among equals, the first wins."""


@dataclass(frozen=True)
class Candidate:
    """A placement, its origin, and its estimates."""

    name: str
    placement: Placement
    formula: FormulaEstimates
    replicas: int
    simulated: Estimates | None = None

    def value(self, objective: Objective) -> float:
        """Return the cost by simulation if available; survival always by formula, which is exact."""
        return (self.formula if self.simulated is None or objective == "survival" else self.simulated).value(objective)


@dataclass(frozen=True)
class PlannedPlacement:
    """The best placement found, and the placements that it is compared with."""

    best: Candidate
    is_exact: bool
    """Whether no placement is better by the formulas; False if devices hold stem and head, which is not searched."""
    single: Candidate | None
    """All blocks on the best device."""
    copies: Candidate | None
    """The whole model on each device that has room."""
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
        candidates.append(_candidate(problem, objective, "plan", found.placement, replicas, found.route))
        is_exact = is_exact and found.is_exact
        if objective == "survival" and candidates[-1].formula.value(objective) < NEGLIGIBLE_LOSS - 1:
            break
    baselines: dict[str, Candidate | None] = {}
    for name, make in (("round_robin", round_robin), ("equal_split", equal_split), ("trained_order", trained_order)):
        placement = make(problem)
        baselines[name] = (
            None if placement is None else _candidate(problem, objective, name, placement, problem.replicas)
        )
    candidates += [candidate for candidate in baselines.values() if candidate is not None]
    best = min(candidates, key=lambda one: rank(one, objective))
    if objective == "energy" and best.formula.energy_mj is None:
        raise UsageError(
            "the objective energy needs the power of the source, which its profile does not have; give another "
            "--source, or add devices with memory for stem and head"
        )
    return PlannedPlacement(
        best=best,
        is_exact=is_exact and bool(problem.held(best.placement)[SOURCE]),
        single=best_single(problem, objective),
        copies=independent_copies(problem),
        baselines=baselines,
    )


def rank(candidate: Candidate, objective: Objective) -> tuple[float, float, float, int]:
    """Return a sort key, smaller for a better candidate: its objective, then latency, throughput and origin."""
    estimates = candidate.formula
    value = float(f"{estimates.value(objective):.6e}")  # more digits are rounding errors
    latency, cost = (round(estimates.value(other), 6) for other in ("latency", "throughput"))
    return value, latency, cost, ORIGINS.index(candidate.name)


def _candidate(
    problem: PlanningProblem,
    objective: Objective,
    name: str,
    placement: Placement,
    replicas: int,
    route: Sequence[str] = (),
) -> Candidate:
    """Return a candidate with stem and head at the source or on devices that have room, whichever is better."""
    placements = (one for one in (placement, with_ends(problem, placement)) if one is not None)
    found = [Candidate(name, one, estimate(problem, one, route), replicas) for one in placements]
    return min(found, key=lambda one: rank(one, objective))


def side_by_side(problem: PlanningProblem, objective: Objective, replicas: int) -> Candidate:
    """Return a placement with ``replicas`` holders of each block, for parallel blocks."""
    return _candidate(
        problem, objective, "side_by_side", best_placement(problem, "throughput", replicas).placement, replicas
    )


def best_single(problem: PlanningProblem, objective: Objective) -> Candidate | None:
    """Return all blocks on the best single device; None if no device has room for them."""
    whole = tuple(range(problem.num_blocks))
    found = [
        _candidate(problem, objective, "single", {device.name: whole}, 1)
        for device in problem.devices
        if problem.room(device) == problem.num_blocks
    ]
    return min(found, key=lambda one: (*rank(one, objective), one.formula.route), default=None)


def independent_copies(problem: PlanningProblem) -> Candidate | None:
    """Return the whole model on each device that has room for it; None unless two have."""
    blocks = tuple(range(problem.num_blocks))
    placement = with_ends(problem, {device.name: blocks for device in problem.devices}) or {}
    whole = {name: parts for name, parts in placement.items() if STEM in parts}  # others lack memory for the stem
    if len(whole) < 2:
        return None
    return Candidate("copies", whole, estimate(problem, whole), len(whole))


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
    """Give each device a stretch of equal length; None if a device has no room for its stretch."""
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
    """Assign consecutive blocks to devices in order; None if one has no room or a zone would hold a block twice."""
    if any(count > problem.room(device) for count, device in zip(counts, problem.devices, strict=True)):
        return None
    for devices in zones_of(problem.devices).values():
        if sum(counts[index] for index in devices) > problem.num_blocks:
            return None
    return assign_in_circle(problem, tuple(counts))
