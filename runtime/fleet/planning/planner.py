"""Plan a placement: the best by the formulas, next to placements that need no planner.

For throughput and survival more holders per block can be better than the fewest that were asked for, so every number
that memory allows is tried; for latency and energy they cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

from ls_edge.runtime.fleet.planning.baselines import best_single, equal_split, round_robin, trained_order
from ls_edge.runtime.fleet.planning.figures import Figures, figures_of, value_of
from ls_edge.runtime.fleet.planning.placements import Found, best_placement
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem

NEGLIGIBLE_LOSS = 1e-9
"""Probability of a loss for which fewer holders are not tried."""
ORIGINS = ("plan", "trained_order", "equal_split", "round_robin")
"""Names of candidates; of equally good ones the first wins."""


@dataclass(frozen=True)
class Candidate:
    """A placement, its origin, and its estimate by the formulas."""

    name: str
    placement: Placement
    figures: Figures
    replicas: int


@dataclass(frozen=True)
class PlannedPlacement:
    """The best placement that was found, and those that it is compared with."""

    best: Candidate
    is_exact: bool
    """Whether no placement is better by the formulas."""
    single: tuple[str, Figures] | None
    """The best device alone."""
    baselines: dict[str, Candidate | None]
    """Placements that need no planner; None if memory does not allow one."""


def plan_placement(problem: PlanningProblem, objective: Objective) -> PlannedPlacement:
    """Find the best placement; raise :class:`UsageError` if there is none or the profiles lack what it needs."""
    problem.check(objective)
    numbers = [problem.replicas]
    if objective in ("throughput", "survival"):
        numbers = list(range(problem.most_replicas, problem.replicas - 1, -1))
    found: list[tuple[float, int, Found]] = []
    for replicas in numbers:
        one = best_placement(problem, objective, replicas)
        value = value_of(problem, one.placement, objective, one.route)
        found.append((_rounded(value), replicas, one))
        if objective == "survival" and value < -1 + NEGLIGIBLE_LOSS:
            break
    least = min(value for value, _, _ in found)
    candidates = [
        Candidate("plan", one.placement, figures_of(problem, one.placement, one.route), replicas)
        for value, replicas, one in found
        if value == least
    ]
    baselines: dict[str, Candidate | None] = {}
    for name, make in (("round_robin", round_robin), ("equal_split", equal_split), ("trained_order", trained_order)):
        placement = make(problem)
        baselines[name] = (
            None if placement is None else Candidate(name, placement, figures_of(problem, placement), problem.replicas)
        )
    candidates += [candidate for candidate in baselines.values() if candidate is not None]
    best = min(candidates, key=lambda one: rank(one, objective))
    is_exact = all(one.is_exact for _, _, one in found)
    return PlannedPlacement(best, is_exact, best_single(problem, objective), baselines)


def rank(candidate: Candidate, objective: Objective) -> tuple[float, float, float, int]:
    """Return a key that is smaller for a better candidate: its objective, then latency, throughput and origin."""
    figures = candidate.figures
    value = _rounded(figures.value(objective))
    return value, round(figures.latency_ms, 6), -round(figures.throughput, 6), ORIGINS.index(candidate.name)


def _rounded(value: float) -> float:
    """Return a value with as many digits as mean something, so that equally good placements compare as equal."""
    return float(f"{value:.6e}")
