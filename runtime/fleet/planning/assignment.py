"""Turns the number of blocks that each device holds into a placement, in a circle that keeps holders of a block apart.

Blocks are taken in the order of the bands, so a device gets neighbors in that order and a request visits it once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ls_edge.runtime.fleet.planning.problem import Count, Placement, PlanningProblem, zones_of


def assign_in_circle(problem: PlanningProblem, counts: Count, devices: Sequence[int] | None = None) -> Placement:
    """Give each device its number of blocks, one stretch after the other, around the circle of all blocks.

    With ``sum(counts) = R B`` each block gets ``R`` holders. The devices of a zone come one after the other, and hold
    at most ``B`` blocks together, so a zone holds no block twice. ``devices`` is another order of the devices.
    """
    order = problem.band_order
    placement: dict[str, tuple[int, ...]] = {device.name: () for device in problem.devices}
    place = 0
    place_of = {index: number for number, index in enumerate(devices or ())}
    for members in sorted(zones_of(problem.devices).values(), key=lambda members: place_of.get(members[0], 0)):
        for index in members:
            stretch = [order[(place + step) % len(order)] for step in range(counts[index])]
            placement[problem.devices[index].name] = tuple(sorted(stretch))
            place += counts[index]
    return placement


def assign_route(problem: PlanningProblem, counts: Count, replicas: int) -> Placement | None:
    """Give the devices of a route their stretches, and find ``replicas - 1`` further holders for each block.

    ``counts`` add up to the number of blocks. Return None if the remaining memory does not allow the others.
    """
    first = assign_in_circle(problem, counts)
    if replicas == 1:
        return first
    held = [set(first[device.name]) for device in problem.devices]
    zone_of = {index: zone for zone, devices in enumerate(zones_of(problem.devices).values()) for index in devices}
    if not _add_holders(problem, held, zone_of, replicas):
        return None
    return {device.name: tuple(sorted(blocks)) for device, blocks in zip(problem.devices, held, strict=True)}


def assign_sets(problem: PlanningProblem, sets: Sequence[tuple[frozenset[int], int]]) -> Placement:
    """Give each set of devices its number of blocks, stretch after stretch; the numbers add up to all blocks."""
    held: list[list[int]] = [[] for _ in problem.devices]
    blocks = iter(problem.band_order)
    for devices, count in sets:
        for _ in range(count):
            block = next(blocks)
            for index in devices:
                held[index].append(block)
    return {device.name: tuple(sorted(given)) for device, given in zip(problem.devices, held, strict=True)}


def _add_holders(problem: PlanningProblem, held: list[set[int]], zone_of: dict[int, int], replicas: int) -> bool:
    """Add holders until each block has ``replicas``, by augmenting paths: a full device hands a block on."""
    devices = problem.devices
    fixed = [set(blocks) for blocks in held]

    def zones(block: int) -> set[int]:
        return {zone_of[index] for index, blocks in enumerate(held) if block in blocks}

    def give(block: int, tried: set[int]) -> bool:
        taken = zones(block)
        free = [index for index in range(len(devices)) if zone_of[index] not in taken and index not in tried]
        for index in sorted(free, key=lambda index: len(held[index]) / max(1, problem.room(devices[index]))):
            tried.add(index)
            if len(held[index]) < problem.room(devices[index]):
                held[index].add(block)
                return True
            for other in sorted(held[index] - fixed[index] - {block}):
                held[index].discard(other)
                held[index].add(block)
                if give(other, tried):
                    return True
                held[index].discard(block)
                held[index].add(other)
        return False

    for _ in range(replicas - 1):
        for block in problem.band_order:
            if not give(block, set()):
                return False
    return True
