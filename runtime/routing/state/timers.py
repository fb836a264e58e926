"""Times of the next check of requests, earliest first: for held requests, and for the requests of a source."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ls_edge.runtime.routing.state.held_request import INFINITY

_SPARE = 64
"""Number of entries, besides four per request, from which outdated entries are removed."""


class Timed(Protocol):
    """Request or other object that has a time of its next check."""

    number: int
    """Rank among objects that are due."""
    check_at: float
    """Time of the next check."""
    timer_at: float
    """Time of its earliest entry."""


T = TypeVar("T", bound=Timed)


@dataclass(eq=False)
class Timer:
    """A :class:`Timed` that refers to nothing: entries outlive requests for a while."""

    number: int
    check_at: float = INFINITY
    timer_at: float = INFINITY


@dataclass(eq=False)
class Timers(Generic[T]):
    """A heap with an entry for each request, at its time or earlier.

    Times mostly move to later, so an entry is renewed only when it comes up.
    """

    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of held requests, and of entries with the same time."""
    _heap: list[tuple[float, int, T]] = field(default_factory=list)

    def set(self, request: T, at: float) -> None:
        """Set the time of the next check of a request."""
        request.check_at = at
        if at < request.timer_at:
            request.timer_at = at
            heapq.heappush(self._heap, (at, next(self.numbers), request))

    def end(self, request: T, left: int) -> None:
        """Stop checking a request; ``left`` is the number of other requests."""
        request.check_at = INFINITY
        if len(self._heap) > 4 * left + _SPARE:
            kept = []
            for entry in self._heap:
                if entry[0] == entry[2].timer_at:
                    if entry[2].check_at < INFINITY:
                        kept.append(entry)
                    else:
                        entry[2].timer_at = INFINITY
            self._heap = kept
            heapq.heapify(self._heap)

    @property
    def next(self) -> float:
        """Earliest time of any request, or infinity."""
        heap = self._heap
        while heap:
            at, _, request = heap[0]
            if request.check_at == at == request.timer_at:
                return at
            heapq.heappop(heap)
            if at == request.timer_at:
                request.timer_at = INFINITY
                if request.check_at < INFINITY:
                    self.set(request, request.check_at)
        return INFINITY

    def due(self, now: float) -> list[T]:
        """Return the requests that are due, by their numbers."""
        due = []
        while self.next <= now:
            _, _, request = heapq.heappop(self._heap)
            request.timer_at = INFINITY
            due.append(request)
        for request in due:  # unless its time is changed, it comes up again
            self.set(request, request.check_at)
        return sorted(due, key=lambda request: request.number)
