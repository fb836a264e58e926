"""Plan a placement: the best by the formulas, next to placements that need no planner.

For throughput and survival more holders per block can be better than the fewest that were asked for, so every number
that memory allows is tried; for latency and energy they cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

from ls_edge.runtime.fleet.planning.baselines import (
    best_single,
    copies_figures,
    equal_split,
    round_robin,
    trained_order,
)
from ls_edge.runtime.fleet.planning.figures import Figures, figures_of
from ls_edge.runtime.fleet.planning.placements import best_placement
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem

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
