"""Held requests whose source is gone."""

from __future__ import annotations

from ls_edge.runtime.routing.decisions import Decisions
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.held_request import INFINITY
from ls_edge.runtime.routing.state.turn import Turn


class Orphans:
    """Sources out of reach: their requests are dropped when no linked process has reached them for a while."""

    def __init__(self, turn: Turn, custody: Custody, decisions: Decisions) -> None:
        self._turn = turn
        self._decisions = decisions
        self._custody = custody
        self._drop_at: dict[str, float] = {}
        self.next = INFINITY
        """Time of the next :meth:`drop`."""

    def look_for(self) -> None:
        """Update which sources of held requests no linked process reaches.

        None is known to be out of reach while neighbors have links to further processes, which may reach it.
        """
        turn, neighbors = self._turn, self._turn.neighbors
        sources = {request.itinerary.source for request in self._custody.held.values()} - {turn.name}
        for name in sorted(sources):
            if name in neighbors.by_name or neighbors.reach(name):
                self._drop_at.pop(name, None)
            elif not any(map(neighbors.leads_beyond, neighbors)):
                self._drop_at.setdefault(name, turn.now + turn.limits.away_floor)
        self._drop_at = {name: at for name, at in self._drop_at.items() if name in sources}
        self.next = min(self._drop_at.values(), default=INFINITY)

    def drop(self) -> None:
        """End the requests of sources that have been out of reach for too long."""
        due = {name for name, at in self._drop_at.items() if at <= self._turn.now}
        self._drop_at = {name: at for name, at in self._drop_at.items() if name not in due}
        self.next = min(self._drop_at.values(), default=INFINITY)
        for request in [one for one in self._custody.held.values() if one.itinerary.source in due]:
            self._decisions.drop(request, self._turn.name, "its source went away")
