"""The smallest fleet that reaches a target: chosen by formula, confirmed by simulation.

Fleets are tried in the order of their cost: the number of devices, then the number of copies of each block. The formula
is the probability that the source is up, that each block has a holder or gets one back within the budget, and that the
budget has room for blocks that run again after a loss. Fleets that it does not rule out are simulated until the
interval lies on one side of the target.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec
import numpy as np

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import ENDS, ShownPart, shown_parts
from ls_edge.core.text import NOTHING, counted, show_hours, show_ms, show_nines, show_nines_range
from ls_edge.evaluation.availability import Batches, ShareEstimate
from ls_edge.evaluation.simulation_summary import FAILED, WHOLE, FleetSettings, SiteOutcome
from ls_edge.runtime.fleet.planning.estimates import estimate, throughput_of
from ls_edge.runtime.fleet.planning.problem import Placement, PlanningProblem, holders_of
from ls_edge.runtime.fleet.planning.scoring import requests_at_once
from ls_edge.runtime.fleet.planning.survival import completed_share
from ls_edge.runtime.fleet.simulation.site_pool import simulate_fleet
from ls_edge.runtime.fleet.simulation.sites import SITE_SIZE, Site, plan_site
from ls_edge.runtime.simulator.churn import Churn, any_of

SHOWN = 3
"""Number of fleets that reach the target after which the search ends."""
REQUESTS = 250
"""Requests of a run; each round doubles the number of runs."""
MOST_RUNS = 64
"""Maximum number of runs; a target that is still within the interval remains open."""
_LOSSES_A_REQUEST = 2.0
"""Limit on the losses between two requests, times the devices that observe each: as expensive as the request, 0.2 ms
each."""
_SELDOM = 0.1
"""Utilization up to which requests hardly wait for each other: by 6 % of their time, for one device."""
_RULED_OUT = 4.0
"""Multiple of the allowed misses beyond which the formula rules a fleet out."""
_KINDS = {"whole": "get a whole answer", "answered": "get an answer", "p99": ""}
_LEAST_OUTAGES = 4
"""Runs with outages from which on an interval of the latency counts, as for shares."""
_RARE = 0.001
"""Share of the time with an outage up to which outages do not change a 99th percentile."""


class Target(msgspec.Struct, frozen=True):
    """A goal for a fleet."""

    kind: str
    """``whole`` and ``answered``: shares of the requests; ``p99``: latency of answers in milliseconds."""
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``0.999``, ``99.9%``, ``answered=0.999`` or ``p99=80ms``; raise :class:`UsageError` otherwise."""
        kind, equals, value = text.rpartition("=")
        kind = kind if equals else "whole"
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(%|ms|s|)", value)
        number = float(match[1]) * {"%": 0.01, "s": 1e3}.get(match[2], 1.0) if match else -1.0
        is_time = match is not None and match[2] in ("ms", "s")
        if kind not in _KINDS or is_time != (kind == "p99") or not 0 < number < (math.inf if is_time else 1):
            raise UsageError(
                f"--target {text!r} cannot be read; write a share below 1, such as 0.999 or 99.9%, for whole answers, "
                "answered=0.999 for answers at all, or p99=80ms for the latency"
            )
        return cls(kind, number)

    @property
    def text(self) -> str:
        """The target as written on the command line."""
        return f"p99={self.value:g}ms" if self.kind == "p99" else f"{self.kind}={self.value:.9g}"


class Latency(msgspec.Struct, frozen=True):
    """The 99th percentile of the latency with its 95 % interval, in milliseconds."""

    p99: float
    low: float
    high: float | None
    """None if too few outages were seen to tell."""
    runs: int
    """Runs in which a device or the source was lost or slow."""


class FleetChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet with its cost and results."""

    devices: int
    zones: int
    """Zones of these devices; 0 if no zone is lost as a whole."""
    replicas: int
    """Copies of each block."""
    placement: dict[str, tuple[ShownPart, ...]]
    copies: int
    """Number of blocks in the memory of all devices together."""
    watts: float | None
    """Power of all devices while they compute; None if a profile has none."""
    throughput: float
    """Images per second while no device is lost, by formula."""
    formula: float
    """Share of whole answers by formula (:func:`formula_share`)."""
    whole: ShareEstimate
    answered: ShareEstimate
    latency_ms: Latency | None
    requests: int
    verdict: str
    """``met``, ``missed`` or, if the interval contains a target, ``open``."""

    def shown(self, kind: str) -> tuple[str, str]:
        """Return the result for a kind of target and its interval as texts."""
        if kind == "p99":
            one = self.latency_ms
            return (NOTHING,) * 2 if one is None else (show_ms(one.p99), f"{show_ms(one.low)} to {show_ms(one.high)}")
        share = self.whole if kind == "whole" else self.answered
        return show_nines(share.share), show_nines_range(share.low, share.high)


class FleetSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Document of ``ls-edge plan --target --json``."""

    answer: str
    targets: list[Target]
    churn: list[str]
    budget_ms: float
    rate: float | None
    seed: int
    fleets: list[FleetChoice]
    """Simulated fleets, the cheapest first."""
    assumptions: list[str]


def search_fleets(
    problem: PlanningProblem,
    targets: Sequence[Target],
    settings: FleetSettings,
    churn: Sequence[Churn],
    *,
    executor: Executor | None = None,
    on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
) -> list[FleetChoice]:
    """Return the simulated fleets in the order of their cost; ``problem`` has a device for each profile.

    Raise :class:`UsageError` if no site has room for the model, or if ``settings`` have no rate for a latency.
    """
    if settings.rate is None and any(target.kind == "p99" for target in targets):
        raise UsageError("a target of latency depends on the load; give --rate IMAGES, too")
    found: list[FleetChoice] = []
    tried: list[list[list[tuple[int, ...]]]] = []
    refused: UsageError | None = None
    is_planned = False
    for size in range(len(problem.devices), SITE_SIZE + 1):
        chosen = tuple(sorted(itertools.islice(itertools.cycle(range(len(problem.devices))), size)))
        for replicas in range(1, size + 1):
            try:
                own, placement, kinds = plan_site(problem, replicas, chosen, churn=churn, exactly=True)
                asked = msgspec.structs.replace(settings, rate=_rate(own, placement, settings, churn))
            except UsageError as error:
                refused = error
                break
            is_planned = True
            fleet = _held(own, placement)
            if fleet in tried or _is_ruled_out(own, placement, targets, asked, churn):
                continue
            tried.append(fleet)
            copies = counted(replicas, "copy", "copies")
            on_step(size - 1, SITE_SIZE, f"simulating {counted(size, 'device')}, {copies} of each block")
            found.append(judge_fleet(own, placement, kinds, targets, asked, churn, executor))
            if _may_reach(found[-1], targets):
                break
        if sum(_may_reach(one, targets) for one in found) == SHOWN:
            break
    if refused is not None and not is_planned:
        raise refused
    # With one more device, the best placement may need fewer of them.
    return sorted(found, key=lambda one: (one.devices, one.replicas))


def _held(problem: PlanningProblem, placement: Placement) -> list[list[tuple[int, ...]]]:
    """Return the blocks of devices by zone; without its idle devices, a fleet may be one that was tried."""
    zones: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for device in problem.devices:
        if blocks := placement[device.name]:
            zones[device.zone or device.name].append(blocks)
    return sorted(map(sorted, zones.values()))


def _may_reach(one: FleetChoice, targets: Sequence[Target]) -> bool:
    """Return whether a fleet meets the targets by simulation, or by formula if the simulation leaves them open."""
    by_formula = all(one.formula >= target.value for target in targets if target.kind != "p99")
    return one.verdict == "met" or (one.verdict == "open" and by_formula)


