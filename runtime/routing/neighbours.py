"""The neighbours of a process: linked processes, their last STATE, and suspicions.

A process is under suspicion after a hop to it passed its deadline. It gets nothing for a while that doubles with each
strike, and is trusted again as soon as it shows progress: a process that hangs looks idle, and must not attract work by
it. Nor must one that refuses or returns whatever it is given: it is passed over for a while that doubles, too.

Values that a process reports of itself are limited, since they may be wrong or forged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from ls_edge.runtime.protocol.messages import MINOR_OF_DEMANDS, Hello, State
from ls_edge.runtime.routing.candidates import Candidate

TRIP_HALVES = 20.0
"""Half-life of a measured transfer time, in seconds: a shorter one tries slow links again sooner, and more often."""
MOST_BLOCK_US = 60_000_000
"""Limit on the announced engine call of another process: a minute."""
MOST_WAIT_US = 600_000_000
"""Limit on the announced queue of another process: the longest budget."""
_CLAMP = 4.0
"""A measured time counts as at most this many times the usual one, or as the one before if that was longer."""
TRANSFERS_PER_DEADLINE = 4.0
"""Usual transfers added to a hop's deadline, since PROGRESS may have to wait for tokens on the link."""
_SMOOTH_LINK = 0.2
"""Weight of the newest transfer in the usual time of one: larger follows a changing link, smaller ignores outliers."""
_SMOOTH_CALL = 0.2
"""Weight of the newest engine call that was seen in the usual time of one: bounds how fast a slow holder earns time."""
_SMOOTH_SHORTER, _SMOOTH_LONGER = 0.3, 0.1
"""Weights of the newest trip of a track where it was shorter or longer than usual: long ones are mostly pauses."""
MOST_HOP_S = 2.0
"""Default of ``Limits.hop_most``."""
UNMEASURED_WINDOW = 2
"""Transfers on their way to a process whose link was never measured."""


_as_set = functools.lru_cache(1024)(frozenset[int])
"""Sets of the tuples of blocks, which are mostly the same."""


def clamped(took: float, usual: float, before: float) -> float:
    """Return a measured time with outliers limited: one pause does not make a device slow, two long times in a row do.

    ``usual`` and ``before`` (the measurement before this one) are in the unit of ``took``.
    """
    return min(took, max(_CLAMP * usual, before)) if usual else took


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
    """Deadline of a hop in usual calls of its holder, as this process has seen them."""
    hop_most: float = MOST_HOP_S
    """Limit on what a slow link and earlier failures of a request add to that, in seconds."""
    call_factor: float = 10.0
    """Usual engine calls after which the engine of this process counts as stuck."""
    transfer: float = 0.0
    """Additional time for the first transfer over a link; later ones get a multiple of the measured time."""
    keep_share: float = 0.5
    """Fraction of the remaining budget for which a holder may keep tokens without a further block."""
    keep_most: float = 0.75
    """Fraction of the remaining budget for which a holder may keep tokens at all, if others could run them."""
    window: float = 0.1
    """Seconds of transfers in flight on a slow link; heartbeats wait behind them."""
    starved: float = 0.5
    """Seconds after which a peer accepts a request of a linked source, however full it is."""
    credit_wait: float = 0.25
    """Wait for the credit of a preferred holder."""
    look_again: float = 0.05
    """Interval at which tokens that wait for a credit are decided again, and PROGRESS is sent to their keeper."""
    skip_grace: float = 0.2
    """Wait of the source for an unreachable block before it skips it."""
    suspect_base: float = 0.3
    suspect_most: float = 5.0
    backoff_base: float = 0.02
    """First pause of offers to a process that refused or returned everything; doubles each time."""
    backoff_most: float = 2.0
    away_floor: float = 1.0
    """Minimum time without news after which the source starts a new branch."""
    progress_every: float = 0.08
    """Minimum time between two PROGRESS of a transfer."""
    cancel_every: float = 0.2
    """Time for which the source collects answered requests for one CANCEL."""
    way_back: float = 0.005
    """Time reserved for the hop back; the source adds the usual time of its head."""
    chain: float = 0.1
    """Limit on an engine call of several blocks in sequence; a single block always runs."""
    drain: float = 4.0
    """Time for which a draining peer tries to hand on everything that it holds."""
    tombstones: int = 100_000
    hops: int = 64
    """Transfers of a branch beyond four for each block, after which its tokens go home."""

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


