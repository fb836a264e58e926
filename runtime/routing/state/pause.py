"""Time limit of a neighbor: for how long it is given no tokens, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PauseReason(Enum):
    """Reason to give a neighbor no tokens, with the lengths of the first and of the longest pause, in seconds.

    Each further pause for the same reason is twice as long.
    """

    SILENT = (0.3, 5.0)
    """It missed the deadline of a hop. A process that hangs looks idle, so its blocks count as unreachable."""
    UNWILLING = (0.04, 2.0)
    """It refused tokens or returned them unchanged. x4: tail +14 % where sends fail."""
    UNABLE = (0.02, 0.1)
    """It is cold or draining, or a message to it could not be sent. Its next STATE ends the pause."""
    LOSES_TOKENS = (5.0, 5.0)
    """Its links end each time that tokens are sent on them, as where large packets do not pass."""


@dataclass(slots=True, eq=False)
class Pause:
    """Pause of one neighbor: a reason and an end."""

    reason: PauseReason | None = None
    """Reason of the latest pause, also after its end until there is progress."""
    since: float = 0.0
    until: float = 0.0
    count: int = 0
    """Number of pauses in a row for this reason."""

    def begin(self, reason: PauseReason, now: float) -> None:
        """Begin a pause, unless one for another reason ends later."""
        count = self.count + 1 if reason is self.reason else 1
        first, most = reason.value
        until = now + min(most, first * 2.0 ** min(count - 1, 16))
        if reason is self.reason or until > self.until:
            self.reason, self.since, self.until, self.count = reason, now, until, count

    def end(self, *reasons: PauseReason) -> None:
        """End the pause, after progress; with ``reasons`` only if it has one of them."""
        if not reasons or self.reason in reasons:
            self.reason, self.until, self.count = None, 0.0, 0

    def excludes(self, now: float) -> bool:
        """Return whether the blocks of the neighbor count as unreachable."""
        return now < self.until and self.reason is PauseReason.SILENT
