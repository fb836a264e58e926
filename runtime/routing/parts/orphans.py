"""Work of sources that have gone: dropped when no linked process has reached its source for a while."""

from __future__ import annotations

from collections.abc import Iterable

from ls_edge.runtime.routing.held_request import INFINITY, HeldRequest
from ls_edge.runtime.routing.neighbours import Neighbours

MAX_SOURCES_NEAR = 1024
"""Limit on the sources remembered as near; work of a forgotten one stays until its budget ends."""


class Orphans:
    """Sources of held work that are out of reach."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._drop_at: dict[str, float] = {}
        self.next = INFINITY
        """Time of the next :meth:`pop_due`."""
        self._once_near: dict[str, None] = {}
        """Sources to which this process or a neighbour had a link."""

    def look_for(self, sources: set[str]) -> None:
        """Look which sources of held work no linked process reaches any more.

        A source that was never that near counts only if no process is beyond the neighbours.
        """
        neighbours = self._neighbours
        for name in sorted(sources):
            if name in neighbours.by_name or neighbours.reach(name):
                self._drop_at.pop(name, None)
                self._once_near[name] = None
                if len(self._once_near) > MAX_SOURCES_NEAR:
                    del self._once_near[next(iter(self._once_near))]
            elif name in self._once_near or not any(map(neighbours.leads_beyond, neighbours)):
                self._drop_at.setdefault(name, neighbours.now + neighbours.limits.away_floor)
        for name in self._drop_at.keys() - sources:
            del self._drop_at[name]
        self._set_next()

    def pop_due(self, held: Iterable[HeldRequest]) -> list[HeldRequest]:
        """Return the held work that is dropped now, source by source."""
        due = [name for name, at in self._drop_at.items() if at <= self._neighbours.now]
        for name in due:
            del self._drop_at[name]
        self._set_next()
        held = list(held)
        return [request for name in due for request in held if request.itinerary.source == name]

    def _set_next(self) -> None:
        self.next = min(self._drop_at.values(), default=INFINITY)
