"""Search for the placement that most likely keeps a holder of every block.

Blocks with the same holders are lost together, so only the different sets of holders count: a placement is a family of
sets with a number of blocks each, and the fewer and safer its sets, the better. A local search finds a good one, and an
exact search the best one for few devices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from ls_edge.runtime.fleet.planning.problem import Placement, PlanningProblem, assign_sets, zones_of
from ls_edge.runtime.fleet.planning.survival import loss_states

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
        """Make the best move as long as one helps, and return the placement."""
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
        """Yield moves as changes of the number of blocks by set: a device replaces another, or two are exchanged."""
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


class HolderSearch:
    """Branch and bound over all families of sets of holders, for few devices."""

    def __init__(self, problem: PlanningProblem, replicas: int, share: float) -> None:
        """Search for a placement that is whole with a higher probability than ``share``."""
        devices = problem.devices
        indices = range(len(devices))
        self._problem, self._share = problem, share
        self._rooms = [problem.room(device) for device in devices]
        zones = {index: zone for zone, members in zones_of(devices).items() for index in members}
        self._sets = [
            frozenset(members)
            for members in itertools.combinations((index for index in indices if self._rooms[index]), replicas)
            if len({zones[index] for index in members}) == replicas
        ]
        self._widest = max(min(self._rooms[index] for index in members) for members in self._sets)
        lost, self._chances = loss_states(problem, indices)
        self._lives = np.array([~lost[sorted(members)].all(axis=0) for members in self._sets])
        subsets = [frozenset(s) for size in indices for s in itertools.combinations(indices, size + 1)]
        self._subset_rooms = np.array([sum(self._rooms[index] for index in subset) for subset in subsets])
        self._overlaps = np.array([[len(subset & members) for subset in subsets] for members in self._sets])
        self._replicas = replicas
        self._best: Placement | None = None

    def run(self) -> Placement | None:
        """Return the best placement, or None if none is better than the given share."""
        overlap = np.full(len(self._subset_rooms), self._replicas)
        self._search([], np.arange(len(self._sets)), self._chances, overlap)
        return self._best

    def _search(self, used: list[int], left: np.ndarray, alive: np.ndarray, overlap: np.ndarray) -> None:
        """Try families of ``used`` sets with more sets of ``left``.

        ``alive`` are the probabilities of the states that all used sets survive. Each used set has at least ``overlap``
        members in each subset of the devices, so the room of the subset divided by that limits the blocks they hold.
        """
        covered = int((self._subset_rooms // np.maximum(overlap, 1))[overlap > 0].min()) if used else 0
        if covered >= self._problem.num_blocks:
            counts = self._divide([self._sets[number] for number in used], self._problem.num_blocks)
            if counts is not None:  # more sets only make it worse
                self._share = float(alive.sum())
                self._best = assign_sets(
                    self._problem, [(self._sets[number], count) for number, count in zip(used, counts, strict=True)]
                )
                return
        shares = self._lives[left] @ alive
        by_share = np.argsort(-shares)
        left, shares = left[by_share], shares[by_share]
        more = max(1, math.ceil((self._problem.num_blocks - covered) / self._widest))
        for place, number in enumerate(left):
            if place + more > len(left) or shares[place + more - 1] <= self._share * (1 + 1e-12):
                return
            after = np.minimum(overlap, self._overlaps[number])
            self._search([*used, int(number)], left[place + 1 :], alive * self._lives[number], after)

    def _divide(self, sets: Sequence[Holders], blocks: int) -> list[int] | None:
        """Return how many of the blocks each set holds, or None if there is no room for all."""
        if not sets or blocks == 0:
            return [0] * len(sets) if blocks == 0 else None
        rooms = self._rooms
        union = frozenset().union(*sets)
        if sum(rooms[index] for index in union) < blocks * self._replicas:
            return None
        for count in range(min(blocks, *(rooms[index] for index in sets[0])), -1, -1):
            for index in sets[0]:
                rooms[index] -= count
            rest = self._divide(sets[1:], blocks - count)
            for index in sets[0]:
                rooms[index] += count
            if rest is not None:
                return [count, *rest]
        return None
