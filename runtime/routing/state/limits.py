"""Tuned numbers of routing. Times are in seconds; the comments say what each trades off, and what was measured.

The time limits of requests and neighbors have files of their own: ``hop.py``, ``budget.py``, ``pause.py``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from ls_edge.runtime.routing.state.budget import BudgetLimit
from ls_edge.runtime.routing.state.hop import HopLimit


@dataclass(frozen=True)
class Limits:
    """Limits of the routing machines; times in seconds.

    "1/4" and "x4" say what a quarter and four times a number do in simulation to the mean and the 95th percentile
    ("tail") of the time of an answer; less than 6 % is noise. Two peers hold each half of 8 blocks of 4 ms +- 25 %,
    with 8 requests in flight. A peer is killed, hangs, is suspended, drains or is ten times slower; links are slow or
    cut; 5 % of what is sent fails; 48 requests share 4 credits a peer; blocks lose their only holder.
    """

    credits: int = 16
    """Requests that a peer holds: waiting, running or not yet accepted by the next holder. With 48 in flight,
    1/4: tail +17 %; x4: no effect, but peers hold up to 48 instead of 34."""
    custody: int = 64
    """Additional copies that a peer keeps for others: a bound of its memory. 1/4, x4: no effect with 64 in flight."""
    hop: HopLimit = field(default=HopLimit())
    budget: BudgetLimit = field(default=BudgetLimit())
    window: float = 0.1
    """Seconds of transfers in flight on a slow link; heartbeats wait behind them."""
    unmeasured_window: int = 2
    """Transfers in flight to a process whose link was never measured. 1: tail -9 % with a slow peer."""
    credit_wait: float = 0.25
    """Wait for the credit of a preferred holder. 1/4: no effect; a longer wait keeps the order but costs time."""
    look_again: float = 0.05
    """Interval at which tokens that wait for a credit are decided again, and PROGRESS is sent to their keeper.
    x4: tail +6 % where sends fail."""
    look: float = 0.1
    """Interval of checks that no event triggers: ways home, ends of pauses."""
    skip_grace: float = 0.2
    """Wait of the source for an unreachable block before it skips it. With a holder back after 0.4 s, 1/4: 15 % more
    skips, mean -6 %; x4: no skips, mean +30 %, tail +74 %."""
    progress_every: float = 0.08
    """Minimum time between two PROGRESS of a transfer. 1/4: no effect, at 6 times the messages and more;
    x4: 8 needless reroutes in 60 requests with a slow peer."""
    cancel_every: float = 0.2
    """Time for which the source collects answered requests for one CANCEL. 1/4: 4 times the messages;
    x4: 3 % more engine calls where sends fail."""
    state_every: float = 0.2
    """Interval of STATE to neighbors that use this peer, unless it is sent earlier with another message.
    1/4: tail -18 % with a slow peer, at twice the messages; x4: mean +7 % where sends fail."""
    state_least: float = 0.05
    """Minimum time before a STATE that is sent with another message, or that reports changed links or reachable blocks.
    1/4: tail -10 %, at twice the messages; x4: mean +23 %, tail +41 % with a slow peer."""
    load_every: float = 1.0
    """Interval of STATE to other neighbors while only the load changes. A neighbor that used nothing for this long is
    not a user."""
    chain: float = 0.1
    """Limit on an engine call of several blocks in sequence; a single block always runs. 1/4: mean -15 %, tail -23 %
    with a slow peer, at more calls."""
    drain: float = 4.0
    """Time for which a draining peer tries to hand on everything that it holds; after half of it, it begins nothing.
    With 12 requests of 8 blocks of 50 ms, 1/4: 8 of them are rerouted instead of 4; x4: none, it leaves after 3.2 s."""
    tombstones: int = 100_000
    """Ended requests whose late tokens a peer refuses: 21 MB, and 1,600 requests a second with budgets of a minute."""
    hops: int = 64
    """Transfers of a branch beyond four for each block, after which its tokens go home. Where 3 % of the engine calls
    fail, 1/16: mean -26 %; x4: mean +54 %, tail x5.5, since tokens go round."""
    not_finite: int = 3
    """Requests in a row without finite outputs after which a block counts as failed. Where 3 % of the calls end so,
    1: 59 of 120 requests fail instead of 8; x4: no effect, but a block that never works is found later."""
    failures: int = 3
    """Failed calls in a row after which a block counts as failed: memory that other programs used may become free."""
    holders_not_finite: int = 2
    """Peers that must find values of a request not finite before it fails."""
    engine_calls: int = 2
    """Calls that an engine has: the running one and the next. With turns of 1 ms and calls of 2.4 ms, 1 answers 17 %
    less; 3 answer no more than 2, and close batches that others may join."""
    call_factor: float = 10.0
    """Usual engine calls after which the engine of this process counts as stuck."""
    wave_gain: float = 0.95
    """Maximum expected time of a split wave, as a fraction of the time alone. The error of the expectation may exceed a
    smaller gain. With calls that vary by 20 %, 0.8 takes up to 43 % longer; 0.95 and 1 differ by less than 3 %."""
    clamp: float = 4.0
    """A measured time counts as at most this many times the usual one, or as the previous time if that was longer.
    1/4: mean -11 %, tail -6 % with a slow peer, but one that became slow is noticed late."""
    fade: float = 20.0
    """Half-life of a measured transfer time, so that a link that was slow once is tried again."""
    smooth: float = 0.2
    """Weight of the newest transfer in its usual time."""
    smooth_slow: float = 0.1
    """Weight of the newest engine call, or of a track that took longer than usual: mostly a pause.
    1/4: tail +9 %, x4: mean -15 %, tail -29 % with a slow peer, and every pause counts."""
    smooth_fast: float = 0.3
    """Weight of the newest call during a wave, or of a track that took less than usual."""

    @classmethod
    def for_frames(cls, seconds: float) -> Limits:
        """Return limits for tokens that take ``seconds`` on the slowest link that counts as alive."""
        return cls(hop=HopLimit(transfer=min(seconds, HopLimit.most)))

    def with_credits(self, most: int) -> Limits:
        """Return limits with ``most`` credits and four times as many copies."""
        return dataclasses.replace(self, credits=most, custody=4 * most)

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
