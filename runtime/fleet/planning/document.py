"""Document of ``ls-edge plan``: the placement, its estimates, simpler placements to compare, and a recommendation."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ls_edge.core.parts import ENDS, ShownPart, shown_parts
from ls_edge.core.text import counted, show
from ls_edge.runtime.fleet.planning.planner import Candidate, PlannedPlacement
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem

NO_WORSE = 0.01
"""Relative difference up to which estimates count as equal."""
_AT_ONCE, _MOST_AT_ONCE = 4, 64
"""Concurrent requests for the source and for each image of each device's batches, and their maximum, which is the
default of a source."""

Recommendation = Literal["one", "replicate", "split"]


class Expected(msgspec.Struct, frozen=True):
    """Estimates of a placement."""

    latency_ms: float | None
    """Latency of a single request."""
    throughput: float | None
    energy_mj: float | None
    placement: dict[str, tuple[ShownPart, ...]]


class PlanDocument(msgspec.Struct, frozen=True):
    """Output of ``ls-edge plan --json``."""

    bundle_id: str
    objective: Objective
    recommendation: Recommendation
    """Best use of the devices: ``one`` device, ``replicate`` (every device holds all blocks), or ``split``."""
    reason: str
    placement: dict[str, tuple[ShownPart, ...]]
    """Best placement for ``ls-edge``, even if one device is recommended."""
    replicas: int
    route: tuple[str, ...]
    """Devices that a single request visits."""
    policy: str
    concurrency: int
    """Concurrent requests for the expected throughput."""
    max_batch: dict[str, int]
    """Maximum number of images per engine call, by device."""
    expected: Expected
    baselines: dict[str, Expected | None]
    """``single``, ``replicate``, ``round_robin``, ``equal_split``; null without memory for one or with one device."""
    solver: str
    """``exact`` if no placement with as many holders of each block is better by the formulas, else ``heuristic``."""
    assumptions: list[str]


def plan_document(
    problem: PlanningProblem,
    objective: Objective,
    planned: PlannedPlacement,
    assumptions: list[str],
    *,
    bundle_id: str,
) -> PlanDocument:
    """Compare the plan with one device and with replicas, and recommend one of the three."""
    best = planned.best
    recommendation, reason = _judge(problem, objective, planned)
    others = {"single": planned.single, "replicate": planned.copies, **planned.baselines}
    return PlanDocument(
        bundle_id=bundle_id,
        objective=objective,
        recommendation=recommendation,
        reason=reason,
        placement=_shown(best.placement),
        replicas=best.replicas,
        route=best.estimates.route,
        policy="fastest" if problem.may_reorder else "sequential",
        concurrency=requests_at_once(problem, best.placement),
        max_batch={device.name: device.max_batch for device in problem.devices},
        expected=_expected(best),
        baselines={name: None if other is None else _expected(other) for name, other in others.items()},
        solver="exact" if planned.is_exact else "heuristic",
        assumptions=assumptions,
    )


def requests_at_once(problem: PlanningProblem, placement: Placement) -> int:
    """Return the number of concurrent requests that keep all devices of a placement busy."""
    batches = sum(device.max_batch for device in problem.devices if placement.get(device.name))
    return min(_MOST_AT_ONCE, _AT_ONCE * (1 + batches))


def _judge(problem: PlanningProblem, objective: Objective, planned: PlannedPlacement) -> tuple[Recommendation, str]:
    """Return the recommendation and its reason."""
    known = [one for one in (planned.single, planned.copies) if one is not None]
    placement = planned.best.placement
    if not known:
        held = [(one.name, one.memory_of(parts)) for one in problem.devices if (parts := placement.get(one.name))]
        alike = len({memory for _, memory in held}) == 1
        each = f"{held[0][1]} each" if alike else ", ".join(f"{memory} on {name}" for name, memory in held)
        reason = f"no device has memory for the whole model; split over {counted(len(held), 'device')}: {each}"
        return "split", reason
    is_split = planned.best is not planned.copies and sum(map(bool, planned.best.placement.values())) > 1
    best = known[0]
    for other in (*known[1:], *([planned.best] if is_split else ())):
        ours, theirs = other.value(objective), best.value(objective)  # theirs may be unknown, which is infinite
        if ours < theirs and not math.isclose(ours, theirs, rel_tol=NO_WORSE):
            best = other
    texts = [
        f"{_estimate(objective, other)} for {_called(problem, other)}{_gain(objective, best, other)}"
        for other in (*known, *([planned.best] if is_split else ()))
        if other is not best
    ]
    reason = _estimate(objective, best)
    alone = "there is no other device" if len(problem.devices) == 1 else "more devices are no better"
    reason += f", against {' and '.join(texts)}" if texts else f"; {alone}"
    if best is planned.single:
        reason = f"{_called(problem, best)}, {reason}"
    return _kind(problem, best), reason


def _kind(problem: PlanningProblem, candidate: Candidate) -> Recommendation:
    """Return how a placement uses the devices; stem and head may be on the source."""
    counts = [len(set(parts) - ENDS.keys()) for parts in candidate.placement.values() if parts]
    return "one" if len(counts) == 1 else "replicate" if min(counts) == problem.num_blocks else "split"


def _called(problem: PlanningProblem, candidate: Candidate) -> str:
    if candidate.name == "single":
        return f"{candidate.estimates.route[0]} alone"
    if candidate.name == "copies":
        return "replicas that run stem and head"
    return {"split": "a split", "replicate": "replicas", "one": "one device"}[_kind(problem, candidate)]


def _gain(objective: Objective, best: Candidate, other: Candidate) -> str:
    """Return the advantage of the best candidate in percent; empty if it is unknown."""
    ours, theirs = abs(best.value(objective)), abs(other.value(objective))
    if not ours or not math.isfinite(theirs) or not theirs:
        return ""
    more = ours / theirs - 1 if objective == "throughput" else 1 - ours / theirs
    word = "more" if objective == "throughput" else "less"
    return f" ({100 * more:.0f} % {word})" if more >= NO_WORSE else " (the same)"


def _estimate(objective: Objective, candidate: Candidate) -> str:
    """Return the estimate of an objective with its unit."""
    value = abs(candidate.value(objective))
    if math.isinf(value):
        return f"unknown {objective}"
    return show(value) + {"latency": " ms", "throughput": " images a second", "energy": " mJ an image"}[objective]


def _expected(candidate: Candidate) -> Expected:
    found = candidate.estimates
    return Expected(
        latency_ms=_rounded(found.latency_ms),
        throughput=_rounded(found.throughput),
        energy_mj=_rounded(found.energy_mj),
        placement=_shown(candidate.placement),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else round(value, 4)


def _shown(placement: Placement) -> dict[str, tuple[ShownPart, ...]]:
    return {name: shown_parts(parts) for name, parts in placement.items()}
