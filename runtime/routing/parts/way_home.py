"""The way home of tokens that a peer cannot continue with."""

from __future__ import annotations

import msgspec

from ls_edge.runtime.protocol.messages import Release
from ls_edge.runtime.routing.custody import Custody
from ls_edge.runtime.routing.decisions import Decisions
from ls_edge.runtime.routing.events import Send
from ls_edge.runtime.routing.held_request import HeldRequest
from ls_edge.runtime.routing.interfaces import Host


class WayHome:
    """Sends tokens back to their source, by relays where there is no link to it."""

    def __init__(self, machine: Host, custody: Custody, decisions: Decisions) -> None:
        self._machine = machine
        self._custody = custody
        self._decisions = decisions

    def begin(self, request: HeldRequest, reason: str) -> None:
        """Begin to send a waiting request back to its source."""
        request.returning = reason
        # Relays on the way here may relay them on the way home as well.
        request.itinerary = msgspec.structs.replace(request.itinerary, relays=())
        self.send(request)

    def send(self, request: HeldRequest) -> None:
        """Offer the tokens to the source, to a neighbour that reaches it, or back the way they came."""
        machine, custody, source = self._machine, self._custody, request.itinerary.source
        n = machine.neighbours.get(source)
        if n is not None and n.window_left > 0:
            custody.offer(request, source, request.itinerary)
            return
        if n is not None:  # a slow link; what waits for it must not be taken for lost
            self._decisions.send_progress([request])
            custody.wait_for(request, (source,), machine.now + machine.limits.look_again)
            return
        way = self._way_home(request)
        if way:
            relays = (*request.itinerary.relays, machine.name)
            custody.offer(request, way, msgspec.structs.replace(request.itinerary, relays=relays))
        else:
            custody.wait(request, "no way home", machine.now + machine.limits.pause)

    def refused(self, request: HeldRequest, sender: str) -> None:
        """Believe that a request is cancelled if that is said by the only way home, which could as well drop it."""
        neighbours = self._machine.neighbours.by_name
        if request.itinerary.source in neighbours or self._way_home(request):
            return
        if request.upstream is not None and request.upstream in neighbours:
            self._machine.instructions.append(Send(request.upstream, Release(request.transfer, sender)))
        self._custody.end(request, f"cancelled, says {sender}, the only way home")

    def _way_home(self, request: HeldRequest) -> str:
        """Return a neighbour that reaches the source, or else the earliest reachable holder of the tokens, or "".

        The one before that was its neighbour, so each such step is one nearer to the source.
        """
        source, relays, now = request.itinerary.source, request.itinerary.relays, self._machine.now
        usable = {
            n.name: n
            for n in self._machine.neighbours.candidates()
            if n.name not in relays and request.avoid.get(n.name, 0.0) <= now
        }
        ways = [name for name, n in usable.items() if n.state and source in n.state.reaches]
        if ways:
            return request.upstream if request.upstream in ways else min(ways)
        return next((visit.holder for visit in request.itinerary.visits if visit.holder in usable), "")
