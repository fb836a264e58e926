"""Ended requests of a source: late answers are counted, and peers are told to stop."""

from __future__ import annotations

from ls_edge.runtime.protocol.messages import MAX_BUDGET_US, Cancel, RequestId
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest
from ls_edge.runtime.routing.state.hop import AWAY

MAX_REMEMBERED = 4096
"""Limit on ended requests that are remembered to count late answers."""
CANCEL_EVERY = 0.2
"""Time for which the source collects answered requests for one CANCEL. 1/4: 4 times the messages; x4: 3 % more engine
calls where sends fail."""
CANCEL_AT_MOST = 256
"""Limit on the requests in one CANCEL."""


class EndedRequests:
    """Ended requests of a source."""

    def __init__(self) -> None:
        self.late_answers = 0
        self.cancel_at = INFINITY
        self.remembered: dict[RequestId, None] = {}
        self._untold: dict[RequestId, float] = {}
        """Deadlines of ended requests that peers have not been told about."""

    def add(self, copy: HeldRequest, now: float, *, soon: bool) -> None:
        """Remember a request, and tell the peers immediately, or with ``soon`` together with others."""
        self.remembered[copy.request] = None
        if len(self.remembered) > MAX_REMEMBERED:
            del self.remembered[next(iter(self.remembered))]
        self._untold[copy.request] = copy.deadline
        has_room = len(self._untold) < CANCEL_AT_MOST
        self.cancel_at = min(self.cancel_at, now + (CANCEL_EVERY if soon and has_room else 0.0))

    def pop_cancels(self, now: float) -> list[Cancel]:
        """Return the CANCEL that is due: several if more requests have ended in a turn than one may name."""
        until = max(now, *self._untold.values()) + AWAY
        budget, ended = min(MAX_BUDGET_US, round((until - now) * 1e6)), tuple(self._untold)
        self._untold.clear()
        self.cancel_at = INFINITY
        return [Cancel(ended[at : at + CANCEL_AT_MOST], budget) for at in range(0, len(ended), CANCEL_AT_MOST)]