def formula_share(problem: PlanningProblem, placement: Placement, budget_s: float, churn: Sequence[Churn]) -> float:
    """Return the probability of a whole answer, without queues.

    The source is up, each block has a holder or gets one back in time, and each board on the way is up for as long as
    it holds the request, or the budget has room to run its blocks again elsewhere.

    Times are exponential: a holder that was lost for ``down`` on average is still lost after ``t`` with
    ``exp(-t / down)``. Counts outages of a single block; those of several at once last longer. A copy of the tokens is
    kept, so a lost board loses only what it ran itself; losses of two boards on the way count as if each had the spare
    time alone.
    """
    found = estimate(problem, placement)
    assert found.latency_ms is not None
    assert found.whole_share is not None
    spare_s = budget_s - found.latency_ms / 1e3
    if spare_s < 0:
        return 0.0
    visits = dict.fromkeys(found.route, 0.0)
    for part, held in holders_of(problem, placement).items():
        times = {name: problem.processes[name].part_ms(part) / 1e3 for name in held if name in visits}
        if times:
            visits[min(times, key=times.__getitem__)] += min(times.values())
    share = math.prod((1 - one.loss) * math.exp(-found.latency_ms / 1e3 / one.up) for one in churn if one.is_source)
    boards = [one for one in churn if one.loss and not one.is_source]
    if not boards:
        return share
    late = sum(one.loss * math.exp(-spare_s / one.down) for one in boards) / sum(one.loss for one in boards)
    up_s = 1 / sum(1 / one.up for one in boards)
    return (share * (1 - (1 - found.whole_share) * late**problem.replicas)) * math.prod(
        completed_share(up_s, run_s, spare_s + run_s) for run_s in visits.values()
    )


def answer_text(targets: Sequence[Target], found: Sequence[FleetChoice]) -> str:
    """Return a sentence about the cheapest fleet that reaches the targets and the uncertainty of that."""
    asked = " and ".join(target.text for target in targets)
    best = next((one for one in found if one.verdict == "met"), None)
    if best is None:
        is_open = [one for one in found if one.verdict == "open"]
        if not is_open:
            return f"no fleet of up to {SITE_SIZE} devices reaches {asked}" + (
                "" if found else ": by formula, all miss it by far, or answer fewer images a second than --rate"
            )
        close = next((one for one in is_open if _may_reach(one, targets)), is_open[0])
        devices = counted(close.devices, "device")
        return f"whether {asked} can be reached by {devices} is open: {_evidence(targets, close)}"
    held = counted(best.replicas, "copy", "copies")
    where = f" in {counted(best.zones, 'zone')}" if best.zones else ""
    reach = f"reach{'es' if best.devices == 1 else ''} {asked}"
    return f"{counted(best.devices, 'device')}{where} with {held} of each block {reach}: {_evidence(targets, best)}"


def _evidence(targets: Sequence[Target], one: FleetChoice) -> str:
    said: list[str] = []
    for kind in dict.fromkeys(target.kind for target in targets):
        result, interval = one.shown(kind)
        sure = f"95 % interval {interval}"
        if kind != "p99":
            said.append(f"{result} {_KINDS[kind]}, {sure}")
        elif (found := one.latency_ms) is not None:
            unsure = "without enough outages to tell the p99 with them"
            said.append(f"p99 {result}, {sure if found.high else unsure}, with losses in {counted(found.runs, 'run')}")
    seen = f"{counted(one.whole.outages, 'outage')} in {show_hours(one.whole.hours)} simulated"
    return f"{'; '.join(said)} ({seen}; by formula {show_nines(one.formula)} whole)"


def _is_ruled_out(
    problem: PlanningProblem,
    placement: Placement,
    targets: Sequence[Target],
    settings: FleetSettings,
    churn: Sequence[Churn],
) -> bool:
    """Return whether a fleet misses a target by far, according to the formulas."""
    if settings.rate is not None and throughput_of(problem, placement) < settings.rate:
        return True
    missed = 1 - formula_share(problem, placement, settings.budget_ms / 1e3, churn)
    return any(target.kind == "whole" and missed > _RULED_OUT * (1 - target.value) for target in targets)


