"""Plan a placement: rules first, then the solver, and the better of both beside placements that need no planner.

For throughput and survival more holders a block can be better than the fewest that were asked for, so every number that
memory allows is tried; for latency and energy it cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ls_edge.runtime.fleet.planning import milp
from ls_edge.runtime.fleet.planning.baselines import best_single, equal_split, round_robin, trained_order
from ls_edge.runtime.fleet.planning.figures import Figures, figures_of, value_of
from ls_edge.runtime.fleet.planning.heuristic import heuristic_placement
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem
from ls_edge.runtime.fleet.planning.programs import PlacementProgram, placement_program

SECONDS = 6.0
"""Time limit of the solver: what it has not found by then, nobody waits for."""
MANY_REPLICAS = 12
"""Numbers of holders that are tried one by one; above, some between these and the most."""


Solver = Callable[[Sequence[milp.LinearProgram], float], tuple[list[milp.Solution], "str | None"]]


@dataclass(frozen=True)
class Candidate:
    """A placement, where it came from, and what it promises."""

    name: str
    placement: Placement
    figures: Figures
    replicas: int


@dataclass(frozen=True, eq=False)
class _Draft:
    """A placement that a rule or the solver found."""

    name: str
    placement: Placement
    replicas: int
    route: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedPlacement:
    """The best placement that was found, and what it is compared with."""

    best: Candidate
    is_exact: bool
    """Whether the solver proved that no placement is better, by the formulas."""
    single: tuple[str, Figures] | None
    """The best device alone."""
    baselines: dict[str, Candidate | None]
    """Placements that need no planner; None where memory does not allow one."""
    warnings: tuple[str, ...]
    seconds: float
    """What the solver took."""


def plan_placement(
    problem: PlanningProblem,
    objective: Objective,
    *,
    seconds: float = SECONDS,
    solver: Solver | None = milp.solve,
    on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
) -> PlannedPlacement:
    """Find a placement; raises :class:`UsageError` where there is none or figures are missing.

    ``solver`` is given programs and seconds, and gives solutions, or none and why not; None leaves it out. Without
    one, or where it fails, the best placement by rule is returned, with a warning.
    """
    problem.check(objective)
    on_step(0, 3, "rules")
    numbers = _replica_numbers(problem, objective)
    found: list[_Draft] = []
    for replicas in numbers:
        placement = heuristic_placement(problem, objective, replicas)
        if placement is not None:
            found.append(_Draft("heuristic", placement, replicas))
    on_step(1, 3, "solver")
    warnings: list[str] = []
    is_exact = False
    began = time.monotonic()
    if solver is None:
        warnings.append("the solver was left out; the plan is the best by rule")
    elif not milp.is_available():
        warnings.append("HiGHS is not installed, so the plan is the best by rule; to install: pip install highspy")
    else:
        solved, is_exact, warning = _solve(problem, objective, numbers, seconds, solver)
        found += solved
        warnings += [f"{warning}; the plan is the best by rule"] if warning else []
    took = time.monotonic() - began
    on_step(2, 3, "baselines")
    baselines: dict[str, Candidate | None] = {}
    for name, make in (("round_robin", round_robin), ("equal_split", equal_split), ("trained_order", trained_order)):
        placement = make(problem)
        baselines[name] = (
            None if placement is None
            else Candidate(name, placement, figures_of(problem, placement), problem.replicas)
        )  # fmt: skip
    values = {id(draft): _digits(value_of(problem, draft.placement, objective, draft.route)) for draft in found}
    nearly = [draft for draft in found if values[id(draft)] <= min(values.values())]
    candidates = [
        Candidate(draft.name, draft.placement, figures_of(problem, draft.placement, draft.route), draft.replicas)
        for draft in nearly
    ]
    candidates += [candidate for candidate in baselines.values() if candidate is not None]
    best = min(candidates, key=lambda one: rank(one.figures, objective, one.name))
    on_step(3, 3, "done")
    return PlannedPlacement(best, is_exact, best_single(problem, objective), baselines, tuple(warnings), round(took, 3))


def rank(figures: Figures, objective: Objective, name: str) -> tuple[float, float, float, int]:
    """The better the smaller; equally good ones by latency, then throughput, then by where they came from."""
    value = figures.value(objective)
    places = _digits(value)
    order = ("solver", "heuristic", "trained_order", "equal_split", "round_robin")
    return places, round(figures.latency_ms, 6), -round(figures.throughput, 6), order.index(name)


def _digits(value: float) -> float:
    """A value with as many digits as mean something, so that equal ones are equal."""
    return float(f"{value:.6e}")


def _replica_numbers(problem: PlanningProblem, objective: Objective) -> list[int]:
    most = problem.most_replicas
    if objective in ("latency", "energy") or most <= problem.replicas:
        return [problem.replicas]
    numbers = list(range(problem.replicas, most + 1))
    if len(numbers) > MANY_REPLICAS:
        step = len(numbers) / MANY_REPLICAS
        numbers = sorted({numbers[min(len(numbers) - 1, int(k * step))] for k in range(MANY_REPLICAS)} | {most})
        numbers = sorted({*numbers, *range(problem.replicas, min(most, problem.replicas + 3) + 1)})
    return numbers


def _solve(
    problem: PlanningProblem,
    objective: Objective,
    numbers: Sequence[int],
    seconds: float,
    solver: Solver,
) -> tuple[list[_Draft], bool, str | None]:
    """What the solver finds for each number of holders, whether that is the best there is, and what went wrong."""
    made = [(number, program) for number in numbers if (program := placement_program(problem, objective, number))]
    programs: list[tuple[int, PlacementProgram]] = list(made)
    if not programs:
        return [], False, None
    solutions, warning = solver([program.program for _, program in programs], seconds)
    found: list[_Draft] = []
    exact = warning is None and len(programs) == problem.most_replicas - problem.replicas + 1
    if objective in ("latency", "energy"):
        exact = warning is None
    for (replicas, program), solution in zip(programs, solutions, strict=False):
        exact = exact and program.is_exact and solution.status in ("optimal", "infeasible")
        if not solution.values:
            if solution.status != "infeasible":
                warning = f"the solver found nothing in its time ({solution.status})"
            continue
        placement = program.read(solution.values)
        if placement is None:
            exact = False
            continue
        found.append(_Draft("solver", placement, replicas, program.route(solution.values)))
    return found, exact and bool(found), warning
