"""Progress of a change of a fleet, as its pusher sees it, and the next instruction. Pure.

A change has phases: every peer gets its files (``send``), accepts the processes of the new file (``accept``), the
sources follow (``follow``), one peer after the other switches (``cover``, ``leave``, ``switch``), and the peers drop
what only the previous file has (``end``). A push of a bundle alone is a change without a new file.

Nothing is remembered: the phase follows from what the peers report, so a pusher that was interrupted continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ls_edge.runtime.change.planner import Plan

Phase = Literal["send", "accept", "follow", "cover", "leave", "switch", "end", "done"]


@dataclass(frozen=True)
class Seen:
    """Last report of a peer."""

    serves: frozenset[int]
    """Parts that others can use now."""
    model_id: str
    has_files: bool = True
    """Whether it has all files of the change, and their engines."""
    is_active: bool = True
    """Whether it serves by the new file and bundle."""
    accepts: bool = True
    """Whether it accepts the processes of the new file."""
    has_ended: bool = True
    """Whether it accepts no processes of other files."""
    late: frozenset[str] = frozenset()
    """Linked sources that have not announced the new file."""
    used_by: frozenset[str] = frozenset()
    """Linked processes that are not peers."""


@dataclass(frozen=True)
class Instruction:
    """Next action of a pusher: wait for ``peer``, or make it switch or end. Equal ones have the same phase and peer."""

    phase: Phase
    peer: str = ""
    names: frozenset[str] = field(default=frozenset(), compare=False)
    """Sources to wait for."""
    parts: frozenset[int] = field(default=frozenset(), compare=False)
    """Parts that would have no holder if the peer switched now."""


def next_instruction(
    plan: Plan,
    fleet: Mapping[str, Seen],
    changing: Collection[str],
    model_id: str,
    *,
    is_whole: bool = True,
    impatient: Collection[Phase] = (),
) -> Instruction:
    """Return the next instruction in the change of the peers ``changing`` to the model ``model_id``.

    A change that is not whole, because some peers are away, does not end. ``impatient`` has the phases in which the
    pusher no longer waits for the sources.
    """
    peers = {name: fleet[name] for name in changing}
    for name, seen in peers.items():
        if not seen.has_files:
            return Instruction("send", name)
    for name, seen in peers.items():
        if not seen.accepts and not seen.is_active:
            return Instruction("accept", name)
    late = frozenset[str]().union(*(seen.late for seen in peers.values()))
    if late and "follow" not in impatient:
        return Instruction("follow", names=late)
    order = {step.peer: index for index, step in enumerate(plan.steps)}
    for name in sorted(peers, key=lambda name: order.get(name, -1)):
        if not peers[name].is_active:
            return _switch(plan, fleet, name, model_id, impatient)
    for name, seen in peers.items():
        if is_whole and not seen.has_ended:
            return Instruction("end", name)
    return Instruction("done")


def _switch(
    plan: Plan, fleet: Mapping[str, Seen], name: str, model_id: str, impatient: Collection[Phase]
) -> Instruction:
    left = _left(plan, fleet, model_id)
    if name in left:
        users = frozenset[str]().union(*(fleet[one].used_by for one in left))
        return Instruction("switch" if "leave" in impatient or not users else "leave", name, users)
    kinds = {step.peer: step.kind for step in plan.steps}
    if kinds.get(name, "follow") == "follow":  # it does not stop serving
        return Instruction("switch", name)
    own = fleet[name]
    others = (seen.serves for other, seen in fleet.items() if other != name and seen.model_id == own.model_id)
    bare = own.serves - plan.outages.get(name, frozenset()) - frozenset[int]().union(*others)
    return Instruction("cover" if bare else "switch", name, parts=bare)


def _left(plan: Plan, fleet: Mapping[str, Seen], model_id: str) -> frozenset[str]:
    """Return the peers of the previous model, once others serve the whole next one."""
    served = [seen.serves for seen in fleet.values() if seen.model_id == model_id and seen.serves]
    wanted = frozenset[int]().union(*(step.after for step in plan.steps))
    is_next_whole = bool(served) and wanted <= frozenset[int]().union(*served)
    return frozenset(name for name, seen in fleet.items() if is_next_whole and seen.model_id not in ("", model_id))
