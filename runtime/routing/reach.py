"""Questions about the processes that could continue a request; none of them changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.held_request import HeldRequest
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.routing.state.turn import Turn


def wanted_blocks(turn: Turn, request: HeldRequest) -> tuple[int, ...]:
    """Return the blocks that may run now."""
    return policy_of(request.itinerary.policy).wanted(request.itinerary, turn.bands)


def candidates_for(turn: Turn, request: HeldRequest) -> list[Neighbor]:
    """Return the peers to which a request may be handed, with respect to its bundle."""
    candidates, demanded = turn.neighbors.candidates(), request.bundle_id
    return [n for n in candidates if n.bundle_id == demanded] if demanded else candidates


def without_avoided(turn: Turn, request: HeldRequest, candidates: Sequence[Neighbor]) -> Sequence[Neighbor]:
    """Return the candidates that this request may be offered to, without those to avoid if others can take it."""
    now, until = turn.now, request.avoid
    candidates = [n for n in candidates if until.get(n.name, 0.0) <= now]
    others = [n for n in candidates if n.name not in request.itinerary.avoid]
    return others if able_to_run(turn, request, others) else candidates


def able_to_run(turn: Turn, request: HeldRequest, candidates: Iterable[Neighbor]) -> list[Neighbor]:
    """Return the candidates with a block that may run now; if there are none, relays to such holders."""
    candidates, wanted = list(candidates), wanted_blocks(turn, request)
    holders = [n for n in candidates if not n.blocks.isdisjoint(wanted)]
    if holders or request.itinerary.relays:
        return holders
    return [n for n in candidates if not n.reach_blocks.isdisjoint(wanted)]


def has_only_holder(turn: Turn, request: HeldRequest, local: LocalNode) -> bool:
    """Return whether no other process could continue a request that its next holder has."""
    if request.returning:
        return request.downstream == request.itinerary.source
    others = [n for n in candidates_for(turn, request) if n.name != request.downstream]
    return local.blocks.isdisjoint(wanted_blocks(turn, request)) and not able_to_run(turn, request, others)
