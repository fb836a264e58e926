"""Ended requests of a source: late answers are counted, and peers are told to stop."""

from __future__ import annotations

from ls_edge.runtime.protocol.messages import MAX_BUDGET_US, Cancel, RequestId
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest
from ls_edge.runtime.routing.state.hop import AWAY

MAX_REMEMBERED = 4096
"""Limit on ended requests that are remembered to count late answers, and on those that had some."""
CANCEL_EVERY = 0.2
"""Time for which the source collects answered requests for one CANCEL. 1/4: 4 times the messages; x4: 3 % more engine
calls where sends fail."""
CANCEL_AT_MOST = 256
"""Limit on the requests in one CANCEL."""


class EndedRequests:
    """Ended requests of a source."""

    def __init__(self) -> None:
        self.late_answers = 0
        self.duplicates: dict[int, int] = {}
        """Number of late answers to each of the latest requests that had some."""
        self.cancel_at = INFINITY
        self.numbers: dict[RequestId, int] = {}
        """Number of each request that is remembered."""
        self._untold: dict[RequestId, float] = {}
        """Deadlines of ended requests that peers have not been told about."""

    def add(self, copy: HeldRequest, number: int, now: float, *, soon: bool) -> None:
        """Remember a request, and tell the peers immediately, or with ``soon`` together with others."""
        self.numbers[copy.request] = number
        if len(self.numbers) > MAX_REMEMBERED:
            del self.numbers[next(iter(self.numbers))]
        self._untold[copy.request] = copy.deadline
        has_room = len(self._untold) < CANCEL_AT_MOST
        self.cancel_at = min(self.cancel_at, now + (CANCEL_EVERY if soon and has_room else 0.0))

    def count_late(self, number: int) -> None:
        """Count a late answer to the request ``number``."""
        self.late_answers += 1
        self.duplicates[number] = self.duplicates.pop(number, 0) + 1
        if len(self.duplicates) > MAX_REMEMBERED:
            del self.duplicates[next(iter(self.duplicates))]

    def pop_cancels(self, now: float) -> list[Cancel]:
        """Return the CANCEL that is due: several if more requests have ended in a turn than one may name."""
        until = max(now, *self._untold.values()) + AWAY
        budget, ended = min(MAX_BUDGET_US, round((until - now) * 1e6)), tuple(self._untold)
        self._untold.clear()
        self.cancel_at = INFINITY
        return [Cancel(ended[at : at + CANCEL_AT_MOST], budget) for at in range(0, len(ended), CANCEL_AT_MOST)]
