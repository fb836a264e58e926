"""Time limit of a hop: for how long the next holder of a request may be silent, and may keep the request at all."""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 4.0
"""Deadline in usual calls of the holder, plus usual transfers to it. 1/4: 8 reroutes instead of none with a slow peer;
x4: tail of a hang +47 %."""
MOST = 2.0
"""Limit up to which a slow link and earlier failures extend a deadline. It bounds the wait on an overloaded machine."""
KEEP = 0.5
"""Fraction of the remaining budget for which a holder may keep a request, if others could run it, and for which a
source waits for news of it. The other half is for the next attempt."""
AWAY = 1.0
"""Minimum time without news after which a source or a joiner counts a request as lost. 1/4: 15 needless reroutes;
x4: no effect."""


@dataclass(frozen=True)
class HopLimit:
    """Deadlines of the next holder. PROGRESS extends the deadline of a hop until the request was kept for too long.

    A holder sends PROGRESS while its engine call is within the limit that :func:`call_seconds` gives it, and while it
    waits for others. Times in seconds; "1/4" and "x4" as in ``limits.py``.
    """

    floor: float = 0.25
    """Minimum deadline. 1/4: 10 times the reroutes, mean +14 %; x4: tail of a hang x3.3."""
    transfer: float = 0.0
    """Additional time for the first transfer over a link; later ones get a multiple of the measured time."""

    def seconds(self, block_us: float, link_us: float, *, accepted: bool = True, failures: int = 0) -> float:
        """Return the seconds that a transfer may take without progress, until it is ``accepted`` and after.

        Each of the ``failures`` of a request doubles the time: on an overloaded machine, further copies of the same
        requests would only add to the load.
        """
        patience = max(self.floor, FACTOR * block_us / 1e6)
        wanted, most = patience + FACTOR * link_us / 1e6, MOST
        if not accepted:
            most += self.transfer
            if not link_us:
                wanted += self.transfer
        if failures:
            wanted *= 2.0 ** min(failures, 6)
        return max(patience, min(wanted, most))


def call_seconds(block_us: float, num_blocks: int) -> float:
    """Return the seconds of an engine call during which its peer reports progress."""
    return FACTOR * num_blocks * block_us / 1e6


def kept_too_long(sent_at: float, deadline: float, now: float) -> bool:
    """Return whether a holder has kept a request for its share of the budget."""
    return now - sent_at >= KEEP * (deadline - sent_at)


def news_by(now: float, end: float) -> float:
    """Return the time by which a source needs news of a request whose budget ends at ``end``."""
    return min(end, now + max(AWAY, KEEP * (end - now)))
