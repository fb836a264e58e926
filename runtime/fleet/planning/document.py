"""The document of ``ls-edge plan``: the placement, its estimates, those of simpler placements, and a recommendation.

Plan and baselines are simulated if the fleet is small enough, and the best by simulation is chosen: the simulation
knows queues and policies that the formulas do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ls_edge.runtime.fleet.planning import scoring
from ls_edge.runtime.fleet.planning.figures import figures_of
from ls_edge.runtime.fleet.planning.placements import best_placement
from ls_edge.runtime.fleet.planning.planner import Candidate, PlannedPlacement
from ls_edge.runtime.fleet.planning.problem import Objective, PlanningProblem
from ls_edge.runtime.fleet.planning.scoring import best_policy, policies_for, simulate_placement

SCHEMA = 1


class Expected(msgspec.Struct, frozen=True):
    """Estimates of a placement; null if unknown."""

    latency_ms: float | None
    """Latency of one request alone."""
    throughput: float | None
    """Images per second."""
    energy_mj: float | None
    """Energy per image of all devices while they compute."""
    battery_h: float | None
    """Hours until the first battery is empty, at that throughput."""
    whole_share: float | None
    """Share of answers that all blocks ran on, with the given loss probabilities."""
    policy: str | None = None
    """Policy of the simulation; null without one."""
    placement: dict[str, tuple[int, ...]] | None = None
    device: str | None = None
    """Name of the device, for a single device."""
    simulated_whole_share: float | None = None


class PlanDocument(msgspec.Struct, frozen=True):
    """Output of ``ls-edge plan --json``."""

    schema: int
    bundle_id: str
    objective: Objective
    recommendation: str
    """``single`` or ``distribute``."""
    reason: str
    placement: dict[str, tuple[int, ...]]
    """Best placement on several devices, also if a single device is recommended."""
    replicas: int
    route: tuple[str, ...]
    policy: str | None
    concurrency: int
    """Concurrent requests for the expected throughput."""
    max_batch: dict[str, int]
    """Maximum number of images per engine call, by device."""
    expected: Expected
    formula: Expected
    """The same estimates by formula alone."""
    baselines: dict[str, Expected | None]
    """``single``, ``round_robin``, ``equal_split``, ``trained_order``; null if memory does not allow one."""
    chosen: str
    """Origin of the placement: ``plan``, ``side_by_side`` or the name of a baseline that is better."""
    solver: str
    """``exact`` if no placement is better by the formulas, else ``heuristic``."""
    assumptions: list[str]
    warnings: list[str]


def plan_document(
    problem: PlanningProblem,
    objective: Objective,
    planned: PlannedPlacement,
    assumptions: list[str],
    *,
    bundle_id: str,
    simulate: bool = True,
    on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
) -> PlanDocument:
    """Simulate the candidates, choose the best, and recommend whether to distribute."""
    warnings: list[str] = []
    candidates = _candidates(problem, objective, planned)
    used = max(sum(bool(held) for held in one.placement.values()) for one in candidates)
    if simulate and used > scoring.MOST_DEVICES:
        warnings.append(f"{used} devices are too many to simulate, so all estimates are by formula")
        simulate = False
    if simulate:
        policies = policies_for(problem)
        for number, candidate in enumerate(candidates):
            on_step(number, len(candidates), candidate.name.replace("_", " "))
            found = [simulate_placement(problem, candidate.placement, policy) for policy in policies]
            candidates[number] = replace(candidate, simulated=best_policy(found, objective))
    on_step(len(candidates), len(candidates), "done")
    best = candidates[0]  # the plan
    for other in candidates[1:]:
        if other.value(objective) < best.value(objective) - scoring.NO_WORSE * abs(best.value(objective)):
            best = other
    by_name = {candidate.name: candidate for candidate in candidates}
    baselines: dict[str, Expected | None] = {"single": None if planned.single is None else _expected(planned.single)}
    for name in planned.baselines:
        baselines[name] = _expected(by_name[name]) if name in by_name else None
    recommendation, reason = _recommend(objective, best, planned.single)
    proven = planned.is_exact and best.placement is planned.best.placement
    return PlanDocument(
        schema=SCHEMA, bundle_id=bundle_id, objective=objective, recommendation=recommendation, reason=reason,
        placement=dict(best.placement), replicas=best.replicas, route=best.figures.route,
        policy=None if best.simulated is None else best.simulated.policy,
        concurrency=scoring.requests_at_once(problem, best.placement),
        max_batch={device.name: device.max_batch for device in problem.devices},
        expected=_expected(best), formula=_expected(replace(best, simulated=None)), baselines=baselines,
        chosen=best.name, solver="exact" if proven else "heuristic",
        assumptions=assumptions, warnings=warnings,
    )  # fmt: skip


def _candidates(problem: PlanningProblem, objective: Objective, planned: PlannedPlacement) -> list[Candidate]:
    """Return plan, baselines and, for latency, placements with more holders, which parallel blocks need."""
    found = [planned.best]
    found += [one for one in planned.baselines.values() if one is not None and one.name != planned.best.name]
    if objective == "latency" and problem.may_reorder:
        for replicas in sorted({problem.replicas, problem.replicas + 1, problem.most_replicas}):
            if replicas <= problem.most_replicas:
                placement = best_placement(problem, "throughput", replicas).placement
                found.append(Candidate("side_by_side", placement, figures_of(problem, placement), replicas))
    return found


def _expected(candidate: Candidate) -> Expected:
    formula, simulated = candidate.figures, candidate.simulated
    figures = simulated or formula
    is_single = candidate.name == "single"
    return Expected(
        latency_ms=_number(figures.latency_ms), throughput=_number(figures.throughput),
        energy_mj=_number(figures.energy_mj), battery_h=_number(formula.battery_h),
        whole_share=_number(formula.whole_share, 6), policy=figures.policy,
        placement=None if is_single else dict(candidate.placement), device=formula.route[0] if is_single else None,
        simulated_whole_share=None if simulated is None else simulated.whole_share,
    )  # fmt: skip


def _number(value: float | None, digits: int = 4) -> float | None:
    return None if value is None or math.isinf(value) else round(value, digits)


def _recommend(objective: Objective, best: Candidate, single: Candidate | None) -> tuple[str, str]:
    """Return whether to distribute, and the numbers behind it."""
    if single is None:
        return "distribute", "no device has memory for the whole model"
    name = single.figures.route[0]
    ours, theirs = figure_text(objective, best), figure_text(objective, single)
    value = best.value(objective)
    if single.value(objective) <= value + 1e-9 * abs(value):
        other: Objective = "throughput" if objective == "latency" else "latency"
        more = f"{figure_text(other, single)} against {figure_text(other, best)}"
        return "single", f"{name} alone is as good or better: {theirs} against {ours} ({more})"
    return "distribute", f"{ours} against {theirs} of {name} alone"


def figure_text(objective: Objective, candidate: Candidate) -> str:
    """Return the estimate of an objective with its unit."""
    value = abs(candidate.value(objective))
    if math.isinf(value):
        return f"unknown {objective}"
    if objective == "survival":
        return f"{100 * value:.3f} % whole answers"
    return f"{value:.1f} " + {"latency": "ms", "throughput": "images a second", "energy": "mJ an image"}[objective]
