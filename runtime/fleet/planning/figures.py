"""What a placement promises by formula: latency, throughput, energy an image, battery life, share of whole answers.

With ``t`` the time of a block, ``c`` of a visit and ``R(j)`` the number of holders of block ``j``, ``t`` being for
latency that of an image alone and else that of one in a full batch:

- latency of one request alone: ``source + min over used devices of (sum of c) + (sum over blocks of the least t)``
- load of a device: ``w(d) = sum over its blocks of 1 / R(j)``, the holders of a block sharing it equally
- throughput: ``1 / max(max w(d) t(d), max (w(d) t(d) + calls(d) o(d)) / 2, max visits(d) wire(d), source, source
  wire)``, with ``o`` for what an engine call takes beyond the engine, for each image of its batch; an engine has two
  calls at once
- energy an image: ``sum of w(d) t(d) watts(d)``, and stem and head at the source

A device is visited by one image in ``min R(j)``, once for each band of which it runs blocks; where one band ends and
the next begins at the same device, that is one visit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem
from ls_edge.runtime.fleet.planning.whole_share import whole_share

ALL_ROUTES = 10
"""Most devices whose every subset is tried as a route: one more doubles the time."""


@dataclass(frozen=True)
class Figures:
    """What a placement promises; None where a figure that it needs is not known."""

    latency_ms: float
    throughput: float
    """Images a second."""
    energy_mj: float | None
    battery_h: float | None
    """Until the first battery is empty, at that throughput."""
    whole_share: float
    route: tuple[str, ...] = ()
    """Devices that a request visits when it is alone."""

    def value(self, objective: Objective) -> float:
        """The figure of an objective, turned so that less is better."""
        if objective == "latency":
            return self.latency_ms
        if objective == "throughput":
            return -self.throughput
        if objective == "energy":
            return float("inf") if self.energy_mj is None else self.energy_mj
        return -self.whole_share


def figures_of(problem: PlanningProblem, placement: Placement, route: Collection[str] = ()) -> Figures:
    """What a placement promises; blocks without a holder make it infinitely slow and never whole.

    ``route`` are devices that hold the whole model together, as a hint where there are too many to try all subsets.
    """
    holders = _holders(problem, placement)
    if not all(holders.values()):
        return Figures(float("inf"), 0.0, None, None, 0.0)
    load = _load(holders, placement)
    throughput = throughput_of(problem, placement)
    visited, latency = best_route(problem, placement, route)
    return Figures(
        latency_ms=problem.source_ms + problem.source_visit_ms + latency,
        throughput=throughput,
        energy_mj=_energy(problem, load),
        battery_h=_battery(problem, load, throughput),
        whole_share=whole_share(problem, placement),
        route=visited,
    )


def value_of(
    problem: PlanningProblem, placement: Placement, objective: Objective, route: Collection[str] = ()
) -> float:
    """The figure of one objective, turned so that less is better: :meth:`Figures.value` without the others."""
    holders = _holders(problem, placement)
    if not all(holders.values()):
        return float("inf")
    if objective == "latency":
        return problem.source_ms + problem.source_visit_ms + best_route(problem, placement, route)[1]
    if objective == "throughput":
        return -throughput_of(problem, placement)
    if objective == "energy":
        energy = _energy(problem, _load(holders, placement))
        return float("inf") if energy is None else energy
    return -whole_share(problem, placement)


def throughput_of(problem: PlanningProblem, placement: Placement) -> float:
    """Images a second that devices, links and source allow where every block has a holder."""
    devices = {device.name: device for device in problem.devices}
    holders = _holders(problem, placement)
    load = _load(holders, placement)
    again = _visits_again(problem, placement)
    visits = {name: again[name] * max(1 / len(holders[block]) for block in placement[name]) for name in load}
    busy = max(visits[name] * devices[name].taken_ms(load[name] / visits[name]) for name in load)
    wire = max(visits[name] * devices[name].wire_ms for name in load)
    slowest = max(busy, wire, problem.source_ms, problem.source_wire_ms)
    return 1e3 / slowest if slowest > 0 else float("inf")


def _holders(problem: PlanningProblem, placement: Placement) -> dict[int, list[str]]:
    holders: dict[int, list[str]] = {block: [] for block in range(problem.num_blocks)}
    for name, blocks in placement.items():
        for block in blocks:
            holders[block].append(name)
    return holders


def _load(holders: Mapping[int, Sequence[str]], placement: Placement) -> dict[str, float]:
    """Blocks that each used device runs for an image on average."""
    return {name: sum(1 / len(holders[block]) for block in blocks) for name, blocks in placement.items() if blocks}


def best_route(
    problem: PlanningProblem, placement: Placement, hint: Collection[str] = ()
) -> tuple[tuple[str, ...], float]:
    """The devices that a request alone would visit, and the milliseconds of their visits and blocks.

    Exact for one band and few devices; else the best for each band by itself, a visit saved where two bands can meet.
    ``hint`` are devices to try as a route.
    """
    bands = problem.bands or (tuple(range(problem.num_blocks)),)
    devices = {device.name: device for device in problem.devices}
    held_by = _holders(problem, placement)
    used: list[tuple[str, ...]] = []
    total = 0.0
    for band in bands:
        holders = [held_by[block] for block in band]
        names, ms = _route_of_band(problem, holders, _preferred(used, placement, band), hint)
        if used:
            shared = set(used[-1]) & set(names)
            # one device ends the band before and begins this one; in a band of several, not the one that began it
            meets = [name for name in shared if len(used[-1]) == 1 or name != used[-1][0]]
            if meets:
                name = max(meets, key=lambda name: devices[name].visit_ms)
                ms -= devices[name].visit_ms
                names = (name, *(other for other in names if other != name))
                used[-1] = (*(other for other in used[-1] if other != name), name)
        used.append(names)
        total += ms
    route = [name for names in used for name in names]
    return tuple(name for place, name in enumerate(route) if place == 0 or name != route[place - 1]), total


def _preferred(used: Sequence[tuple[str, ...]], placement: Placement, band: Sequence[int]) -> set[str]:
    """Devices of the band before that hold blocks of this one: a visit to one of them may come for nothing."""
    return {name for name in (used[-1] if used else ()) if not set(placement[name]).isdisjoint(band)}


def _route_of_band(
    problem: PlanningProblem, holders: Sequence[Sequence[str]], preferred: set[str], hint: Collection[str]
) -> tuple[tuple[str, ...], float]:
    """Least ``sum of c`` of the used devices and least ``t`` among them for each block (facility location)."""
    devices = {device.name: device for device in problem.devices}
    names = sorted({name for held in holders for name in held})
    place = {name: number for number, name in enumerate(names)}
    visits = np.array([devices[name].visit_ms for name in names])
    times = np.full((len(holders), len(names)), np.inf)
    for row, held in enumerate(holders):
        for name in held:
            times[row, place[name]] = devices[name].block_ms
    wanted = [place[name] for name in preferred if name in place]

    def cost(chosen: frozenset[int]) -> float:
        used = sorted(chosen)
        return float(visits[used].sum() + times[:, used].min(axis=1).sum()) if used else float("inf")

    def rank(chosen: frozenset[int]) -> tuple[float, int, int, list[int]]:
        return round(cost(chosen), 9), len(chosen), -len(chosen.intersection(wanted)), sorted(chosen)

    forced = frozenset(place[held[0]] for held in holders if len(held) == 1)
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
    """Take in the device that helps most as long as one does, then leave out those that are not needed."""
    missing = 1e3 * (float(visits.sum()) + float(times[np.isfinite(times)].sum()) + 1.0)  # dearer than any route
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
    """How often a request comes by each device because bands force it to, boundaries where it can stay taken off."""
    if len(problem.bands) <= 1:
        return dict.fromkeys(placement, 1)
    found = dict.fromkeys(placement, 0)
    before: set[str] = set()
    for band in problem.bands:
        here = {name for name, blocks in placement.items() if not set(blocks).isdisjoint(band)}
        stays = sorted(before & here)[:1]
        for name in here:
            found[name] += name not in stays
        before = here
    return {name: max(1, count) for name, count in found.items()}


def _energy(problem: PlanningProblem, load: dict[str, float]) -> float | None:
    total = problem.source_mj
    for device in problem.devices:
        if device.name in load:
            if total is None or device.block_mj is None:
                return None
            total += load[device.name] * device.block_mj
    return total


def _battery(problem: PlanningProblem, load: dict[str, float], throughput: float) -> float | None:
    """Hours until the first battery is empty; a device without a battery never is."""
    hours: list[float] = []
    for device in problem.devices:
        if device.battery_wh is None:
            continue
        if device.watts is None or device.idle_watts is None:
            return None
        busy = min(1.0, load.get(device.name, 0.0) * device.busy_ms * throughput / 1e3)
        watts = device.idle_watts + busy * max(0.0, device.watts - device.idle_watts)
        hours.append(device.battery_wh / watts if watts > 0 else float("inf"))
    return min(hours) if hours else None
