"""Simulated time: a queue of actions."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Simulated time in seconds, starting at 0; of the actions that are due at the same time, the oldest runs first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._counter = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Schedule an action ``delay`` seconds from now."""
        heapq.heappush(self._heap, (self.now + delay, next(self._counter), action))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            at, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            action()
        self.now = end
