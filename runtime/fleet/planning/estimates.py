"""Value of a placement by formula: latency, throughput, and energy per image.

Let ``t`` be the time of a block (of a single image for latency, else per image of a full batch), ``c`` the time of a
visit, and ``R(j)`` the number of holders of block ``j``:

- latency of a single request: ``source + min over used devices of (sum of c) + (sum over parts of the least t)``
- load of a device: ``w(d) = sum over its parts of 1 / R(j)``, since the holders of a part share it equally; if all
  devices hold everything, they share the images by speed
- throughput: ``1 / max(max w(d) t(d), max (w(d) t(d) + calls(d) o(d)) / 2, max visits(d) wire(d))``, with ``o`` the
  overhead of an engine call per image of its batch; an engine has two calls at the same time
- energy per image: ``sum of w(d) t(d) watts(d)``

The source is one of the devices, and holds stem and head unless others do. Stem and head count as the number of blocks
that take the same time. An image on its way to the first device, and logits from the last one, occupy a link in
proportion to their size.

One image in ``min R(j)`` visits a device, once for each band whose blocks the device runs. If one band ends and the
next begins at the same device, that is one visit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem, holders_of

ALL_ROUTES = 10
"""Largest number of devices for which every subset is tried as a route; one more doubles the time."""
_FIELDS: dict[Objective, str] = {
    "latency": "latency_ms",
    "throughput": "throughput",
    "energy": "energy_mj",
}
"""Estimate of each objective."""


class Estimates(msgspec.Struct, frozen=True):
    """Estimates of a placement; null if unknown."""

    latency_ms: float | None
    """Latency of a single request."""
    throughput: float | None
    """Images per second."""
    energy_mj: float | None = None
    """Energy per image of all devices while they compute."""
    route: tuple[str, ...] = ()
    """Devices that a single request visits."""

    def value(self, objective: Objective) -> float:
        """Return the estimate of an objective as a cost: negated if more is better, infinite if unknown."""
        value: float | None = getattr(self, _FIELDS[objective])
        if value is None:
            return float("inf")
        return -value if objective == "throughput" else value


def estimate(problem: PlanningProblem, placement: Placement, route: Collection[str] = ()) -> Estimates:
    """Estimate a placement; one in which a block has no holder is infinitely slow.

    ``route`` names devices that together hold the whole model, as a hint if there are too many subsets to try.
    """
    holders = holders_of(problem, placement)
    if not all(holders.values()):
        return Estimates(float("inf"), 0.0)
    load = _load(problem, placement)
    whole = ({name: parts} for name, parts in placement.items() if len(parts) == len(holders))
    visited, latency = min((best_route(problem, one, route) for one in (placement, *whole)), key=lambda found: found[1])
    processes = problem.processes
    first, last = (max(processes[name].wire_ms, problem.source.wire_ms) for name in (visited[0], visited[-1]))
    sent, got = problem.sizes(placement)
    links_ms = (max(0.0, processes[name].visit_ms - processes[name].runtime_ms) for name in visited)
    transfers = problem.source.visit_ms + sum(links_ms)
    energies = [None if (mj := processes[name].block_mj) is None else share * mj for name, share in load.items()]
    saved = min(first * (1 - sent) + last * (1 - got), transfers)  # a transfer takes time, however small
    return Estimates(
        latency_ms=problem.source_ms(placement) + problem.source.visit_ms + latency - saved,
        throughput=throughput_of(problem, placement),
        energy_mj=None if None in energies else sum(one for one in energies if one is not None),
        route=visited,
    )


def throughput_of(problem: PlanningProblem, placement: Placement) -> float:
    """Return the images per second that devices, links and source can sustain if every part has a holder."""
    processes, load, shares = problem.processes, _load(problem, placement), _shares(problem, placement)
    again = _visits_again(problem, problem.held(placement))
    sent, got = problem.sizes(placement)
    times = [problem.source.wire_ms * max(sent, got)]
    for name, parts in shares.items():
        process, visits = processes[name], again[name] * max(parts.values())
        into = visits - parts.get(STEM, 0.0) * (1 - sent)
        out = visits - parts.get(HEAD, 0.0) * (1 - got)
        times += [visits * process.taken_ms(load[name] / visits), max(into, out) * process.wire_ms]
    slowest = max(times)
    return 1e3 / slowest if slowest > 0 else float("inf")


def _shares(problem: PlanningProblem, placement: Placement) -> dict[str, dict[int, float]]:
    """Return the fraction of the images for which each used process runs each of its parts."""
    held = problem.held(placement)
    holders = holders_of(problem, held)
    used = [process for name, process in problem.processes.items() if held.get(name)]
    if not all(len(held[one.name]) == len(holders) for one in used):
        return {one.name: {part: 1 / len(holders[part]) for part in held[one.name]} for one in used}
    times = {one.name: one.taken_ms(one.weight(holders)) for one in used}
    size = max(problem.sizes(placement))
    speeds = {one.name: 1 / max(times[one.name], one.wire_ms * size, 1e-9) for one in used}
    return {name: dict.fromkeys(holders, speed / sum(speeds.values())) for name, speed in speeds.items()}


def _load(problem: PlanningProblem, placement: Placement) -> dict[str, float]:
    """Return the mean number of blocks that each used process runs per image; stem and head count by their time."""
    processes = problem.processes
    return {
        name: sum(share * processes[name].weight((part,)) for part, share in parts.items())
        for name, parts in _shares(problem, placement).items()
    }


def best_route(
    problem: PlanningProblem, placement: Placement, hint: Collection[str] = ()
) -> tuple[tuple[str, ...], float]:
    """Return the devices that a single request visits, and the milliseconds of their visits and parts.

    Exact for one band and few devices. Otherwise, each band has its best route, and a visit is saved if two bands can
    meet at a device. ``hint`` names devices to try as a route.
    """
    devices = problem.processes
    held_by = holders_of(problem, placement)
    used: list[tuple[str, ...]] = []
    total, met = 0.0, ""
    for band in problem.part_bands:
        holders = {part: held_by[part] for part in band if part in held_by}
        # A visit may be free if the request is already there for the previous band.
        preferred = {name for name in (used[-1] if used else ()) if not set(placement[name]).isdisjoint(band)}
        names, ms = _route_of_band(problem, holders, preferred, hint)
        if used:
            shared = sorted(set(used[-1]) & set(names))
            # One device ends the previous band and begins this one; if that has several, it must not begin it, too.
            meets = [name for name in shared if len(used[-1]) == 1 or name != met]
            met = max(meets, key=lambda name: devices[name].visit_ms, default="")
            if name := met:
                ms -= devices[name].visit_ms
                names = (name, *(other for other in names if other != name))
                used[-1] = (*(other for other in used[-1] if other != name), name)
        used.append(names)
        total += ms
    route = [name for names in used for name in names]
    return tuple(name for place, name in enumerate(route) if place == 0 or name != route[place - 1]), total


def _route_of_band(
    problem: PlanningProblem, holders: Mapping[int, Sequence[str]], preferred: set[str], hint: Collection[str]
) -> tuple[tuple[str, ...], float]:
    """Minimize the visits of the used devices plus the fastest of their times for each part (facility location)."""
    devices = problem.processes
    names = sorted({name for held in holders.values() for name in held})
    place = {name: number for number, name in enumerate(names)}
    visits = np.array([devices[name].visit_ms for name in names])
    times = np.full((len(holders), len(names)), np.inf)
    for row, (part, held) in enumerate(holders.items()):
        for name in held:
            times[row, place[name]] = devices[name].part_ms(part)
    wanted = [place[name] for name in preferred if name in place]

    def cost(chosen: frozenset[int]) -> float:
        used = sorted(chosen)
        return float(visits[used].sum() + times[:, used].min(axis=1).sum()) if used else float("inf")

    def rank(chosen: frozenset[int]) -> tuple[float, int, int, list[int]]:
        return round(cost(chosen), 9), len(chosen), -len(chosen.intersection(wanted)), sorted(chosen)

    forced = frozenset(place[held[0]] for held in holders.values() if len(held) == 1)
    free = [number for number in range(len(names)) if number not in forced]
    if len(free) <= ALL_ROUTES:
        subsets = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
        best = min((forced | frozenset(extra) for extra in subsets), key=rank)
    else:
        tried = [_greedy_route(times, visits, forced)]
        hinted = frozenset(place[name] for name in hint if name in place) | forced
        best = min([*tried, hinted], key=rank) if np.isfinite(cost(hinted)) else tried[0]
    found = tuple(sorted((names[number] for number in best), key=lambda name: (devices[name].block_ms, name)))
    return found, cost(best)


def _greedy_route(times: np.ndarray, visits: np.ndarray, forced: frozenset[int]) -> frozenset[int]:
    """Add the device that helps most until none helps, then drop devices that are not needed."""
    missing = 1e3 * (float(visits.sum()) + float(times[np.isfinite(times)].sum()) + 1.0)  # costs more than any route
    capped = np.minimum(times, missing)
    chosen = set(forced)
    best = capped[:, sorted(chosen)].min(axis=1) if chosen else np.full(len(times), missing)
    while True:
        after = np.minimum(best[:, None], capped).sum(axis=0) + visits
        after[sorted(chosen)] = np.inf
        number = int(after.argmin())
        if after[number] >= best.sum() - 1e-12:
            break
        chosen.add(number)
        best = np.minimum(best, capped[:, number])
    for number in sorted(chosen - forced, key=lambda number: -visits[number]):
        left = sorted(chosen - {number})
        if left and capped[:, left].min(axis=1).sum() <= best.sum() + visits[number]:
            chosen.discard(number)
            best = capped[:, left].min(axis=1)
    return frozenset(chosen)


def _visits_again(problem: PlanningProblem, placement: Placement) -> dict[str, int]:
    """Return the number of visits of a request to each device: one per band, unless it can stay."""
    found = dict.fromkeys(placement, 0)
    before: set[str] = set()
    for band in problem.bands:
        here = {name for name, blocks in placement.items() if not set(blocks).isdisjoint(band)}
        stays = sorted(before & here)[:1]
        for name in here:
            found[name] += name not in stays
        before = here
    return {name: max(1, count) for name, count in found.items()}
