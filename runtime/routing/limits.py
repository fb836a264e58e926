"""All tuned numbers of routing. Times are in seconds; the comments say what each trades off, and what was measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

MOST_HOP_S = 2.0
"""Default of ``Limits.hop_most``."""


@dataclass(frozen=True)
class Limits:
    """Limits of the routing machines; times in seconds."""

    credits: int = 16
    """Requests that a peer holds: waiting, running or not yet accepted by the next holder."""
    custody: int = 64
    """Additional copies that a peer keeps for others."""
    hop_floor: float = 0.25
    """Minimum deadline of a hop without progress."""
    hop_factor: float = 4.0
    """Deadline of a hop in usual calls of its holder, as this process has seen them, plus usual transfers to it."""
    hop_most: float = MOST_HOP_S
    """Limit on what a slow link and earlier failures of a request add to that, in seconds."""
    call_factor: float = 10.0
    """Usual engine calls after which the engine of this process counts as stuck."""
    call_share: float = 0.25
    """Limit on the fraction of a budget reserved for an engine call, so that a wrong measurement cannot prevent it."""
    transfer: float = 0.0
    """Additional time for the first transfer over a link; later ones get a multiple of the measured time."""
    keep_share: float = 0.5
    """Fraction of the remaining budget for which a holder may keep tokens without a further block."""
    keep_most: float = 0.75
    """Fraction of the remaining budget for which a holder may keep tokens at all, if others could run them."""
    window: float = 0.1
    """Seconds of transfers in flight on a slow link; heartbeats wait behind them."""
    unmeasured_window: int = 2
    """Transfers in flight to a process whose link was never measured."""
    starved: float = 0.5
    """Seconds after which a peer accepts a request of a linked source, however full it is."""
    credit_wait: float = 0.25
    """Wait for the credit of a preferred holder."""
    look_again: float = 0.05
    """Interval at which tokens that wait for a credit are decided again, and PROGRESS is sent to their keeper."""
    pause: float = 0.1
    """Interval of what no event marks: offers after REFUSE ``cold`` or ``draining``, ways home, ends of suspicions."""
    skip_grace: float = 0.2
    """Wait of the source for an unreachable block before it skips it."""
    suspect_base: float = 0.3
    suspect_most: float = 5.0
    backoff_base: float = 0.02
    """Pause of offers after an unsendable transfer, or one that was refused or returned unchanged; these double it."""
    backoff_most: float = 2.0
    away_floor: float = 1.0
    """Minimum time without news after which the source starts a new branch."""
    progress_every: float = 0.08
    """Minimum time between two PROGRESS of a transfer."""
    cancel_every: float = 0.2
    """Time for which the source collects answered requests for one CANCEL."""
    state_every: float = 0.1
    """Interval of STATE to neighbours that use this peer."""
    load_every: float = 1.0
    """Interval of STATE to others while only the load changes; one that used nothing for this long is no user."""
    way_back: float = 0.005
    """Time reserved for the hop back; the source adds the usual time of its head."""
    chain: float = 0.1
    """Limit on an engine call of several blocks in sequence; a single block always runs."""
    drain: float = 4.0
    """Time for which a draining peer tries to hand on everything that it holds."""
    tombstones: int = 100_000
    hops: int = 64
    """Transfers of a branch beyond four for each block, after which its tokens go home."""
    not_finite: int = 3
    """Requests in a row without finite outputs after which a block counts as failed."""
    clamp: float = 4.0
    """A measured time counts as at most this many times the usual one, or as the one before if that was longer."""
    fade: float = 20.0
    """Half-life of a measured transfer time, so that a link that was slow once is tried again."""
    smooth: float = 0.2
    """Weight of the newest transfer, or block of another process, in the usual time of one."""
    smooth_slow: float = 0.1
    """Weight of the newest engine call, or of a track that took longer than usual: mostly a pause."""
    smooth_fast: float = 0.3
    """Weight of the newest call during a wave, or of a track that took less than usual."""

    @classmethod
    def for_frames(cls, seconds: float) -> Limits:
        """Return limits for tokens that take ``seconds`` on the slowest link that counts as alive."""
        return cls(transfer=min(seconds, MOST_HOP_S))

    def with_credits(self, most: int) -> Limits:
        """Return limits with ``most`` credits and four times as many copies."""
        return dataclasses.replace(self, credits=most, custody=4 * most)

    def most_hops(self, blocks: int) -> int:
        """Return the transfers of a branch before its tokens go home, so that they cannot circulate forever."""
        return self.hops + 4 * blocks

    def fair_share(self, sources: int) -> int:
        """Return the credits of a peer that each of ``sources`` may hold."""
        return max(1, self.credits // max(1, sources))

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
