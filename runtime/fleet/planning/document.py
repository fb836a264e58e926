"""Document of ``ls-edge plan``: the placement, its estimates, simpler placements to compare, and a recommendation.

If the fleet is small enough, the plan and the baselines are simulated, and the best by simulation is chosen, because
the simulation includes queues and policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from ls_edge.core.parts import ENDS, ShownPart, shown_parts
from ls_edge.core.text import counted, show
from ls_edge.runtime.fleet.planning import scoring
from ls_edge.runtime.fleet.planning.estimates import Estimates
from ls_edge.runtime.fleet.planning.planner import Candidate, PlannedPlacement, side_by_side
from ls_edge.runtime.fleet.planning.problem import OBJECTIVES, Objective, Placement, PlanningProblem
from ls_edge.runtime.fleet.planning.scoring import best_policy, simulate_placement

SCHEMA = 1
LEAST_GAIN = 1e-6
"""Relative difference up to which probabilities count as equal."""


class Expected(Estimates, frozen=True):
    """Estimates of a placement by simulation, or by formula without one."""

    placement: dict[str, tuple[ShownPart, ...]] | None = None
    device: str | None = None


class PlanDocument(msgspec.Struct, frozen=True):
    """Output of ``ls-edge plan --json``."""

    schema: int
    bundle_id: str
    objective: Objective
    recommendation: str
    """``distribute`` if that is best, else ``single``: each image should be answered by one device alone."""
    reason: str
    placement: dict[str, tuple[ShownPart, ...]]
    """Best placement for ``ls-edge``, even if distribution is not recommended."""
    replicas: int
    route: tuple[str, ...]
    policy: str | None
    concurrency: int
    """Concurrent requests for the expected throughput."""
    max_batch: dict[str, int]
    """Maximum number of images per engine call, by device."""
    expected: Expected
    formula: Expected
    baselines: dict[str, Expected | None]
    """``single``, ``copies``, ``round_robin``, ``equal_split``, ``trained_order``; null if memory is too short for one.

    ``copies`` is also null with one device.
    """
    chosen: str
    """Origin of the placement: ``plan``, ``side_by_side`` or the name of a baseline that is better."""
    winner: str
    """``single``, ``copies`` (independent copies of the whole model) or ``distribute``."""
    advantages: list[str]
    """Benefits of distribution, if it is not the winner."""
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
    """Simulate the candidates, choose the best one, and recommend whether to distribute."""
    warnings: list[str] = []
    candidates = _candidates(problem, objective, planned)
    candidates += [one for one in (planned.copies, planned.single) if one is not None]
    used = max(sum(bool(held) for held in one.placement.values()) for one in candidates)
    if simulate and used > scoring.MOST_DEVICES:
        warnings.append(f"{used} devices are too many to simulate, so all estimates are by formula")
        simulate = False
    if simulate:
        policies = ("nearest", "fastest", "parallel") if problem.may_reorder else ("sequential",)
        for number, candidate in enumerate(candidates):
            on_step(number, len(candidates), candidate.name.replace("_", " "))
            found = [simulate_placement(problem, candidate.placement, policy) for policy in policies]
            candidates[number] = replace(candidate, simulated=best_policy(found, objective))
    on_step(len(candidates), len(candidates), "done")
    by_name = {candidate.name: candidate for candidate in candidates}
    single = by_name.pop("single", None)
    copies = by_name.get("copies")
    placed = [one for one in candidates if one is not single and (one is not copies or problem.allows(one.placement))]
    best = _best(placed, objective)  # the plan, unless another one is clearly better
    baselines: dict[str, Expected | None] = {
        "single": None if single is None else _expected(single),
    }
    for name in ("copies", *planned.baselines):
        baselines[name] = _expected(by_name[name]) if name in by_name else None
    spread = [one for one in placed if one is not copies and sum(map(bool, one.placement.values())) > 1]
    winner, reason, advantages = _judge(
        problem, objective, spread, [one for one in (single, copies) if one is not None]
    )
    proven = planned.is_exact and best.placement is planned.best.placement
    return PlanDocument(
        schema=SCHEMA,
        bundle_id=bundle_id,
        objective=objective,
        recommendation="distribute" if winner == "distribute" else "single",
        reason=reason,
        placement=_shown(best.placement),
        replicas=best.replicas,
        route=best.formula.route,
        policy=None if best.simulated is None else best.simulated.policy,
        concurrency=scoring.requests_at_once(problem, best.placement),
        max_batch={device.name: device.max_batch for device in problem.devices},
        expected=_expected(best),
        formula=_expected(replace(best, simulated=None)),
        baselines=baselines,
        chosen=best.name,
        winner=winner,
        advantages=advantages,
        solver="exact" if proven else "heuristic",
        assumptions=assumptions,
        warnings=warnings,
    )


def _candidates(problem: PlanningProblem, objective: Objective, planned: PlannedPlacement) -> list[Candidate]:
    """Return the plan, the baselines and, for latency, placements with more holders, which parallel blocks need."""
    found = [planned.best]
    found += [one for one in planned.baselines.values() if one is not None and one.name != planned.best.name]
    if objective == "latency" and problem.may_reorder:
        for replicas in sorted({problem.replicas, problem.replicas + 1, problem.most_replicas}):
            if replicas <= problem.most_replicas:
                found.append(side_by_side(problem, objective, replicas))
    return found


def _best(candidates: Sequence[Candidate], objective: Objective) -> Candidate:
    """Return the first candidate, unless a later one is better by more than the error of the estimates."""
    best = candidates[0]
    for other in candidates[1:]:
        if _is_better(objective, other, best):
            best = other
    return best


def _is_better(objective: Objective, one: Candidate, other: Candidate) -> bool:
    least = LEAST_GAIN if objective == "survival" else scoring.NO_WORSE  # survival is by formula, which is exact
    ours, theirs = one.value(objective), other.value(objective)  # theirs may be unknown, which is infinite
    return ours < theirs and not math.isclose(ours, theirs, rel_tol=least)


def _expected(candidate: Candidate) -> Expected:
    formula, simulated = candidate.formula, candidate.simulated
    estimates = simulated or formula
    is_single = candidate.name == "single"
    return Expected(
        latency_ms=_number(estimates.latency_ms),
        throughput=_number(estimates.throughput),
        energy_mj=_number(estimates.energy_mj),
        battery_h=_number(estimates.battery_h),
        whole_share=_number(formula.whole_share, 6),
        policy=estimates.policy,
        placement=_shown(candidate.placement) or None,
        device=formula.route[0] if is_single else None,
    )


def _shown(placement: Placement) -> dict[str, tuple[ShownPart, ...]]:
    return {name: shown_parts(parts) for name, parts in placement.items()}


def _number(value: float | None, digits: int = 4) -> float | None:
    return None if value is None or math.isinf(value) else round(value, digits)


def _judge(
    problem: PlanningProblem, objective: Objective, spread: Sequence[Candidate], known: Sequence[Candidate]
) -> tuple[str, str, list[str]]:
    """Compare the best placement that spreads the model with a single device and with independent copies.

    Return the winner, the reason, and the benefits of distribution if it is not the winner.
    """
    if not known:
        return "distribute", "no device has memory for the whole model", []
    distributed = [_best(spread, objective)] if spread else []
    best = _best([*known, *distributed], objective)
    texts = [
        f"{estimate_text(objective, other)} for {_called(other)}{_gain(objective, best, other)}"
        for other in (*known, *distributed)
        if other is not best
    ]
    reason = estimate_text(objective, best)
    reason += f", against {' and '.join(texts)}" if texts else "; there is no other device"
    if best.name == "single":
        reason = f"{_called(best)}, {reason}"
    if best in distributed:
        return "distribute", reason, []
    return best.name, reason, _advantages(problem, distributed[0], best) if distributed else []


def _advantages(problem: PlanningProblem, distributed: Candidate, best: Candidate) -> list[str]:
    """Return the benefits of distribution over the best alternative."""
    most = max(len(set(parts) - ENDS.keys()) for parts in distributed.placement.values())
    found = []
    for objective in OBJECTIVES:
        if _is_better(objective, distributed, best):
            found.append(f"{estimate_text(objective, distributed)} against {estimate_text(objective, best)}")
    if most < problem.num_blocks:
        found.append(f"at most {most} of {counted(problem.num_blocks, 'block')} in the memory of a device")
    return found


def _called(candidate: Candidate) -> str:
    if candidate.name == "single":
        return f"{candidate.formula.route[0]} alone"
    return "independent copies" if candidate.name == "copies" else "distribution"


def _gain(objective: Objective, best: Candidate, other: Candidate) -> str:
    """Return the advantage of the best candidate in percent; empty if it is unknown."""
    ours, theirs = abs(best.value(objective)), abs(other.value(objective))
    if objective == "survival" or not ours or not math.isfinite(theirs) or not theirs:
        return ""
    more = ours / theirs - 1 if objective == "throughput" else 1 - ours / theirs
    word = "more" if objective == "throughput" else "less"
    return f" ({100 * more:.0f} % {word})" if more >= scoring.NO_WORSE else " (the same)"


def estimate_text(objective: Objective, candidate: Candidate) -> str:
    """Return the estimate of an objective with its unit."""
    value = abs(candidate.value(objective))
    if math.isinf(value):
        return f"unknown {objective}"
    if objective == "survival":
        return f"{100 * value:.3f} % whole answers"
    return show(value) + {"latency": " ms", "throughput": " images a second", "energy": " mJ an image"}[objective]
