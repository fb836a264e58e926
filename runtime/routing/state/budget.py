"""Time limit of a request: when work on it has to end, so that its answer is in time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetLimit:
    """Time that is reserved at the end of a budget; times in seconds."""

    way_back: float = 0.005
    """Time reserved for the hop back."""
    call: float = 0.25
    """Limit on the fraction of a budget reserved for an engine call: a wrong measurement must not prevent one."""

    def source_end(self, deadline: float, head_us: float) -> float:
        """Return the time at which a source answers with the tokens that it has, in time for the head."""
        return deadline - self.way_back - head_us / 1e6

    def peer_end(self, deadline: float, arrived: float, call_us: float) -> float:
        """Return the time at which a peer sends tokens home that wait here, in time for the call that they need."""
        return deadline - self.way_back - min(call_us / 1e6, self.call * (deadline - arrived))
