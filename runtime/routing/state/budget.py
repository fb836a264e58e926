"""Time limit of a request: when work on it has to end, so that its answer is in time. Times in seconds."""

from __future__ import annotations

WAY_BACK = 0.005
"""Time reserved for the hop back."""
CALL = 0.25
"""Limit on the fraction of a budget reserved for an engine call: a wrong measurement must not prevent one."""


def source_end(deadline: float, head_us: float) -> float:
    """Return the time at which a source answers with the tokens that it has, in time for the head."""
    return deadline - WAY_BACK - head_us / 1e6


def peer_end(deadline: float, arrived: float, call_us: float) -> float:
    """Return the time at which a peer sends tokens home that wait here, in time for the call that they need."""
    return deadline - WAY_BACK - min(call_us / 1e6, CALL * (deadline - arrived))
