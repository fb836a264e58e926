"""Search for the placement that most likely keeps a holder of every block.

Blocks with the same holders are lost together, so only the different sets of holders count: a placement is a family of
sets with a number of blocks each, and the fewer and safer its sets, the better.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from ls_edge.runtime.fleet.planning.problem import Placement, PlanningProblem, assign_sets, zones_of

LEAST_GAIN = 1e-9
"""Smallest gain of a move, as a probability."""
Holders = frozenset[int]
"""Indices of the devices that hold the same blocks."""


class HolderExchange:
    """Local search from a placement: devices replace others in sets of holders as long as that helps.

    Moves are compared by the sum of the probabilities that all holders of a set are lost, which is cheap to update.
    """

    def __init__(self, problem: PlanningProblem, placement: Placement) -> None:
        self._problem = problem
        devices = problem.devices
        self._zones = {index: zone for zone, members in zones_of(devices).items() for index in members}
        zone_losses = [problem.zone_losses.get(device.zone or "", 0.0) for device in devices]
        self._risks = [lost + (1 - lost) * device.loss for lost, device in zip(zone_losses, devices, strict=True)]
        self._blocks: Counter[Holders] = Counter(
            frozenset(index for index, device in enumerate(devices) if block in placement[device.name])
            for block in range(problem.num_blocks)
        )
        self._free = [problem.room(device) - len(placement[device.name]) for device in devices]

    def run(self) -> Placement:
        """Make the best move until no move helps, and return the placement."""
        while moves := [(self._gain(move), move) for move in self._moves()]:
            gain, move = max(moves, key=lambda one: one[0])
            if gain <= LEAST_GAIN:
                break
            for holders, blocks in move.items():
                for index in holders:
                    self._free[index] -= blocks
                self._blocks[holders] += blocks
            self._blocks += Counter()  # drops sets without blocks
        return assign_sets(self._problem, tuple(self._blocks.items()))

    def _gain(self, move: Counter[Holders]) -> float:
        gain = 0.0
        for holders, blocks in move.items():
            before = self._blocks[holders]
            gain += ((before > 0) - (before + blocks > 0)) * math.prod(self._risks[index] for index in holders)
        return gain

    def _moves(self) -> Iterator[Counter[Holders]]:
        """Yield moves as changes of the number of blocks by set: a device replaces another, or two swap."""
        for holders, blocks in self._blocks.items():
            for out, into in itertools.product(holders, range(len(self._free))):
                moved = holders - {out} | {into}
                if into not in holders and self._free[into] and self._is_spread(moved):
                    yield Counter({moved: min(blocks, self._free[into]), holders: -min(blocks, self._free[into])})
        for (one, first), (two, second) in itertools.combinations(self._blocks.items(), 2):
            for out, into in itertools.product(one - two, two - one):
                moved, back = one - {out} | {into}, two - {into} | {out}
                if self._is_spread(moved) and self._is_spread(back):
                    change = Counter({moved: min(first, second)})
                    change.update({back: min(first, second)})
                    change.subtract({one: min(first, second), two: min(first, second)})
                    yield change

    def _is_spread(self, holders: Holders) -> bool:
        return len({self._zones[index] for index in holders}) == len(holders)