def judge_fleet(
    problem: PlanningProblem,
    placement: Placement,
    kinds: dict[str, str],
    targets: Sequence[Target],
    settings: FleetSettings,
    churn: Sequence[Churn],
    executor: Executor | None,
) -> FleetChoice:
    """Simulate a fleet at the rate of ``settings`` until the intervals lie on one side of the targets."""
    used = {device.name: device for device in problem.devices if placement[device.name]}
    own = msgspec.structs.replace(settings, devices=len(problem.devices), replicas=problem.replicas)
    at_once = requests_at_once(problem, placement)
    site = Site(0, problem, dict(placement), kinds, REQUESTS, at_once, settings.rate, own, churn)
    lost = [one.down / (one.up + one.down) for one in churn for _ in used]
    observe = partial(_observe, settings=own, is_rare=any_of(lost) <= _RARE)

    def grow(outcomes: Sequence[SiteOutcome]) -> float:
        return 2.0 if _verdict(targets, observe(outcomes)) == "open" else 1.0

    outcomes = simulate_fleet([site], executor, grow=grow, most=MOST_RUNS)
    whole, answered, latency = observe(outcomes)
    watts = [device.watts for device in used.values()]
    return FleetChoice(
        devices=len(used),
        zones=len({device.zone for device in used.values()} - {None}),
        replicas=problem.replicas,
        placement={name: shown_parts(placement[name]) for name in used},
        copies=sum(len(set(parts) - ENDS.keys()) for parts in placement.values()),
        watts=None if None in watts else round(sum(one for one in watts if one is not None), 6),
        throughput=round(throughput_of(problem, placement), 6),
        formula=round(formula_share(problem, placement, settings.budget_ms / 1e3, churn), 9),
        whole=whole,
        answered=answered,
        latency_ms=latency,
        requests=sum(len(outcome.states) for outcome in outcomes),
        verdict=_verdict(targets, (whole, answered, latency)),
    )


def _rate(problem: PlanningProblem, placement: Placement, settings: FleetSettings, churn: Sequence[Churn]) -> float:
    """Return the images per second to simulate: those of ``settings``, or if these are rare about one in an outage.

    More requests in an outage or a budget would share its fate, unless the losses in between take longer to simulate.
    Raise :class:`UsageError` if devices are lost so often that more requests would have to wait for each other.
    """
    used = sum(map(bool, placement.values()))
    losses = sum(one.per_second(used) for one in churn)
    least = used * losses / _LOSSES_A_REQUEST
    seldom = max(least, 1 / max(settings.outage_s, settings.budget_ms / 1e3))
    rate = max(settings.rate or 0.0, min(seldom, _SELDOM * throughput_of(problem, placement)))
    if rate < least:
        raise UsageError(
            f"--churn: a device is lost every {show_ms(1e3 / losses)} on average, too often to simulate; give longer "
            "times"
        )
    return rate


_Observed = tuple[ShareEstimate, ShareEstimate, Latency | None]


def _observe(outcomes: Sequence[SiteOutcome], settings: FleetSettings, *, is_rare: bool) -> _Observed:
    states = np.concatenate([outcome.states for outcome in outcomes])
    batches = Batches.of(outcomes, settings.outage_s)
    taken = np.concatenate([outcome.latency_s for outcome in outcomes]) * 1e3
    shares = [
        batches.share(hit, apart_s=settings.budget_ms / 1e3, spread=0.5) for hit in (states == WHOLE, states != FAILED)
    ]
    interval = batches.quantile(taken, states != FAILED, 0.99)
    if interval is None:
        return shares[0], shares[1], None
    p99 = float(np.quantile(taken[states != FAILED], 0.99))
    runs = sum(one.has_outage for one in outcomes)
    high = round(interval.high, 6) if is_rare or runs >= _LEAST_OUTAGES else None
    return shares[0], shares[1], Latency(round(p99, 6), round(interval.low, 6), high, runs)


def _verdict(targets: Sequence[Target], observed: _Observed) -> str:
    verdicts = {_verdict_on(target, observed) for target in targets}
    return next(verdict for verdict in ("missed", "open", "met") if verdict in verdicts)


def _verdict_on(target: Target, observed: _Observed) -> str:
    whole, answered, latency = observed
    if target.kind == "p99":
        if latency is None or latency.low > target.value:
            return "missed"
        return "met" if latency.high is not None and latency.high <= target.value else "open"
    share = whole if target.kind == "whole" else answered
    if share.high < target.value:
        return "missed"
    return "met" if share.low >= target.value else "open"
