"""Deadlines of open requests, the next one first."""

from __future__ import annotations

import heapq

SPARE_ENTRIES = 256
"""Entries of removed requests that are kept; more means rarer and longer clean-ups."""


class Deadlines:
    """A heap from which requests can be removed; times are those of :func:`time.monotonic`, in seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._open: dict[int, float] = {}

    def __len__(self) -> int:
        """Return the number of entries in memory, including removed ones that were not cleaned up."""
        return len(self._heap)

    @property
    def next(self) -> float:
        """The earliest deadline, possibly of a removed request; infinity where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def add(self, request: int, deadline: float) -> None:
        """Add a request that is not there."""
        self._open[request] = deadline
        heapq.heappush(self._heap, (deadline, request))

    def remove(self, request: int) -> None:
        """Remove a request, if it is there."""
        self._open.pop(request, None)
        if len(self._heap) > 2 * len(self._open) + SPARE_ENTRIES:
            self._heap = [(deadline, request) for request, deadline in self._open.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> list[int]:
        """Remove and return the requests whose deadline is not after ``now``."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, request = heapq.heappop(self._heap)
            if self._open.pop(request, None) is not None:
                due.append(request)
        return due
