"""Order of the steps of a change of the fleet in which every block keeps a holder. Pure.

Each peer that has to change does so in one step. Usually it drains and serves nothing until it is warm again; so a step
is safe if the other peers hold all blocks meanwhile. A peer that only follows changed entries of other peers does not
stop serving. Peers of different models do not work together; so in a change of the model a step is safe while
the peers of the previous model hold all of its blocks, or those that have switched hold all blocks of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

MAX_STATES = 5_000
"""Limit on the states that the search for a safe order visits; found within half a second on a laptop."""

D = TypeVar("D", str, bytes)
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
    holders: Mapping[str, Mapping[int, int]]
    """Number of holders of each part that is served now, while a peer changes and afterwards, the smaller one."""


def plan_change(
    now: Mapping[str, Collection[int]], goals: Mapping[str, Goal], other_model: Collection[str] = ()
) -> Plan:
    """Plan the change of a fleet; ``now`` has the parts that each peer serves, for those that can be reached.

    Peers without a goal are removed. Peers that cannot be reached have no step. ``other_model`` names the peers that
    serve another model than the wanted one.
    """
    serves = {name: frozenset(parts) for name, parts in now.items()}
    steps = [step for name in serves if (step := _step(name, serves[name], goals.get(name))) is not None]
    fleet = _Fleet.of(serves, steps, frozenset(other_model))
    outages: dict[str, frozenset[int]] = {}
    holders: dict[str, dict[int, int]] = {}
    order = _ordered(steps, fleet)
    for step in order:
        lacking = fleet.lacking(step)
        if lacking:
            outages[step.peer] = lacking
        during, fleet = fleet.during(step).holders(), fleet.after(step)
        after = fleet.holders()
        holders[step.peer] = {part: min(count, after.get(part, count)) for part, count in during.items()}
    return Plan(tuple(order), outages, holders)


def version_of(digest: D, announced: Collection[Collection[tuple[int, D]]]) -> int:
    """Return the version of a file: the newest one of the fleet if that is this file, or the next one.

    ``announced`` has the files of each peer.
    """
    known = [one for files in announced for one in files]
    newest = max((version for version, _ in known), default=0)
    return newest if newest and all(other == digest for version, other in known if version == newest) else newest + 1


@dataclass(frozen=True)
class _Fleet:
    """Parts that the peers serve, of the wanted model and of the previous one."""

    serves: Mapping[str, frozenset[int]]
    previous: frozenset[str]
    """Peers that still serve the previous model."""
    needed: frozenset[int]
    """Parts of the wanted model; those that are served now if the model stays."""
    needed_before: frozenset[int]
    """Parts of the previous model."""

    @classmethod
    def of(cls, serves: Mapping[str, frozenset[int]], steps: Sequence[Step], previous: frozenset[str]) -> _Fleet:
        before = frozenset[int]().union(*(serves[name] for name in previous))
        after = [step.after for step in steps] if previous else []
        current = frozenset[int]().union(*after, *(parts for name, parts in serves.items() if name not in previous))
        return cls(serves, previous, current, before)

    def during(self, step: Step) -> _Fleet:
        return replace(self, serves={**self.serves, step.peer: step.before if step.kind == "follow" else frozenset()})

    def after(self, step: Step) -> _Fleet:
        return replace(self, serves={**self.serves, step.peer: step.after}, previous=self.previous - {step.peer})

    def gap(self, *, wanted: bool) -> frozenset[int]:
        """Return the parts of the wanted model, or of the previous one, that no peer serves.

        Without a gap in the wanted model, sources use it.
        """
        parts = self.needed if wanted else self.needed_before
        return parts.difference(*(held for name, held in self.serves.items() if (name in self.previous) != wanted))

    def lacking(self, step: Step) -> frozenset[int]:
        """Return the parts without a holder during and after a step."""
        wanted = not self.gap(wanted=True) or not self.previous
        after = self.after(step)
        return self.during(step).gap(wanted=wanted) | after.gap(wanted=wanted or not after.gap(wanted=True))

    def holders(self) -> dict[int, int]:
        """Return the number of holders of each part of the model that sources use."""
        wanted = not self.gap(wanted=True) or not self.previous
        parts = self.needed if wanted else self.needed_before
        held = [parts for name, parts in self.serves.items() if (name in self.previous) != wanted]
        return {part: sum(part in one for one in held) for part in parts}


def _step(name: str, serves: frozenset[int], goal: Goal | None) -> Step | None:
    if goal is None:
        return Step(name, "remove", serves, frozenset())
    if goal.is_reached and serves == goal.blocks:
        return None
    if not serves:
        return Step(name, "add", serves, goal.blocks)
    return Step(name, "switch" if goal.pauses or serves != goal.blocks else "follow", serves, goal.blocks)


def _ordered(steps: Sequence[Step], fleet: _Fleet) -> list[Step]:
    """Return the steps in an order without an outage if the search finds one, else in one with small outages."""
    # Steps that lose nothing first, removals last; among equals the order of the file.
    ranked = sorted(steps, key=lambda step: (step.kind == "remove", len(step.lost)))
    found = _search(ranked, fleet)
    if found is None:
        found, left = [], list(ranked)
        while left:
            best = min(left, key=lambda step: len(fleet.lacking(step)))
            left.remove(best)
            found.append(best)
            fleet = fleet.after(best)
    return found


def _search(ranked: Sequence[Step], fleet: _Fleet) -> list[Step] | None:
    """Return an order of the steps in which no part lacks a holder, by depth-first search; None if there is none.

    Only the set of completed steps determines the served blocks, not their order, so each set is visited once.
    """
    seen: set[frozenset[str]] = set()
    order: list[Step] = []

    def visit(fleet: _Fleet, done: frozenset[str]) -> bool:
        if len(order) == len(ranked):
            return True
        if done in seen or len(seen) >= MAX_STATES:
            return False
        seen.add(done)
        for step in ranked:
            if step.peer not in done and not fleet.lacking(step):
                order.append(step)
                if visit(fleet.after(step), done | {step.peer}):
                    return True
                order.pop()
        return False

    return order if visit(fleet, frozenset()) else None