class Change(Enum):
    """Effect of a STATE on waiting requests."""

    NONE = "none"
    LOAD = "load"
    """Change of its load, or of the sources that it reaches."""
    REACH = "reach"
    """Change of its availability, or of the blocks that it reaches."""


@dataclass(slots=True)
class Neighbour:
    """A linked process: its description, its last STATE, and measurements."""

    hello: Hello
    state: State | None = None
    offers: int = 0
    """Transfers on their way to it that it has neither accepted nor refused."""
    strikes: int = 0
    suspected_until: float = 0.0
    suspected_at: float = 0.0
    """Time at which it last came under suspicion."""
    refused_until: float = 0.0
    backoff_until: float = 0.0
    """End of the pause of offers after it refused or returned a transfer; STATE does not end it."""
    backoffs: int = 0
    """Transfers refused or returned unchanged since the last progress."""
    link_at: float = 0.0
    """Time of the last measured transfer to it."""
    last_link_us: float = 0.0
    """Duration of that transfer."""
    calls_when_suspected: int = -1
    link_us: float = 0.0
    """Usual time of a transfer to it until it is accepted."""
    call_us: float = 0.0
    """Usual time of one of its blocks, as this process has seen it; 0 before the first."""
    trip_us: float = 0.0
    """Usual time of a track of it beyond queue and engine."""
    trip_at: float = 0.0
    """Time of the last measured track."""
    _expected_link: tuple[float, int] = (-1.0, 0)
    """Latest time and result of :meth:`expected_link_us`, since a decision needs it several times."""
    state_at: float = 0.0
    """Time of its last STATE."""
    reported_credits: int = 0
    """Credits in its latest STATE, ACCEPT or REFUSE."""
    was_available: bool = False
    """It could be handed tokens at its last STATE, and has not been suspected since."""
    moved_at: float = 0.0
    """Time of its last finished engine call or accepted transfer."""
    quiet: tuple[Hello, State, Candidate] | None = None
    """The candidate that it is while nothing but a new HELLO or STATE or a transfer changes it, and made of which."""

    @property
    def name(self) -> str:
        """Its name in ``peers.yaml``."""
        return self.hello.name

    def available(self, now: float) -> bool:
        """Whether it may be handed tokens at all."""
        state = self.state
        return (
            now >= self.suspected_until and state is not None and state.warm and not state.draining and not state.stuck
        )

    @property
    def block_us(self) -> int:
        """Usual time of one of its engine calls, at most :data:`MOST_BLOCK_US`."""
        return 0 if self.state is None else min(self.state.block_us, MOST_BLOCK_US)

    def credits(self, now: float, limits: Limits) -> int:
        """Return the transfers that it would accept now beyond those in flight; only a few on a slow link."""
        if self.state is None or now < self.refused_until or now < self.backoff_until:
            return 0
        return max(0, min(self.reported_credits, self._window(now, limits)) - self.offers)

    def window_left(self, now: float, limits: Limits) -> int:
        """Return the number of further transfers that may be in flight to it; only a few on a slow link."""
        return self._window(now, limits) - self.offers

    def _window(self, now: float, limits: Limits) -> int:
        if not self.link_us:
            return UNMEASURED_WINDOW
        link = self.expected_link_us(now)
        most = int(limits.window * 1e6 / max(1, link))
        return max(1 if link > 5 * limits.window * 1e6 else UNMEASURED_WINDOW, most)

    def accepted_after(self, seconds: float, now: float) -> None:
        """Learn from a transfer."""
        took = seconds * 1e6
        counted = clamped(took, max(self.link_us, 1000.0), self.last_link_us) if self.link_us else took
        self.link_us += (counted - self.link_us) * (_SMOOTH_LINK if self.link_us else 1.0)
        self.link_at, self.last_link_us = now, took
        self._expected_link = (now, round(self.link_us))
        self.moved_at = now

    def ran_after(self, seconds: float, limits: Limits) -> None:
        """Learn how long it took to run a block; slow processes earn trust in several steps."""
        took = min(seconds * 1e6, _CLAMP * self.call_us if self.call_us else limits.hop_floor * 1e6)
        self.call_us += (took - self.call_us) * (_SMOOTH_CALL if self.call_us else 1.0)

    def expected_link_us(self, now: float) -> int:
        """Return the expected time of a transfer; an old measurement fades, so that a link is tried again."""
        at, expected = self._expected_link
        if at != now:
            expected = round(self.link_us * math.pow(0.5, (now - self.link_at) / TRIP_HALVES)) if self.link_us else 0
            self._expected_link = (now, expected)
        return expected

    def back_off(self, now: float, limits: Limits) -> None:
        """Count a refused or returned transfer, and pause offers for a time that doubles."""
        self.backoffs += 1
        pause = limits.backoff_base * 2.0 ** min(self.backoffs, 16)
        self.backoff_until = now + min(limits.backoff_most, pause)

    def reset_back_off(self) -> None:
        """End the pause of offers after progress."""
        self.backoffs, self.backoff_until = 0, 0.0

    def track_took(self, seconds: float, inside_us: int, now: float) -> None:
        """Learn from a track that came back after ``seconds``, of which ``inside_us`` were its queue and engine."""
        trip = max(1.0, seconds * 1e6 - inside_us)
        weight = 1.0 if not self.trip_us else _SMOOTH_SHORTER if trip < self.trip_us else _SMOOTH_LONGER
        self.trip_us += weight * (trip - self.trip_us)
        self.trip_at = now

    def expected_trip_us(self, now: float) -> int:
        """Return the expected time of a track there and back; a measurement halves every :data:`TRIP_HALVES` seconds.

        Otherwise a neighbour that was slow once would never be tried again. ACCEPT comes late to a busy core, so
        times of transfers are a worse estimate than a trip that was measured.
        """
        if not self.trip_us:
            return round(2 * self.link_us)
        known = self.trip_us * math.pow(0.5, (now - self.trip_at) / TRIP_HALVES)
        return round(max(known, min(self.link_us, self.trip_us)))

    def expected_wait_us(self, now: float) -> int:
        """Return the expected microseconds until its engine could begin with something new.

        Its queue has been getting shorter since its STATE. Transfers on their way come first. A process that has said
        nothing since it came under suspicion counts as busier by each second.
        """
        if self.state is None:
            return 0
        wait_us = self.state.wait_us
        left = max(0, min(wait_us, MOST_WAIT_US) - round((now - self.state_at) * 1e6)) if wait_us else 0
        if self.offers:
            left += self.offers * max(self.block_us, self.expected_link_us(now))
        return left + round((now - self.suspected_at) * 1e6) if self.is_silent else left

    def is_quiet(self, now: float) -> bool:
        """Whether it is idle and gets nothing, so that time alone does not change the candidate."""
        state = self.state
        return (
            not (self.offers or self.strikes or self.link_us or self.trip_us)
            and state is not None
            and not state.wait_us
            and state.credits == self.reported_credits
            and now >= self.refused_until
            and now >= self.backoff_until
            and now >= self.suspected_until
        )

    @property
    def is_silent(self) -> bool:
        """Whether it has sent no STATE since it came under suspicion."""
        return self.strikes > 0 and self.state_at < self.suspected_at


