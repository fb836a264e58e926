"""Requests that have ended: a source counts late answers and tells its peers, peers refuse late tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from ls_edge.runtime.protocol.messages import MAX_BUDGET_US, Cancel, RequestId
from ls_edge.runtime.routing.held_request import INFINITY, HeldRequest
from ls_edge.runtime.routing.limits import Limits

MAX_REMEMBERED = 4096
"""Limit on ended requests that are remembered, to count late answers."""
CANCEL_AT_MOST = 256
"""Limit on the requests in one CANCEL."""


class EndedRequests:
    """Ended requests of a source."""

    def __init__(self, limits: Limits) -> None:
        self.duplicates: Counter[int] = Counter()
        """Number of late answers by request."""
        self.cancel_at = INFINITY
        self._limits = limits
        self._numbers: dict[RequestId, int] = {}
        self._untold: dict[RequestId, float] = {}
        """Ended requests that peers have not been told about, and their deadlines."""

    def add(self, copy: HeldRequest, number: int, now: float, *, soon: bool) -> None:
        """Remember a request, and inform the peers immediately unless ``soon`` suffices."""
        self._numbers[copy.request] = number
        if len(self._numbers) > MAX_REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        self._untold[copy.request] = copy.deadline
        if len(self._untold) >= CANCEL_AT_MOST:
            soon = False
        self.cancel_at = min(self.cancel_at, now + (self._limits.cancel_every if soon else 0.0))

    def number(self, request: RequestId) -> int | None:
        """Return the number of an ended request; None if it is not remembered, or never was one."""
        return self._numbers.get(request)

    def pop_cancel(self, now: float) -> Cancel:
        """Return the CANCEL that is due."""
        budget = min(MAX_BUDGET_US, max(0, round((max(self._untold.values()) - now) * 1e6)))
        cancel = Cancel(tuple(self._untold), budget)
        self._untold.clear()
        self.cancel_at = INFINITY
        return cancel


Key = tuple[str, RequestId]
"""The source that cancelled a request, and the request."""


class Tombstones:
    """The newest ``most`` ended requests, each until its own time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: OrderedDict[Key, float] = OrderedDict()
        """Time until which each is kept, the newest last."""

    def __len__(self) -> int:
        return len(self._until)

    def holds(self, key: Key, now: float) -> bool:
        """Return whether a request has ended and its budget is not over."""
        return self._until.get(key, now) > now

    def add(self, keys: Iterable[Key], until: float, now: float) -> None:
        """Keep requests until a time; one that is kept already is renewed."""
        for key in keys:
            self._until[key] = until
            self._until.move_to_end(key)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Forget the oldest ones, as long as there are too many or the time of the oldest is over."""
        while self._until and (len(self._until) > self._most or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)
