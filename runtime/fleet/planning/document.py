"""The document of ``ls-edge plan``: the placement, its estimates, those of simpler placements, and a recommendation.

Plan and baselines are simulated if the fleet is small enough, and the best by simulation is chosen: the simulation
knows queues and policies that the formulas do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ls_edge.runtime.fleet.planning import scoring
from ls_edge.runtime.fleet.planning.figures import Figures, figures_of
from ls_edge.runtime.fleet.planning.placements import best_placement
from ls_edge.runtime.fleet.planning.planner import Candidate, PlannedPlacement
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem, cost_of
from ls_edge.runtime.fleet.planning.scoring import SimulatedFigures, best_policy, policies_for, simulate_placement

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


@dataclass(frozen=True)
class _Scored:
    candidate: Candidate
    simulated: SimulatedFigures | None

    def value(self, objective: Objective) -> float:
        """Return the cost by simulation if there is one; survival by formula, which is exact."""
        if self.simulated is None or objective == "survival":
            return self.candidate.figures.value(objective)
        return self.simulated.value(objective)


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
    policies = policies_for(problem)
    scored: list[_Scored] = []
    for number, candidate in enumerate(candidates):
        simulated = None
        if simulate:
            on_step(number, len(candidates), candidate.name.replace("_", " "))
            simulated = best_policy(
                [simulate_placement(problem, candidate.placement, policy) for policy in policies], objective
            )
        scored.append(_Scored(candidate, simulated))
    on_step(len(candidates), len(candidates), "done")
    best = scored[0]  # the plan
    for other in scored[1:]:
        if other.value(objective) < best.value(objective) - scoring.NO_WORSE * abs(best.value(objective)):
            best = other
    baselines: dict[str, Expected | None] = {"single": _single(planned)}
    for name in planned.baselines:
        baselines[name] = next((_expected(one) for one in scored if one.candidate.name == name), None)
    recommendation, reason = _recommend(objective, _expected(best), planned)
    proven = planned.is_exact and best.candidate is planned.best
    return PlanDocument(
        schema=SCHEMA, bundle_id=bundle_id, objective=objective, recommendation=recommendation, reason=reason,
        placement=dict(best.candidate.placement), replicas=best.candidate.replicas,
        route=best.candidate.figures.route, policy=None if best.simulated is None else best.simulated.policy,
        concurrency=scoring.requests_at_once(problem, best.candidate.placement),
        max_batch={device.name: device.max_batch for device in problem.devices},
        expected=_expected(best), formula=_expected(_Scored(best.candidate, None)), baselines=baselines,
        chosen=best.candidate.name, solver="exact" if proven else "heuristic",
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


def _expected(scored: _Scored) -> Expected:
    figures, simulated, placement = scored.candidate.figures, scored.simulated, dict(scored.candidate.placement)
    if simulated is None:
        return _of(figures, placement)
    return Expected(
        latency_ms=simulated.latency_ms, throughput=simulated.throughput, energy_mj=simulated.energy_mj,
        battery_h=_number(figures.battery_h), whole_share=round(figures.whole_share, 6), policy=simulated.policy,
        placement=placement, simulated_whole_share=simulated.whole_share,
    )  # fmt: skip


def _of(figures: Figures, placement: Placement | None, device: str | None = None) -> Expected:
    return Expected(
        latency_ms=_number(figures.latency_ms), throughput=_number(figures.throughput),
        energy_mj=_number(figures.energy_mj), battery_h=_number(figures.battery_h),
        whole_share=round(figures.whole_share, 6), placement=None if placement is None else dict(placement),
        device=device,
    )  # fmt: skip


def _number(value: float | None) -> float | None:
    return None if value is None or value in (float("inf"), float("-inf")) else round(value, 4)


def _single(planned: PlannedPlacement) -> Expected | None:
    return None if planned.single is None else _of(planned.single[1], None, planned.single[0])


def _recommend(objective: Objective, expected: Expected, planned: PlannedPlacement) -> tuple[str, str]:
    """Return whether to distribute, and the numbers behind it."""
    if planned.single is None:
        return "distribute", "no device has memory for the whole model"
    name, alone = planned.single
    single = _of(alone, None, name)
    ours, theirs = figure_text(objective, expected), figure_text(objective, single)
    value = cost_of(objective, expected)
    if cost_of(objective, single) <= value + 1e-9 * abs(value):
        others = {
            "latency": f"{figure_text('throughput', single)} against {figure_text('throughput', expected)}",
            "throughput": f"{figure_text('latency', single)} against {figure_text('latency', expected)}",
        }
        more = others.get("throughput" if objective != "latency" else "latency", "")
        return "single", f"{name} alone is as good or better: {theirs} against {ours} ({more})"
    return "distribute", f"{ours} against {theirs} of {name} alone"


def figure_text(objective: Objective, expected: Expected) -> str:
    """Return the estimate of an objective with its unit."""
    if objective == "latency":
        return "unknown latency" if expected.latency_ms is None else f"{expected.latency_ms:.1f} ms"
    if objective == "throughput":
        return "unknown throughput" if expected.throughput is None else f"{expected.throughput:.1f} images a second"
    if objective == "energy":
        return "unknown energy" if expected.energy_mj is None else f"{expected.energy_mj:.1f} mJ an image"
    return "unknown survival" if expected.whole_share is None else f"{100 * expected.whole_share:.3f} % whole answers"
