"""The best placement by the formulas, and simple placements to compare it with.

For throughput, more holders per block than required can help, so every number that memory allows is tried; for latency
and energy, they cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import STEM
from ls_edge.runtime.fleet.planning.estimates import Estimates, estimate
from ls_edge.runtime.fleet.planning.placements import best_placement
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem, assign_in_circle, with_ends
from ls_edge.runtime.simulator.simulation import SOURCE

ORIGINS = ("plan", "equal_split", "round_robin", "copies", "single")
"""Names of candidates; among equals, the first wins."""


@dataclass(frozen=True)
class Candidate:
    """A placement, its origin, and its estimates."""

    name: str
    placement: Placement
    estimates: Estimates
    replicas: int

    def value(self, objective: Objective) -> float:
        """Return the cost of the placement: smaller is better."""
        return self.estimates.value(objective)


@dataclass(frozen=True)
class PlannedPlacement:
    """The best placement found, and the placements that it is compared with."""

    best: Candidate
    is_exact: bool
    """Whether no placement with as many holders is better by the formulas.

    False if devices hold stem and head, which is not searched.
    """
    single: Candidate | None
    """All blocks on the best device."""
    copies: Candidate | None
    """The whole model on each device that has room."""
    baselines: dict[str, Candidate | None]
    """Placements that need no planner; None if memory does not allow one."""


def plan_placement(problem: PlanningProblem, objective: Objective, *, exactly: bool = False) -> PlannedPlacement:
    """Find the best placement; raise :class:`UsageError` if there is none or the profiles lack what it needs.

    With ``exactly``, no block has more holders than required.
    """
    problem.check(objective)
    most = problem.most_replicas if objective == "throughput" and not exactly else problem.replicas
    candidates: list[Candidate] = []
    is_exact = True
    for replicas in range(most, problem.replicas - 1, -1):
        found = best_placement(problem, objective, replicas)
        candidates.append(_candidate(problem, objective, "plan", found.placement, replicas, found.route))
        is_exact = is_exact and found.is_exact
    baselines: dict[str, Candidate | None] = {}
    for name, make in (("round_robin", round_robin), ("equal_split", equal_split)):
        placement = make(problem)
        baselines[name] = (
            None if placement is None else _candidate(problem, objective, name, placement, problem.replicas)
        )
    copies = independent_copies(problem)
    candidates += [candidate for candidate in baselines.values() if candidate is not None]
    best = min(candidates, key=lambda one: rank(one, objective))
    if (
        copies is not None
        and (copies.replicas == problem.replicas if exactly else copies.replicas >= problem.replicas)
        and rank(copies, objective)[0] < rank(best, objective)[0]
    ):
        best = copies
    if objective == "energy" and best.estimates.energy_mj is None:
        raise UsageError(
            "the objective energy needs the power of the source, which its profile does not have; add devices with "
            "memory for stem and head"
        )
    return PlannedPlacement(
        best=best,
        is_exact=is_exact and bool(problem.held(best.placement)[SOURCE]),
        single=best_single(problem, objective),
        copies=copies,
        baselines=baselines,
    )


def rank(candidate: Candidate, objective: Objective) -> tuple[float, float, float, int]:
    """Return a sort key, smaller for a better candidate: its objective, then latency, throughput and origin."""
    value = float(f"{candidate.value(objective):.6e}")  # more digits are rounding errors
    latency, cost = (round(candidate.value(other), 6) for other in ("latency", "throughput"))
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


def best_single(problem: PlanningProblem, objective: Objective) -> Candidate | None:
    """Return all blocks on the best single device; None if no device has room for them."""
    found = [
        _candidate(problem, objective, "single", {device.name: tuple(range(problem.num_blocks))}, 1)
        for device in problem.devices
        if problem.room(device) == problem.num_blocks
    ]
    return min(found, key=lambda one: (*rank(one, objective), one.estimates.route), default=None)


def independent_copies(problem: PlanningProblem) -> Candidate | None:
    """Return the whole model on each device that has room for it; None unless two have."""
    blocks = tuple(range(problem.num_blocks))
    placement = with_ends(problem, {device.name: blocks for device in problem.devices}) or {}
    whole = {name: parts for name, parts in placement.items() if STEM in parts}  # others lack memory for the stem
    return Candidate("copies", whole, estimate(problem, whole), len(whole)) if len(whole) > 1 else None


def round_robin(problem: PlanningProblem) -> Placement | None:
    """Give each block to the next device with room; None if a block finds no device."""
    held: list[list[int]] = [[] for _ in problem.devices]
    turn = 0
    for block in problem.band_order:
        for _ in range(problem.replicas):
            for step in range(len(held)):
                index = (turn + step) % len(held)
                if block not in held[index] and len(held[index]) < problem.room(problem.devices[index]):
                    break
            else:
                return None
            held[index].append(block)
            turn = index + 1
    return {device.name: tuple(sorted(given)) for device, given in zip(problem.devices, held, strict=True)}


def equal_split(problem: PlanningProblem) -> Placement | None:
    """Give each device a stretch of equal length; None if a device has no room for its stretch."""
    each, more = divmod(problem.num_blocks * problem.replicas, len(problem.devices))
    counts = tuple(each + (index < more) for index in range(len(problem.devices)))
    if any(count > problem.room(device) for count, device in zip(counts, problem.devices, strict=True)):
        return None
    return assign_in_circle(problem, counts)
