"""Order of the steps from the state of a fleet to another one, so that every block keeps a holder: pure.

Each peer that has to change does so in one step. Usually it drains and serves nothing until it is warm again; so a step
is safe if the other peers hold all blocks meanwhile. A peer that only has to learn of changed entries of other peers
does not stop serving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_STATES = 20_000
"""Limit on the states that the search for a safe order visits; found within half a second on a laptop."""

Kind = Literal["add", "switch", "follow", "remove"]


@dataclass(frozen=True)
class Step:
    """Change of one peer."""

    peer: str
    kind: Kind
    """``add`` a peer that serves nothing yet, ``switch`` to other blocks, settings or bundle, ``follow`` changes of
    other peers without a pause, or ``remove`` a peer."""
    before: frozenset[int]
    """Parts that it serves now."""
    after: frozenset[int]
    """Parts that it serves after the step."""

    @property
    def gained(self) -> frozenset[int]:
        """Parts that it serves in addition."""
        return self.after - self.before

    @property
    def lost(self) -> frozenset[int]:
        """Parts that it no longer serves."""
        return self.before - self.after


@dataclass(frozen=True)
class Goal:
    """State that a peer should reach."""

    blocks: frozenset[int]
    pauses: bool
    """Whether it has to stop serving for a moment to reach it, even with the same blocks."""
    is_reached: bool
    """Whether it runs the wanted file and bundle already."""


@dataclass(frozen=True)
class Plan:
    """Steps in a good order, and the parts that have no holder during each of them."""

    steps: tuple[Step, ...]
    outages: Mapping[str, frozenset[int]]
    """Parts without a holder while a peer switches, by its name; empty if every part keeps a holder."""
    holders: Mapping[int, int]
    """Smallest number of holders of each part during the change, for parts that are served now."""


def plan_change(now: Mapping[str, Collection[int]], goals: Mapping[str, Goal]) -> Plan:
    """Plan the change of a fleet; ``now`` has the parts that each peer serves, for those that can be reached.

    Peers without a goal are removed. Peers that cannot be reached have no step.
    """
    serves = {name: frozenset(parts) for name, parts in now.items()}
    steps = [step for name in serves if (step := _step(name, serves[name], goals.get(name))) is not None]
    order = _ordered(steps, serves)
    outages: dict[str, frozenset[int]] = {}
    held: frozenset[int] = frozenset().union(*serves.values())
    holders = {part: sum(part in parts for parts in serves.values()) for part in held}
    for step in order:
        during = {**serves, step.peer: _during(step)}
        lacking = held - frozenset().union(*during.values())
        if lacking:
            outages[step.peer] = lacking
        serves[step.peer] = step.after
        for state in (during, serves):
            for part in held:
                holders[part] = min(holders[part], sum(part in parts for parts in state.values()))
    return Plan(tuple(order), outages, holders)


def _step(name: str, serves: frozenset[int], goal: Goal | None) -> Step | None:
    if goal is None:
        return Step(name, "remove", serves, frozenset())
    if goal.is_reached and serves == goal.blocks:
        return None
    if not serves:
        return Step(name, "add", serves, goal.blocks)
    return Step(name, "switch" if goal.pauses or serves != goal.blocks else "follow", serves, goal.blocks)


def _during(step: Step) -> frozenset[int]:
    """Return the parts that a peer serves during its step."""
    return step.before if step.kind == "follow" else frozenset()


def _ordered(steps: Sequence[Step], serves: Mapping[str, frozenset[int]]) -> list[Step]:
    """Return the steps in an order without an outage if the search finds one, else in one with small outages."""
    held: frozenset[int] = frozenset().union(*serves.values())

    def lacking(done: frozenset[int], index: int) -> int:
        """Return the number of parts without a holder during and after a step."""
        parts = {**serves, **{steps[i].peer: steps[i].after for i in done}}
        parts[steps[index].peer] = _during(steps[index])
        during = len(held - frozenset().union(*parts.values()))
        parts[steps[index].peer] = steps[index].after
        return during + len(held - frozenset().union(*parts.values()))

    # Steps that lose nothing first, removals last; among equals the order of the file.
    ranks = sorted(range(len(steps)), key=lambda i: (steps[i].kind == "remove", len(steps[i].lost)))
    found = _search(ranks, lacking)
    if found is None:
        found, left = [], list(ranks)
        while left:
            best = min(left, key=lambda i: lacking(frozenset(found or ()), i))
            left.remove(best)
            found.append(best)
    return [steps[index] for index in found]


def _search(ranks: Sequence[int], lacking: Callable[[frozenset[int], int], int]) -> list[int] | None:
    """Return an order of the steps in which no part lacks a holder, by depth-first search; None if there is none.

    What is served depends on the steps that are done, and not on their order, so each set is visited once.
    """
    seen: set[frozenset[int]] = set()
    order: list[int] = []

    def visit(done: frozenset[int]) -> bool:
        if len(order) == len(ranks):
            return True
        if done in seen or len(seen) >= MAX_STATES:
            return False
        seen.add(done)
        for index in ranks:
            if index not in done and not lacking(done, index):
                order.append(index)
                if visit(done | {index}):
                    return True
                order.pop()
        return False

    return order if visit(frozenset()) else None
