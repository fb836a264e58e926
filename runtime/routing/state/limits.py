"""Limits of the routing machines. Times are in seconds.

Other numbers are constants next to their rule; ``hop.py``, ``budget.py`` and ``pause.py`` have those of the time limits
of requests and neighbors. The comments say what each trades off, and what was measured: "1/4" and "x4" say what a
quarter and four times a number do in simulation to the mean and the 95th percentile ("tail") of the time of an answer;
less than 6 % is noise. Two peers hold each half of 8 blocks of 4 ms +- 25 %, with 8 requests in flight. A peer is
killed, hangs, is suspended, drains or is ten times slower; links are slow or cut; 5 % of what is sent fails; 48
requests share 4 credits a peer; blocks lose their only holder.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ls_edge.runtime.routing.state.hop import MOST, HopLimit

LOOK_AGAIN = 0.05
"""Interval at which tokens that wait for a credit are decided again, and PROGRESS is sent to their keeper.
x4: tail +6 % where sends fail."""
LOOK = 0.1
"""Interval of checks that no event triggers: ways home, ends of pauses."""


@dataclass(frozen=True)
class Limits:
    """Limits that depend on the fleet or the device."""

    credits: int = 16
    """Requests that a peer holds: waiting, running or not yet accepted by the next holder. With 48 in flight,
    1/4: tail +17 %; x4: no effect, but peers hold up to 48 instead of 34."""
    custody: int = 64
    """Additional copies that a peer keeps for others: a bound of its memory. 1/4, x4: no effect with 64 in flight."""
    hop: HopLimit = field(default=HopLimit())
    chain: float = 0.1
    """Limit on an engine call of several blocks in sequence; a single block always runs. 1/4: mean -15 %, tail -23 %
    with a slow peer, at more calls."""

    @classmethod
    def of(cls, num_credits: int = 16, transfer_s: float = 0.0) -> Limits:
        """Return limits with these credits and four times as many copies.

        ``transfer_s`` is the time that tokens take on the slowest link that counts as alive.
        """
        return cls(num_credits, 4 * num_credits, HopLimit(transfer=min(transfer_s, MOST)))

    @property
    def guaranteed(self) -> int:
        """Requests that a peer takes from a linked source even if others hold all of its credits."""
        return max(1, self.credits // 8)

    @property
    def reserved(self) -> int:
        """Credits of a peer that only transfers from peers may use.

        Without them two peers that need one another fill up with new work and neither can hand anything on.
        """
        return self.credits // 2
