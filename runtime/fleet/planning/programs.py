"""A placement as a mixed-integer program, in counts for each kind of device: exact by the formulas of ``figures.py``.

``N`` devices of a kind, with time ``t`` a block, cost ``c`` a visit and room for ``m`` blocks hold ``n`` blocks,
``u`` of them being used and none holding more than ``q``. Each of ``B`` blocks has ``R`` holders; a zone holds no block
twice, so the kinds of a zone hold at most ``B``:

- latency: ``min sum(t n + c u)``, ``sum(n) = B``, ``u <= n <= m u``
- throughput: ``min T``, ``t q <= T``, ``t q + o k <= 2 T``, ``q <= l k``, ``wire y <= T``, ``q <= m y``, ``n <= N q``,
  ``sum(n) = R B``, for ``k`` engine calls a visit of at most ``l`` blocks, each of which takes ``o`` beyond the engine,
  and an engine that has 2 calls at once
- energy: ``min sum(energy n)``, ``n <= N m``, ``sum(n) = R B``
- survival, of few devices: sets of ``R`` devices, each with ``n`` blocks and ``z = 1`` where there are any;
  ``max sum(p s)`` over the sets of devices that may be gone, ``s <= 1 - z`` for each set that would be gone with them
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ls_edge.runtime.fleet.planning.assignment import assign_in_circle, assign_route, assign_sets
from ls_edge.runtime.fleet.planning.milp import LinearProgram
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem, kinds_of, zones_of
from ls_edge.runtime.fleet.planning.whole_share import dead_sets
from ls_edge.runtime.routing.engine_queue import MOST_CALLS

SURVIVAL_DEVICES = 8
"""Most devices whose every set of holders is a variable: 9 make a program of seconds one of minutes."""
MOST_SETS = 400
"""Most kinds of groups of devices that hold the same blocks, beyond that."""
_MOST_TRIED = 100_000
"""Groups of kinds that are looked at for those: more of them take seconds."""
_TIE = 1e-6
"""Weight of the number of used devices where the objective leaves it open, as a part of the objective."""


@dataclass(frozen=True)
class PlacementProgram:
    """A program, and how its solution becomes a placement."""

    program: LinearProgram
    read: Callable[[Sequence[float]], Placement | None]
    route: Callable[[Sequence[float]], tuple[str, ...]] = lambda _values: ()
    """Devices that a request visits in the solution, where the program says so."""
    is_exact: bool = False
    """Whether no placement with so many holders is better; else none of those that the program knows."""


def placement_program(problem: PlanningProblem, objective: Objective, replicas: int) -> PlacementProgram | None:
    """The program for so many holders a block; None where there is none of a sensible size."""
    if objective == "latency":
        return _latency(problem, replicas)
    if objective == "throughput":
        return _throughput(problem, replicas)
    if objective == "energy":
        return _energy(problem, replicas)
    zones = {device.zone for device in problem.devices} & problem.zone_losses.keys()
    if len(problem.devices) + len(zones) <= SURVIVAL_DEVICES:
        return _survival(problem, replicas)
    return _mirrored_groups(problem, replicas)


def _limit_zones(problem: PlanningProblem, lp: LinearProgram, kinds: Sequence[Sequence[int]], n: Sequence[int]) -> None:
    """A zone holds no block twice."""
    for devices in zones_of(problem.devices).values():
        here = {n[k]: 1.0 for k, kind in enumerate(kinds) if kind[0] in devices and len(devices) > 1}
        if here:
            lp.row(here, upper=problem.num_blocks)


def _latency(problem: PlanningProblem, replicas: int) -> PlacementProgram:
    lp = LinearProgram([], [], [], [], [], [])
    kinds = kinds_of(problem.devices)
    n: list[int] = []
    for kind in kinds:
        device, room = problem.devices[kind[0]], problem.room(problem.devices[kind[0]])
        n.append(lp.column(device.block_ms, room * len(kind)))
        used = lp.column(device.visit_ms, len(kind))
        lp.row({n[-1]: 1, used: -room}, upper=0)
        lp.row({n[-1]: 1, used: -1}, lower=0)
    lp.row(dict.fromkeys(n, 1.0), lower=problem.num_blocks, upper=problem.num_blocks)
    _limit_zones(problem, lp, kinds, n)

    def counts_of(values: Sequence[float]) -> tuple[int, ...]:
        counts = [0] * len(problem.devices)
        for kind, column in zip(kinds, n, strict=True):
            _spread(counts, kind[: round(values[column + 1])], round(values[column]))
        return tuple(counts)

    def read(values: Sequence[float]) -> Placement | None:
        return assign_route(problem, counts_of(values), replicas)

    def route(values: Sequence[float]) -> tuple[str, ...]:
        return tuple(d.name for d, count in zip(problem.devices, counts_of(values), strict=True) if count)

    return PlacementProgram(lp, read, route, is_exact=True)


def _throughput(problem: PlanningProblem, replicas: int) -> PlacementProgram:
    lp = LinearProgram([], [], [], [], [], [])
    kinds = kinds_of(problem.devices)
    slowest = lp.column(1.0, None, integer=False)
    scale = max(device.busy_ms for device in problem.devices) / max(1, replicas * problem.num_blocks)
    n: list[int] = []
    for kind in kinds:
        device, room = problem.devices[kind[0]], problem.room(problem.devices[kind[0]])
        n.append(lp.column(_TIE * scale * device.visit_ms / (1 + device.visit_ms), room * len(kind)))
        most, used = lp.column(0.0, room), lp.column(0.0, 1)
        lp.row({n[-1]: 1, most: -len(kind)}, upper=0)
        lp.row({most: 1, used: -room}, upper=0)
        lp.row({most: device.busy_ms, slowest: -1}, upper=0)
        if device.beyond_ms:
            calls = lp.column(0.0, math.ceil(room / device.blocks_a_call))
            lp.row({calls: device.blocks_a_call, most: -1}, lower=0)
            lp.row({most: device.busy_ms, calls: device.beyond_ms, slowest: -MOST_CALLS}, upper=0)
        lp.row({used: device.wire_ms, slowest: -1}, upper=0)
    lp.row(dict.fromkeys(n, 1.0), lower=replicas * problem.num_blocks, upper=replicas * problem.num_blocks)
    _limit_zones(problem, lp, kinds, n)
    return PlacementProgram(lp, _in_circle(problem, kinds, n), is_exact=True)


def _energy(problem: PlanningProblem, replicas: int) -> PlacementProgram:
    lp = LinearProgram([], [], [], [], [], [])
    kinds = kinds_of(problem.devices)
    n: list[int] = []
    for kind in kinds:
        device, room = problem.devices[kind[0]], problem.room(problem.devices[kind[0]])
        n.append(lp.column(device.block_mj or 0.0, room * len(kind)))
    lp.row(dict.fromkeys(n, 1.0), lower=replicas * problem.num_blocks, upper=replicas * problem.num_blocks)
    _limit_zones(problem, lp, kinds, n)

    def read(values: Sequence[float]) -> Placement | None:
        counts = [0] * len(problem.devices)
        for kind, column in zip(kinds, n, strict=True):  # on as few devices of a kind as have room: fewer visits
            room, count = problem.room(problem.devices[kind[0]]), round(values[column])
            _spread(counts, kind[: math.ceil(count / room)] if room else (), count)
        return assign_in_circle(problem, tuple(counts))

    return PlacementProgram(lp, read, is_exact=True)


def _survival(problem: PlanningProblem, replicas: int) -> PlacementProgram:
    devices = problem.devices
    sets = [
        frozenset(members)
        for members in itertools.combinations(range(len(devices)), replicas)
        if len({devices[m].zone or f"device {m}" for m in members}) == replicas
    ]
    lp = LinearProgram([], [], [], [], [], [])
    holds = [lp.column(0.0, problem.num_blocks) for _ in sets]
    used = [lp.column(0.0, 1) for _ in sets]
    for n, z in zip(holds, used, strict=True):
        lp.row({n: 1, z: -problem.num_blocks}, upper=0)
    lp.row(dict.fromkeys(holds, 1.0), lower=problem.num_blocks, upper=problem.num_blocks)
    for index, device in enumerate(devices):
        here = {n: 1.0 for n, members in zip(holds, sets, strict=True) if index in members}
        if here:
            lp.row(here, upper=problem.room(device))
    for dead, chance in dead_sets(problem, range(len(devices))):
        ended = [z for z, members in zip(used, sets, strict=True) if members <= dead]
        if ended:
            whole = lp.column(-chance, 1, integer=False)
            for z in ended:
                lp.row({whole: 1, z: 1}, upper=1)

    def read(values: Sequence[float]) -> Placement | None:
        return assign_sets(problem, [(members, round(values[n])) for members, n in zip(sets, holds, strict=True)])

    return PlacementProgram(lp, read, is_exact=True)


def _mirrored_groups(problem: PlanningProblem, replicas: int) -> PlacementProgram | None:
    """Groups of ``R`` devices that all hold the same blocks: as few and as safe ones as have room for the model."""
    devices, kinds = problem.devices, kinds_of(problem.devices)
    if math.comb(len(kinds) + replicas - 1, replicas) > _MOST_TRIED:
        return None
    groups: list[tuple[int, ...]] = []
    for group in itertools.combinations_with_replacement(range(len(kinds)), replicas):
        named = [devices[kinds[k][0]].zone for k in group]
        zones = [zone for zone in named if zone is not None]
        if len(set(zones)) == len(zones) and all(group.count(k) <= len(kinds[k]) for k in group):
            groups.append(group)
        if len(groups) > MOST_SETS:
            return None
    lp = LinearProgram([], [], [], [], [], [])
    columns: list[int] = []
    for group in groups:
        gone = 1.0
        for k in group:
            device = devices[kinds[k][0]]
            lost = problem.zone_losses.get(device.zone, 0.0) if device.zone is not None else 0.0
            gone *= lost + (1 - lost) * device.loss
        columns.append(lp.column(-math.log1p(-min(gone, 1 - 1e-12)) + _TIE * 1e-6, problem.num_blocks))
    if not groups:
        return None
    rooms = [min(problem.room(devices[kinds[k][0]]) for k in group) for group in groups]
    lp.row({column: float(room) for column, room in zip(columns, rooms, strict=True)}, lower=problem.num_blocks)
    for k, kind in enumerate(kinds):
        members = {column: float(group.count(k)) for column, group in zip(columns, groups, strict=True) if k in group}
        if members:
            lp.row(members, upper=len(kind))

    def read(values: Sequence[float]) -> Placement | None:
        left = [list(kind) for kind in kinds]
        sets: list[tuple[frozenset[int], int]] = []
        blocks = problem.num_blocks
        for column, group, room in zip(columns, groups, rooms, strict=True):
            for _ in range(round(values[column])):
                sets.append((frozenset(left[k].pop(0) for k in group), min(room, blocks)))
                blocks -= sets[-1][1]
        return assign_sets(problem, sets) if blocks == 0 else None

    return PlacementProgram(lp, read, is_exact=False)


def _in_circle(
    problem: PlanningProblem, kinds: Sequence[Sequence[int]], n: Sequence[int]
) -> Callable[[Sequence[float]], Placement | None]:
    def read(values: Sequence[float]) -> Placement | None:
        counts = [0] * len(problem.devices)
        for kind, column in zip(kinds, n, strict=True):
            _spread(counts, kind, round(values[column]))
        return assign_in_circle(problem, tuple(counts))

    return read


def _spread(counts: list[int], devices: Sequence[int], blocks: int) -> None:
    """Share blocks out over devices, equal parts, the first ones one more."""
    for place, index in enumerate(devices):
        counts[index] = blocks // len(devices) + (place < blocks % len(devices))
