"""All tuned numbers of routing. Times are in seconds; the comments say what each trades off, and what was measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the routing machines; times in seconds.

    "1/4" and "x4" say what a quarter and four times a number do in simulation to the mean and the 95th percentile
    ("tail") of the time of an answer; less than 6 % is noise. Two peers hold each half of 8 blocks of 4 ms +- 25 %,
    with 8 requests in flight. A peer is killed, hangs, is suspended, drains or is ten times slower; links are slow or
    cut; 5 % of what is sent fails; 48 requests share 4 credits a peer; blocks lose their only holder. "No effect" means
    none in these courses: the number bounds rarer or longer faults.
    """

    credits: int = 16
    """Requests that a peer holds: waiting, running or not yet accepted by the next holder. With 48 in flight,
    1/4: tail +17 %; x4: no effect, but peers hold up to 48 instead of 34."""
    custody: int = 64
    """Additional copies that a peer keeps for others: a bound of its memory. 1/4, x4: no effect with 64 in flight."""
    hop_floor: float = 0.25
    """Minimum deadline of a hop without progress. 1/4: 10 times the reroutes, mean +14 %; x4: tail of a hang x3.3."""
    hop_factor: float = 4.0
    """Deadline of a hop in usual calls of its holder, as this process has seen them, plus usual transfers to it.
    1/4: 8 reroutes instead of none with a slow peer; x4: tail of a hang +47 %."""
    hop_most: float = 2.0
    """Limit, in seconds, on what a slow link and earlier failures of a request add to a deadline. No effect."""
    call_factor: float = 10.0
    """Usual engine calls after which the engine of this process counts as stuck. No effect."""
    call_share: float = 0.25
    """Limit on the fraction of a budget reserved for an engine call, so that a wrong measurement cannot prevent it.
    No effect."""
    transfer: float = 0.0
    """Additional time for the first transfer over a link; later ones get a multiple of the measured time. No effect."""
    keep_share: float = 0.5
    """Fraction of the remaining budget for which a holder may keep tokens without a further block, unless PROGRESS
    shows that its queue and blocks explain more. With budgets of 1 s and a slow peer, 1/4: 30 reroutes in 480 requests
    instead of 19, tail -65 %; x2: 10 reroutes, tail -15 %. With all peers slow, 33 and 440 of 480 are answered instead
    of 392. With budgets of 5 s and a slow peer, 1/4: 13 reroutes; x2: no effect."""
    keep_most: float = 0.75
    """Fraction of the remaining budget for which a holder may keep tokens at all, if others could run them. With
    budgets of 1 s and a slow peer, 1/4: 35 reroutes instead of 19, tail -56 %; 1: no effect. With all peers slow, 37
    and 458 of 480 are answered instead of 392. It bounds a holder that claims one block after another."""
    window: float = 0.1
    """Seconds of transfers in flight on a slow link; heartbeats wait behind them. No effect on links of 20 ms."""
    unmeasured_window: int = 2
    """Transfers in flight to a process whose link was never measured. 1: tail -9 % with a slow peer."""
    starved: float = 0.5
    """Seconds after which a peer accepts a request of a linked source, however full it is. While a member floods peers
    in the name of the source, 1/4: tail -59 %, with more beyond the credits; x4: 4 of its 60 requests fail."""
    credit_wait: float = 0.25
    """Wait for the credit of a preferred holder. 1/4: no effect; a longer wait keeps the order but costs time."""
    look_again: float = 0.05
    """Interval at which tokens that wait for a credit are decided again, and PROGRESS is sent to their keeper.
    x4: tail +6 % where sends fail."""
    pause: float = 0.1
    """Interval of checks that no event triggers: offers after REFUSE ``cold`` or ``draining``, ways home, ends of
    suspicions. No effect."""
    skip_grace: float = 0.2
    """Wait of the source for an unreachable block before it skips it. With a holder back after 0.4 s, 1/4: 15 % more
    skips, mean -6 %; x4: no skips, mean +30 %, tail +74 %."""
    suspect_base: float = 0.3
    suspect_most: float = 5.0
    """First and longest suspicion; each further one doubles the time. No effect, since progress ends one."""
    backoff_base: float = 0.02
    """Pause of offers after an unsendable transfer, or one that was refused or returned unchanged; these double it.
    1/4: no effect; x4: tail +14 % where sends fail."""
    backoff_most: float = 2.0
    """Limit on that pause. No effect."""
    away_floor: float = 1.0
    """Minimum time without news after which the source starts a new branch. 1/4: 15 needless
    reroutes; x4: no effect."""
    progress_every: float = 0.08
    """Minimum time between two PROGRESS of a transfer. 1/4: no effect, at 6 times the messages and more;
    x4: 8 needless reroutes in 60 requests with a slow peer."""
    cancel_every: float = 0.2
    """Time for which the source collects answered requests for one CANCEL. 1/4: 4 times the messages;
    x4: 3 % more engine calls where sends fail, tail +11 % with a liar that gives out copies."""
    state_every: float = 0.2
    """Interval of STATE to neighbors that use this peer, unless it is sent earlier with another message.
    1/4: tail -18 % with a slow peer, at twice the messages; x4: mean +7 % where sends fail."""
    state_least: float = 0.05
    """Minimum time before a STATE that is sent with another message, or that reports changed links or reachable blocks.
    1/4: tail -10 %, at twice the messages; x4: mean +23 %, tail +41 % with a slow peer."""
    load_every: float = 1.0
    """Interval of STATE to other neighbors while only the load changes. A neighbor that used nothing for this long is
    not a user. No effect on answers; each STATE costs a message."""
    way_back: float = 0.005
    """Time reserved for the hop back; the source adds the usual time of its head. No effect."""
    chain: float = 0.1
    """Limit on an engine call of several blocks in sequence; a single block always runs. 1/4: mean -15 %, tail -23 %
    with a slow peer, at more calls."""
    drain: float = 4.0
    """Time for which a draining peer tries to hand on everything that it holds; after half of it, it begins nothing.
    With 12 requests of 8 blocks of 50 ms, 1/4: 8 of them are rerouted instead of 4; x4: none, it leaves after 3.2 s."""
    tombstones: int = 100_000
    """Ended requests whose late tokens a peer refuses: 21 MB, and 1,600 requests a second with budgets of a minute.
    16: no effect with 8 in flight."""
    hops: int = 64
    """Transfers of a branch beyond four for each block, after which its tokens go home; honest courses need up to 23.
    Where 3 % of the engine calls fail, 1/16: mean -26 %; x4: mean +54 %, tail x5.5, since tokens go round."""
    not_finite: int = 3
    """Requests in a row without finite outputs after which a block counts as failed. Where 3 % of the calls end so,
    1: 59 of 120 requests fail instead of 8; x4: no effect, but a block that never works is found later."""
    failures: int = 3
    """Failed calls in a row after which a block counts as failed: memory that other programs used may become free."""
    holders_not_finite: int = 2
    """Peers that must find values of a request not finite before it fails: one may lie, but each runs it again."""
    engine_calls: int = 2
    """Calls that an engine has: the running one and the next. With turns of 1 ms and calls of 2.4 ms, 1 answers 17 %
    less; 3 answer no more than 2, and close batches that others may join."""
    wave_gain: float = 0.95
    """Maximum expected time of a split wave, as a fraction of the time alone. The error of the expectation may exceed a
    smaller gain. With calls that vary by 20 %, 0.8 takes up to 43 % longer; 0.95 and 1 differ by less than 3 %."""
    clamp: float = 4.0
    """A measured time counts as at most this many times the usual one, or as the previous time if that was longer.
    1/4: mean -11 %, tail -6 % with a slow peer, but one that became slow is noticed late."""
    fade: float = 20.0
    """Half-life of a measured transfer time, so that a link that was slow once is tried again. No effect."""
    smooth: float = 0.2
    """Weight of the newest transfer, or block of another process, in the usual time of one. No effect."""
    smooth_slow: float = 0.1
    """Weight of the newest engine call, or of a track that took longer than usual: mostly a pause.
    1/4: tail +9 %, x4: mean -15 %, tail -29 % with a slow peer, and every pause counts."""
    smooth_fast: float = 0.3
    """Weight of the newest call during a wave, or of a track that took less than usual. No effect."""

    @classmethod
    def for_frames(cls, seconds: float) -> Limits:
        """Return limits for tokens that take ``seconds`` on the slowest link that counts as alive."""
        return cls(transfer=min(seconds, cls.hop_most))

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