@dataclass
class Neighbours:
    """All linked processes."""

    limits: Limits
    by_name: dict[str, Neighbour] = field(default_factory=dict)
    suspicions: int = 0

    def __iter__(self) -> Iterator[Neighbour]:
        return iter(self.by_name.values())

    def get(self, name: str) -> Neighbour | None:
        """Return the neighbour of this name if it is linked."""
        return self.by_name.get(name)

    def candidates(self, now: float) -> dict[str, Candidate]:
        """Return the peers that may be handed tokens, by name."""
        found = ((name, self.candidate(name, now)) for name in self.by_name)
        return {name: candidate for name, candidate in found if candidate is not None}

    def candidate(self, name: str, now: float) -> Candidate | None:
        """Return a neighbour if it is a peer that may be handed tokens."""
        n = self.by_name.get(name)
        if n is None or n.hello.role != "peer" or n.state is None:
            return None
        is_quiet = n.is_quiet(now)
        if is_quiet and n.quiet is not None and n.quiet[0] is n.hello and n.quiet[1] is n.state:
            return n.quiet[2]
        if not n.available(now):
            return None
        candidate = Candidate(
            name=name,
            blocks=_as_set(n.hello.blocks),
            reach_blocks=_as_set(n.state.reach_blocks),
            credits=n.credits(now, self.limits),
            wait_us=n.expected_wait_us(now),
            block_us=n.block_us,
            link_us=n.expected_link_us(now),
            trip_us=n.expected_trip_us(now),
            far_blocks=tuple(map(_as_set, n.state.far_blocks)),
            bundle_id=n.hello.bundle_id if n.hello.minor >= MINOR_OF_DEMANDS else "",
        )
        # On a large site most peers are idle, and making a candidate of each takes longer than the rest of a decision.
        n.quiet = (n.hello, n.state, candidate) if is_quiet else None
        return candidate

    def hop_deadline(self, name: str, *, accepted: bool = True, failures: int = 0) -> float:
        """Return the seconds that a transfer may show no progress; until it is accepted the way there counts as well.

        A request that was routed again after ``failures`` gets twice the time for each. On machines that are starved
        of computing time, copies of everything would otherwise go round and make it worse.
        """
        limits, n = self.limits, self.by_name.get(name)
        patience = limits.hop_floor
        if n is None:
            return patience
        if limits.hop_factor * n.block_us / 1e6 > patience:
            patience = max(patience, limits.hop_factor * self.usual_call(name))
        link = limits.transfer if not accepted and not n.link_us else TRANSFERS_PER_DEADLINE * n.link_us / 1e6
        wanted = patience + link
        if failures:
            wanted *= 2.0 ** min(failures, 6)
        return max(patience, min(wanted, limits.hop_most + (0.0 if accepted else limits.transfer)))

    def usual_call(self, name: str) -> float:
        """Return the seconds that a process announces for a block, as far as it, or one of its kind, was seen to take.

        An announcement alone would make others wait for a process that is silent.
        """
        n = self.by_name.get(name)
        if n is None:
            return 0.0
        kind = (other.call_us for other in self if other.hello.engine == n.hello.engine)
        return min(n.block_us, n.call_us or max(kind, default=0.0)) / 1e6

    def suspect(self, name: str, now: float) -> None:
        """Count a strike: a hop to it passed its deadline. It has to earn longer ones again."""
        n = self.by_name.get(name)
        if n is None:
            return
        self.suspicions += 1
        n.suspected_at = now
        n.suspected_until = now + min(self.limits.suspect_most, self.limits.suspect_base * 2**n.strikes)
        n.strikes += 1
        n.was_available = False
        n.call_us = 0.0
        n.calls_when_suspected = n.state.calls if n.state else -1

    def clear_suspicion(self, name: str) -> None:
        """Trust a process again that showed progress on a transfer of ours."""
        n = self.by_name.get(name)
        if n is not None:
            n.strikes = 0
            n.suspected_until = 0.0

    def have_recovered(self, now: float) -> bool:
        """Return whether a suspicion has ended by time since the last call or STATE."""
        found = [n for n in self if not n.was_available and n.available(now)]
        for n in found:
            n.was_available = True
        return bool(found)

    def update(self, name: str, state: State, now: float) -> Change:
        """Note a STATE; return its effect on waiting requests besides credits."""
        n = self.by_name.get(name)
        if n is None:
            return Change.NONE
        before = n.state
        n.state, n.state_at, n.reported_credits = state, now, state.credits
        n.refused_until = 0.0
        if before is None or state.calls > before.calls:
            n.moved_at = now
        if n.strikes and state.calls > n.calls_when_suspected:
            n.strikes, n.suspected_until = 0, 0.0
        was_available, n.was_available = n.was_available, n.available(now)
        if before is None or n.was_available != was_available:
            return Change.REACH
        if state.reach_blocks != before.reach_blocks or state.far_blocks != before.far_blocks:
            return Change.REACH
        return Change.NONE if before == state else Change.LOAD
