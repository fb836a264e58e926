"""Requests that have ended: late tokens of them are refused until their budget is over."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ls_edge.runtime.protocol.messages import RequestId

Key = tuple[str, RequestId]
"""The source that cancelled a request, and the request."""


class Tombstones:
    """A bounded set of ended requests, the newest ``most`` of them, each until its own time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: dict[Key, float] = {}
        self._ends: list[tuple[float, Key]] = []
        """Heap of the ends of all entries, with outdated ones."""

    def __len__(self) -> int:
        return len(self._until)

    @property
    def entries(self) -> int:
        """Number of entries in the heap of ends, with outdated ones."""
        return len(self._ends)

    def holds(self, key: Key, now: float) -> bool:
        """Return whether a request has ended and its budget is not over."""
        return self._until.get(key, now) > now

    def add(self, keys: Iterable[Key], until: float, now: float) -> None:
        """Keep requests until a time; one that is kept already is renewed."""
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = until
            heapq.heappush(self._ends, (until, key))
        self.forget(now)

    def forget(self, now: float) -> None:
        """Forget the oldest entries beyond the bound and those whose time is over."""
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            if self._until.get(key) == until:
                del self._until[key]
        if len(self._ends) > 2 * self._most:
            self._ends = [(until, key) for key, until in self._until.items()]
            heapq.heapify(self._ends)
