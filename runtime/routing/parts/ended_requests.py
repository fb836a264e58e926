"""Requests that have ended: a source counts late answers and tells its peers, peers refuse and drop what is late."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from ls_edge.runtime.protocol.messages import MAX_BUDGET_US, Cancel, RequestId
from ls_edge.runtime.routing.custody import Custody
from ls_edge.runtime.routing.events import Note, NoteKind
from ls_edge.runtime.routing.held_request import INFINITY, HeldRequest
from ls_edge.runtime.routing.limits import Limits

MAX_REMEMBERED = 4096
"""Limit on ended requests that are remembered, to count late answers."""
CANCEL_AT_MOST = 256
"""Limit on the requests in one CANCEL."""
MAX_SOURCES_NEAR = 1024
"""Limit on the sources remembered as near; work of a forgotten one stays until its budget ends."""


class EndedRequests:
    """Ended requests of a source."""

    def __init__(self, limits: Limits) -> None:
        self.duplicates: Counter[int] = Counter()
        """Number of late answers by request."""
        self.cancel_at = INFINITY
        self._limits = limits
        self.numbers: dict[RequestId, int] = {}
        """Numbers of the ended requests that are remembered."""
        self._untold: dict[RequestId, float] = {}
        """Ended requests that peers have not been told about, and their deadlines."""

    def add(self, copy: HeldRequest, number: int, now: float, *, soon: bool) -> None:
        """Remember a request, and inform the peers immediately unless ``soon`` suffices."""
        self.numbers[copy.request] = number
        if len(self.numbers) > MAX_REMEMBERED:
            del self.numbers[next(iter(self.numbers))]
        self._untold[copy.request] = copy.deadline
        has_room = len(self._untold) < CANCEL_AT_MOST
        self.cancel_at = min(self.cancel_at, now + (self._limits.cancel_every if soon and has_room else 0.0))

    def pop_cancel(self, now: float) -> Cancel:
        """Return the CANCEL that is due."""
        budget = min(MAX_BUDGET_US, max(0, round((max(self._untold.values()) - now) * 1e6)))
        cancel = Cancel(tuple(self._untold), budget)
        self._untold.clear()
        self.cancel_at = INFINITY
        return cancel


class Tombstones:
    """The newest ``most`` ended requests, each until its own time, and with the source that cancelled it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.until: OrderedDict[tuple[str, RequestId], float] = OrderedDict()
        """Time until which each is kept, the newest last."""

    def holds(self, key: tuple[str, RequestId], now: float) -> bool:
        """Return whether a request has ended and its budget is not over."""
        return self.until.get(key, now) > now

    def add(self, keys: Iterable[tuple[str, RequestId]], until: float, now: float) -> None:
        """Keep requests until a time; one that is kept already is renewed."""
        for key in keys:
            self.until[key] = until
            self.until.move_to_end(key)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Forget the oldest ones, as long as there are too many or the time of the oldest is over."""
        while self.until and (len(self.until) > self._most or next(iter(self.until.values())) <= now):
            self.until.popitem(last=False)


class Orphans:
    """Sources of held work that have gone: it is dropped when no linked process has reached them for a while."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody
        self._drop_at: dict[str, float] = {}
        self.next = INFINITY
        """Time of the next :meth:`drop`."""
        self._once_near: dict[str, None] = {}
        """Sources to which this process or a neighbour had a link."""

    def look_for(self) -> None:
        """Look which sources of held work no linked process reaches any more.

        A source that was never that near counts only if no process is beyond the neighbours.
        """
        custody, neighbours = self._custody, self._custody.neighbours
        sources = {request.itinerary.source for request in custody.held.values()} - {custody.name}
        for name in sorted(sources):
            if name in neighbours.by_name or neighbours.reach(name):
                self._drop_at.pop(name, None)
                self._once_near[name] = None
                if len(self._once_near) > MAX_SOURCES_NEAR:
                    del self._once_near[next(iter(self._once_near))]
            elif name in self._once_near or not any(map(neighbours.leads_beyond, neighbours)):
                self._drop_at.setdefault(name, custody.now + custody.limits.away_floor)
        self._drop_at = {name: at for name, at in self._drop_at.items() if name in sources}
        self.next = min(self._drop_at.values(), default=INFINITY)

    def drop(self) -> None:
        """End the held work of the sources whose time has come, source by source."""
        custody = self._custody
        due = [name for name, at in self._drop_at.items() if at <= custody.now]
        self._drop_at = {name: at for name, at in self._drop_at.items() if at > custody.now}
        self.next = min(self._drop_at.values(), default=INFINITY)
        for request in [
            request for name in due for request in custody.held.values() if request.itinerary.source == name
        ]:
            note = Note(NoteKind.DROPPED, request.itinerary.source, request.request, "its source went away")
            custody.instructions.append(note)
            custody.end(request, note.why)
