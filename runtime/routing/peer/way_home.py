"""Way home of tokens that a peer cannot continue with: rules of a decision."""

from __future__ import annotations

from typing import NamedTuple

from ls_edge.runtime.routing.decisions import Case, Hold
from ls_edge.runtime.routing.policies.policy import SendTo
from ls_edge.runtime.routing.state.hop import AWAY
from ls_edge.runtime.routing.state.limits import LOOK, LOOK_AGAIN


class Drop(NamedTuple):
    """End a request and make the previous holder drop its copy, too."""

    why: str
    holder: str = ""
    """Process that has the tokens now, or knows that nobody needs them; by default this one."""


def to_its_source(case: Case) -> SendTo | Hold | None:
    """Send tokens home that return, or wait while the link to their source is full."""
    source = case.itinerary.source
    n = case.turn.neighbors.get(source) if case.request.returning else None
    if n is None:
        return None
    if n.window_left > 0:
        return SendTo(source)
    return None if n.loses_tokens else Hold((source,), case.now + LOOK_AGAIN)


def through_others(case: Case) -> SendTo | Drop | Hold | None:
    """Send tokens home through a neighbor; drop them if there has been none for a while: their source has a copy."""
    request, since = case.request, case.request.waiting_since
    if not request.returning:
        return None
    way = _way(case)
    if way:
        return SendTo(way, relay=True)
    is_over = since is not None and case.now - since >= AWAY
    if is_over and not case.turn.neighbors.reach(case.itinerary.source):
        return Drop("no way home")
    return Hold((), case.now + LOOK)


def _way(case: Case) -> str:
    """Return a neighbor that reaches the source, or else the earliest holder that is a neighbor, or "".

    Each holder was a neighbor of the previous one, so every such step leads closer to the source. A later holder may be
    a dead end, so tokens wait for a process that has refused them for the moment.
    """
    source, itinerary, until = case.itinerary.source, case.itinerary, case.request.avoid
    near = {n.name: n for n in case.turn.neighbors.candidates() if n.name not in itinerary.relays}
    ways = [name for name, n in near.items() if n.state and source in n.state.reaches]
    ways = ways or [visit.holder for visit in itinerary.visits if visit.holder in near][:1]
    usable = [name for name in ways if until.get(name, 0.0) <= case.now]
    return case.request.upstream if case.request.upstream in usable else min(usable, default="")
