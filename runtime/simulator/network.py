"""Simulated time, and arrivals of messages over simulated links."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class Network:
    """Links between all processes; times in seconds."""

    latency: float
    """Transfer time of a message without a payload."""
    transfers: Callable[[str, str], float] | None
    """Transfer time of tokens by sender and receiver; None for :attr:`latency`."""
    wire: Mapping[str, float]
    """Time for which tokens occupy the link of a process, separately for each direction."""
    _sends_until: dict[str, float] = field(default_factory=dict)
    _receives_until: dict[str, float] = field(default_factory=dict)
    _arrives_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """Arrival of the latest payload by sender and receiver, which later messages do not overtake."""

    def arrival(self, now: float, sender: str, to: str, size: float) -> float:
        """Return the arrival time of a message that is sent now.

        A payload waits until the links of both ends are free. No message overtakes an earlier payload. ``size`` is the
        size of the payload relative to tokens, 0 without a payload.
        """
        at = now + self.latency
        if self.transfers is None:
            return at
        before = self._arrives_at.get((sender, to), 0.0)
        if size:
            start = max(now, self._sends_until.get(sender, 0.0))
            wires = self.wire.get(sender, 0.0), self.wire.get(to, 0.0)
            self._sends_until[sender] = start + size * wires[0]
            taken = self.transfers(sender, to) - (1 - size) * max(wires)
            at = max(start + max(0.0, taken), self._receives_until.get(to, 0.0) + size * wires[1])
            self._receives_until[to] = at
            self._arrives_at[sender, to] = at = max(at, before)
        return at if at > before else before


class Clock:
    """Simulated time in seconds, from 0; actions due at the same time run in the order they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._counter = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Schedule an action ``delay`` seconds from now."""
        self._put(self.now + delay, next(self._counter), action)

    def _put(self, at: float, number: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, number, action))

    def run_next(self) -> None:
        """Advance to the next action and run it."""
        self.now, _, action = heapq.heappop(self._heap)
        action()

    def run(self, seconds: float) -> None:
        """Advance by ``seconds``, running all actions that become due."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.run_next()
        self.now = end
