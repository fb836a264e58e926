"""Measured times of links, and of what else varies: outliers are clamped, old measurements fade. Times in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW = 0.1
"""Seconds of transfers in flight on a slow link; heartbeats wait behind them."""
UNMEASURED_WINDOW = 2
"""Transfers in flight to a process whose link was never measured. 1: tail -9 % with a slow peer."""
CLAMP = 4.0
"""A measured time counts as at most this many times the usual one, or as the previous time if that was longer.
1/4: mean -11 %, tail -6 % with a slow peer, but one that became slow is noticed late."""
FADE = 20.0
"""Half-life of a measured transfer time, so that a link that was slow once is tried again."""
SMOOTH = 0.2
"""Weight of the newest transfer in its usual time."""
SMOOTH_SLOW = 0.1
"""Weight of the newest engine call, or of a track that took longer than usual: mostly a pause.
1/4: tail +9 %, x4: mean -15 %, tail -29 % with a slow peer, and every pause counts."""
SMOOTH_FAST = 0.3
"""Weight of a track that took less than usual."""


def clamped(took: float, usual: float, before: float) -> float:
    """Return a measured time with outliers clamped: one pause does not make a device slow, two in a row do.

    ``usual`` (0 if unknown) and ``before``, the previous measurement, have the unit of ``took``.
    """
    return min(took, max(CLAMP * usual, before)) if usual else took


def faded(usual: float, since: float) -> float:
    """Return a measured time faded by its age in seconds, so that a link that was slow once is tried again."""
    return usual * math.pow(0.5, since / FADE)


@dataclass(slots=True, eq=False)
class LinkTimes:
    """Measured times of a link."""

    usual_us: float = 0.0
    """Typical time from a transfer to its ACCEPT; 0 before the first."""
    usual_trip_us: float = 0.0
    """Typical time of a track without queue and engine."""
    _at: float = 0.0
    _last_us: float = 0.0
    _trip_at: float = 0.0

    def accepted_after(self, seconds: float, now: float) -> None:
        """Update the time of a transfer from a new measurement."""
        took = seconds * 1e6
        if self.usual_us:
            counted = clamped(took, max(self.usual_us, 1000.0), self._last_us)
            self.usual_us += (counted - self.usual_us) * SMOOTH
        else:
            self.usual_us = took
        self._at, self._last_us = now, took

    def track_took(self, seconds: float, inside_us: int, now: float) -> None:
        """Update the time of a trip from a track that took ``seconds``, ``inside_us`` of them in queue and engine."""
        trip = max(1.0, seconds * 1e6 - inside_us)
        weight = SMOOTH_FAST if trip < self.usual_trip_us else SMOOTH_SLOW
        self.usual_trip_us += (weight if self.usual_trip_us else 1.0) * (trip - self.usual_trip_us)
        self._trip_at = now

    def expected_us(self, now: float) -> int:
        """Return the expected time of a transfer; an old measurement fades."""
        return round(faded(self.usual_us, now - self._at)) if self.usual_us else 0

    def expected_trip_us(self, now: float) -> int:
        """Return the expected time of both transfers of a track; an old measurement fades.

        A measured trip is the better estimate: on a busy core, ACCEPT is read late, and transfers seem to take longer.
        """
        usual = self.usual_trip_us
        if not usual:
            return round(2 * self.usual_us)
        known = faded(usual, now - self._trip_at)
        return round(max(known, min(self.usual_us, usual)))

    def window(self, now: float) -> int:
        """Return how many transfers may be in flight; few on a slow link."""
        if not self.usual_us:
            return UNMEASURED_WINDOW
        window_us, link_us = WINDOW * 1e6, self.expected_us(now)
        return max(1 if link_us > 5 * window_us else UNMEASURED_WINDOW, int(window_us / max(1, link_us)))
