"""What a process knows of the others: who is linked, how they are, and who is under suspicion.

A process is under suspicion after a hop to it passed its deadline. It gets nothing for a while that doubles with each
strike, and is trusted again as soon as it shows progress: a process that hangs looks idle, and must not attract work by
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ls_edge.runtime.routing.candidates import Candidate
from ls_edge.runtime.wire import Hello, State

TRIP_HALVES = 20.0
"""Seconds after which half of the belief in what was measured in waves is left."""


@dataclass(frozen=True)
class Limits:
    """Times in seconds and sizes that the routing machines keep to."""

    credits: int = 16
    """Requests that a peer holds at once, waiting, running or not yet accepted by the next."""
    custody: int = 64
    """Copies that a peer keeps for others beyond that."""
    hop_floor: float = 0.25
    """Least time that a hop may show no progress."""
    hop_factor: float = 10.0
    """The same in usual engine calls of the holder."""
    credit_wait: float = 0.25
    """How long tokens wait for the credit of a preferred holder."""
    look_again: float = 0.05
    """How often tokens that wait for a credit are looked at, and their keeper told that they are well."""
    skip_grace: float = 0.2
    """How long the source waits for an unreachable block before it skips it."""
    suspect_base: float = 0.3
    suspect_most: float = 5.0
    away_floor: float = 1.0
    """Least time without news after which the source starts a new branch."""
    progress_every: float = 0.08
    """Least time between two PROGRESS of a transfer."""
    cancel_every: float = 0.05
    """How long the source collects requests that were answered in the usual way before it sends their CANCEL."""
    way_back: float = 0.005
    """Time kept for the hop back and the head; the source adds what its head usually takes."""
    chain: float = 0.02
    """Longest that one engine call may take by running several blocks in a row; one block runs in any case."""
    drain: float = 4.0
    """How long a draining peer tries to get rid of what it holds."""
    tombstones: int = 100_000

    @property
    def reserved(self) -> int:
        """Credits of a peer that only transfers from peers may use.

        Without them two peers that need one another fill up with new work and neither can hand anything on.
        """
        return self.credits // 2


@dataclass
class Neighbour:
    """Another process, as it has described itself."""

    hello: Hello
    state: State | None = None
    offers: int = 0
    """Transfers on their way to it that it has neither accepted nor refused."""
    strikes: int = 0
    suspected_until: float = 0.0
    refused_until: float = 0.0
    calls_when_suspected: int = -1
    link_us: float = 0.0
    """What a transfer to it takes until it is accepted, usually."""
    trip_us: float = 0.0
    """What a track of it takes beyond queue and engine, usually."""
    trip_at: float = 0.0
    """When that was last measured."""
    state_at: float = 0.0
    """When it last said how it is."""

    @property
    def name(self) -> str:
        """Its name in ``peers.yaml``."""
        return self.hello.name

    def available(self, now: float) -> bool:
        """Whether it may be handed tokens at all."""
        state = self.state
        return (
            state is not None and state.warm and not state.draining and not state.stuck and now >= self.suspected_until
        )

    def credits(self, now: float) -> int:
        """Transfers that it would accept now, those on their way taken off."""
        if self.state is None or now < self.refused_until:
            return 0
        return max(0, self.state.credits - self.offers)

    def accepted_after(self, seconds: float) -> None:
        """Learn from a transfer."""
        self.link_us += (seconds * 1e6 - self.link_us) * (0.2 if self.link_us else 1.0)

    def track_took(self, seconds: float, inside_us: int, now: float) -> None:
        """Learn from a track that came back after ``seconds``, of which ``inside_us`` were its queue and engine."""
        trip = max(1.0, seconds * 1e6 - inside_us)
        weight = 1.0 if not self.trip_us else 0.3 if trip < self.trip_us else 0.1
        self.trip_us += weight * (trip - self.trip_us)
        self.trip_at = now

    def expected_trip_us(self, now: float) -> int:
        """The way of a track there and back; belief in an old measurement halves every :data:`TRIP_HALVES` seconds.

        A neighbour that once was slow would otherwise never be tried again. ACCEPT comes late to a busy core, so what
        transfers take says less than a trip that was measured.
        """
        known = self.trip_us * math.exp((self.trip_at - now) * math.log(2) / TRIP_HALVES)
        return round(max(known, min(self.link_us, self.trip_us)) if self.trip_us else 2 * self.link_us)

    def expected_wait_us(self, now: float) -> int:
        """Until its engine could begin with something new; what it had to do is being done meanwhile."""
        if self.state is None:
            return 0
        return max(0, self.state.wait_us - round((now - self.state_at) * 1e6)) + self.offers * self.state.block_us

    def hop_deadline(self, limits: Limits) -> float:
        """Seconds that a transfer to it may show no progress."""
        usual = 0 if self.state is None else self.state.block_us
        return max(limits.hop_floor, limits.hop_factor * usual / 1e6)


@dataclass
class Neighbours:
    """All processes with a link."""

    limits: Limits
    by_name: dict[str, Neighbour] = field(default_factory=dict)
    suspicions: int = 0

    def __iter__(self) -> Iterator[Neighbour]:
        return iter(self.by_name.values())

    def get(self, name: str) -> Neighbour | None:
        """The neighbour of this name, if it is linked."""
        return self.by_name.get(name)

    def candidates(self, now: float) -> list[Candidate]:
        """The peers that may be handed tokens."""
        result = []
        for n in self.by_name.values():
            if n.hello.role == "peer" and n.available(now):
                assert n.state is not None
                result.append(
                    Candidate(
                        name=n.name,
                        blocks=frozenset(n.hello.blocks),
                        reach_blocks=frozenset(n.state.reach_blocks),
                        credits=n.credits(now),
                        wait_us=n.expected_wait_us(now),
                        block_us=n.state.block_us,
                        link_us=round(n.link_us),
                        trip_us=n.expected_trip_us(now),
                    )
                )
        return result

    def suspect(self, name: str, now: float) -> None:
        """Count a strike: a hop to it passed its deadline."""
        n = self.by_name.get(name)
        if n is None:
            return
        self.suspicions += 1
        n.suspected_until = now + min(self.limits.suspect_most, self.limits.suspect_base * 2**n.strikes)
        n.strikes += 1
        n.calls_when_suspected = n.state.calls if n.state else -1

    def advanced(self, name: str) -> None:
        """It showed progress on a transfer of ours: trusted again."""
        n = self.by_name.get(name)
        if n is not None:
            n.strikes = 0
            n.suspected_until = 0.0

    def update(self, name: str, state: State, now: float) -> bool:
        """Take a STATE in; return whether it may let waiting tokens go."""
        n = self.by_name.get(name)
        if n is None:
            return False
        before = n.state
        n.state, n.state_at = state, now
        n.refused_until = 0.0
        if n.strikes and state.calls > n.calls_when_suspected:
            n.strikes, n.suspected_until = 0, 0.0
        return before is None or before != state
