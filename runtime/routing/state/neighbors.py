"""Neighbors of a process: linked processes, their latest STATE, measurements and suspicions.

A process that misses the deadline of a hop is under suspicion: a process that hangs looks idle, and must not attract
work. It gets no tokens for a time that doubles with each strike, and is trusted again as soon as it shows progress. A
process that refuses or returns everything is passed over for a time that doubles as well.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ls_edge.runtime.protocol.messages import Hello, State, TransferId
from ls_edge.runtime.routing.state.limits import Limits

MAX_UNANSWERED = 1024
"""Limit on remembered transfers without a reply, whose time is measured."""
MAX_NEAR = 4096
"""Limit on remembered processes that were near."""
CUTS = 3
"""Links to a process in a row that end while it is sent tokens, after which it gets new ones only after a pause."""
_ALIAS = re.compile(r"\.[0-9a-f]{8}$")
_as_set = lru_cache(1024)(frozenset[int])
"""Cached conversion of tuples of blocks: most of them repeat."""


@lru_cache(4096)
def owner_of(name: str) -> str:
    """Return the name in ``peers.yaml`` that the alias of a source process belongs to."""
    return _ALIAS.sub("", name)


@lru_cache(1024)
def _peers(names: tuple[str, ...], without: str) -> frozenset[str]:
    """Return the peers among processes, ``without`` one; the name of a source process is an alias."""
    return frozenset([name for name in names if name != without and owner_of(name) == name])


def clamped(took: float, usual: float, before: float, limits: Limits) -> float:
    """Return a measured time with outliers clamped: one pause does not make a device slow, two in a row do.

    ``usual`` (0 if unknown) and ``before``, the previous measurement, have the unit of ``took``.
    """
    return min(took, max(limits.clamp * usual, before)) if usual else took


def faded(usual: float, since: float, limits: Limits) -> float:
    """Return a measured time faded by its age in seconds, so that a link that was slow once is tried again."""
    return usual * math.pow(0.5, since / limits.fade)


@dataclass(slots=True, eq=False)
class Neighbor:
    """Linked process: its description, its latest STATE, and measurements.

    Times that it reports may be wrong or forged; ``claims.believable`` bounds them.
    """

    hello: Hello
    all: Neighbors
    name: str = ""
    blocks: frozenset[int] = frozenset()
    reach_blocks: frozenset[int] = frozenset()
    """Blocks that its own neighbors serve."""
    far_blocks: tuple[frozenset[int], ...] = ()
    """Blocks that are 2, 3, … links away from it."""
    near: frozenset[str] = frozenset()
    """Peers that it is linked to, without this process."""
    bundle_id: str = ""
    block_us: int = 0
    """Typical time of one of its engine calls, as announced."""
    state: State | None = None
    state_at: float = 0.0
    serves: bool = False
    """Whether it is a peer that is warm, not draining and not stuck."""
    offers: int = 0
    """Number of transfers that it has neither accepted nor refused yet."""
    strikes: int = 0
    suspected_until: float = 0.0
    suspected_at: float = 0.0
    """Start of the latest suspicion."""
    refused_until: float = 0.0
    backoff_until: float = 0.0
    """End of the pause after it refused or returned a transfer; STATE does not end the pause."""
    backoffs: int = 0
    """Number of transfers refused or returned unchanged since the last progress."""
    link_at: float = 0.0
    last_link_us: float = 0.0
    calls_when_suspected: int = -1
    usual_link_us: float = 0.0
    """Typical time from a transfer to its ACCEPT."""
    call_us: float = 0.0
    """Typical time of one of its blocks, as measured here; 0 before the first."""
    usual_trip_us: float = 0.0
    """Typical time of a track without queue and engine."""
    trip_at: float = 0.0
    reported_credits: int = 0
    """Credits in its latest STATE, ACCEPT or REFUSE."""
    was_available: bool = False
    """Whether it was :attr:`available` at its latest STATE, and has not been suspected since."""
    moved_at: float = 0.0
    """Time of its latest finished engine call or accepted transfer."""
    _expected_link: tuple[float, int] = (-1.0, 0)
    """Time and result of the latest :attr:`link_us`: a decision needs it several times."""

    def greeted(self, hello: Hello) -> None:
        """Record its description."""
        self.hello, self.name, self.blocks = hello, hello.name, _as_set(hello.blocks)
        self.bundle_id = hello.bundle_id

    def reported(self, state: State, now: float) -> None:
        """Record a STATE."""
        self.state, self.state_at, self.reported_credits = state, now, state.credits
        self.serves = self.hello.role == "peer" and state.warm and not state.draining and not state.stuck
        self.block_us = state.block_us
        self.reach_blocks = _as_set(state.reach_blocks)
        self.far_blocks = tuple(map(_as_set, state.far_blocks)) if state.far_blocks else ()
        self.near = _peers(state.reaches, self.all.name)

    @property
    def available(self) -> bool:
        """Whether it may be given tokens at all."""
        return self.serves and self.all.now >= self.suspected_until

    @property
    def is_silent(self) -> bool:
        """Whether it has sent no STATE since the suspicion began."""
        return self.strikes > 0 and self.state_at < self.suspected_at

    # Cost of handing tokens to it, on which policies base their choice.

    @property
    def credits(self) -> int:
        """Number of transfers that it would accept now, besides those in flight; a slow link allows only a few."""
        now = self.all.now
        if self.state is None or now < self.refused_until or now < self.backoff_until:
            return 0
        reported = self.reported_credits
        if reported * (self.usual_link_us + 1) <= self.all.limits.window * 1e6 and self.usual_link_us:
            return max(0, reported - self.offers)  # not a slow link; the exact window would cost more than a decision
        return max(0, min(reported, self._window) - self.offers)

    def with_credit(self) -> Neighbor:
        """Return it with at least one credit, within the limits of its link."""
        other = copy.copy(self)
        other.reported_credits = max(self.reported_credits, self.offers + 1)
        return other

    @property
    def window_left(self) -> int:
        """Number of further transfers that may be in flight; few on a slow link, none on one that loses tokens."""
        return 0 if self.loses_tokens else self._window - self.offers

    @property
    def loses_tokens(self) -> bool:
        """Whether it gets no tokens for a while, since its links ended each time that tokens were sent on them."""
        return self.all.now < self.backoff_until and self.name in self.all.losing_tokens

    @property
    def _window(self) -> int:
        limits = self.all.limits
        if not self.usual_link_us:
            return limits.unmeasured_window
        window_us, link_us = limits.window * 1e6, self.link_us
        return max(1 if link_us > 5 * window_us else limits.unmeasured_window, int(window_us / max(1, link_us)))

    @property
    def link_us(self) -> int:
        """Expected time of a transfer; an old measurement fades."""
        now = self.all.now
        at, expected = self._expected_link
        if at != now:
            usual = self.usual_link_us
            expected = round(faded(usual, now - self.link_at, self.all.limits)) if usual else 0
            self._expected_link = (now, expected)
        return expected

    @property
    def trip_us(self) -> int:
        """Expected time of both transfers of a track; an old measurement fades.

        A measured trip is the better estimate: on a busy core, ACCEPT is read late, and transfers seem to take longer.
        """
        usual = self.usual_trip_us
        if not usual:
            return round(2 * self.usual_link_us)
        known = faded(usual, self.all.now - self.trip_at, self.all.limits)
        return round(max(known, min(self.usual_link_us, usual)))

    @property
    def wait_us(self) -> int:
        """Expected time until its engine could begin a new request.

        Its queue has become shorter since its STATE, and transfers in flight come first. A suspect that remains silent
        counts as busier every second.
        """
        state, now = self.state, self.all.now
        if state is None:
            return 0
        left = max(0, state.wait_us - round((now - self.state_at) * 1e6)) if state.wait_us else 0
        if self.offers:
            left += self.offers * max(self.block_us, self.link_us)
        return left + round((now - self.suspected_at) * 1e6) if self.is_silent else left

    def leads_to(self, blocks: Iterable[int]) -> bool:
        """Return whether it can relay tokens to a holder of one of these blocks."""
        return any(not far.isdisjoint(blocks) for far in (self.reach_blocks, *self.far_blocks))

    # Measurements.

    def accepted_after(self, seconds: float) -> None:
        """Update the time of a transfer from a new measurement."""
        limits, now, took = self.all.limits, self.all.now, seconds * 1e6
        if self.usual_link_us:
            counted = clamped(took, max(self.usual_link_us, 1000.0), self.last_link_us, limits)
            self.usual_link_us += (counted - self.usual_link_us) * limits.smooth
        else:
            self.usual_link_us = took
        self.link_at, self.last_link_us, self.moved_at = now, took, now
        self._expected_link = (now, round(self.usual_link_us))

    def ran_after(self, seconds: float) -> None:
        """Update the time of a block; a slow process earns longer deadlines step by step."""
        limits = self.all.limits
        took = min(seconds * 1e6, limits.clamp * self.call_us if self.call_us else limits.hop_floor * 1e6)
        self.call_us += (took - self.call_us) * (limits.smooth if self.call_us else 1.0)

    def track_took(self, seconds: float, inside_us: int) -> None:
        """Update the time of a trip from a track that took ``seconds``, ``inside_us`` of them in queue and engine."""
        limits, trip = self.all.limits, max(1.0, seconds * 1e6 - inside_us)
        weight = limits.smooth_fast if trip < self.usual_trip_us else limits.smooth_slow
        self.usual_trip_us += (weight if self.usual_trip_us else 1.0) * (trip - self.usual_trip_us)
        self.trip_at = self.all.now

    # Pauses.

    def back_off(self) -> None:
        """Count a refused or returned transfer, and pause offers for a time that doubles."""
        limits = self.all.limits
        self.backoffs += 1
        pause = limits.backoff_base * 2.0 ** min(self.backoffs, 16)
        self.backoff_until = self.all.now + min(limits.backoff_most, pause)

    def reset_back_off(self) -> None:
        """End the pause of offers, after progress."""
        self.backoffs, self.backoff_until = 0, 0.0
        self.all.cuts.pop(self.name, None)

    def suspect(self) -> None:
        """Count a missed deadline; longer deadlines have to be earned again."""
        limits, now = self.all.limits, self.all.now
        self.suspected_at = now
        self.suspected_until = now + min(limits.suspect_most, limits.suspect_base * 2**self.strikes)
        self.strikes += 1
        self.was_available = False
        self.call_us = 0.0
        self.calls_when_suspected = self.state.calls if self.state else -1

    def clear_suspicion(self) -> None:
        """End the suspicion, after progress."""
        self.strikes, self.suspected_until = 0, 0.0


class Neighbors:
    """All neighbors of the process ``name``."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.by_name: dict[str, Neighbor] = {}
        self.now = 0.0
        self._unanswered: dict[TransferId, tuple[str, float]] = {}
        """Receiver and time of each transfer without a reply, including those given up."""
        self.reach_version = 0
        """Counter of changes of links, of the availability of neighbors, and of the blocks that they reach."""
        self.reaches_version = 0
        """Counter of changes of the links that neighbors report."""
        self.once_near: dict[str, None] = {}
        """Processes to which this process or a neighbor has had a link."""
        self.cuts: dict[str, tuple[int, int]] = {}
        """Incarnation of a process, and the number of its links in a row that ended while it was sent tokens."""

    def __iter__(self) -> Iterator[Neighbor]:
        return iter(self.by_name.values())

    def get(self, name: str) -> Neighbor | None:
        """Return the neighbor of this name, or None."""
        return self.by_name.get(name)

    def add(self, hello: Hello) -> Neighbor:
        """Add a process that has a link now, or update its description."""
        n = self.by_name.setdefault(hello.name, Neighbor(hello, self))
        n.greeted(hello)
        self.reach_version += 1
        self._were_near(hello.name)
        if hello.name in self.losing_tokens and self.cuts[hello.name][0] == hello.incarnation:
            self.pause(n)
        return n

    def _were_near(self, *names: str) -> None:
        self.once_near |= dict.fromkeys(names)
        while len(self.once_near) > MAX_NEAR:
            del self.once_near[next(iter(self.once_near))]

    def forget_transfers(self, n: Neighbor) -> None:
        """Forget the transfers to a process whose link has ended, and count a link on which some got no reply.

        That happens where packets of their size do not pass. A link that ends sooner was cut for another reason.
        """
        lost = {transfer: at for transfer, (to, at) in self._unanswered.items() if to == n.name}
        for transfer in lost:
            del self._unanswered[transfer]
        if self.now - min(lost.values(), default=self.now) < self.limits.hop_floor:
            return
        incarnation, count = self.cuts.pop(n.name, (0, 0))
        self.cuts[n.name] = n.hello.incarnation, (count + 1 if incarnation == n.hello.incarnation else 1)
        if len(self.cuts) > MAX_UNANSWERED:
            del self.cuts[next(iter(self.cuts))]

    def pause(self, n: Neighbor) -> None:
        """Send no tokens to a process for a while, since its links end each time that tokens are sent on them."""
        self.cuts[n.name] = n.hello.incarnation, CUTS
        n.backoff_until = self.now + self.limits.suspect_most

    @property
    def losing_tokens(self) -> list[str]:
        """Processes whose links have ended :data:`CUTS` times in a row while tokens were sent on them."""
        return [name for name, (_, count) in self.cuts.items() if count >= CUTS]

    def offered(self, transfer: TransferId, to: str) -> None:
        """Record a transfer, to measure the time until its reply."""
        self.by_name[to].offers += 1
        self._unanswered[transfer] = (to, self.now)
        if len(self._unanswered) > MAX_UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]

    def answered(self, transfer: TransferId, name: str) -> float | None:
        """Return the seconds from a transfer to its reply; None if there was no such transfer to ``name``."""
        to, at = self._unanswered.pop(transfer, ("", 0.0))
        return self.now - at if to == name else None

    def candidates(self) -> list[Neighbor]:
        """Return the peers that may be given tokens now."""
        now = self.now
        return [n for n in self.by_name.values() if n.serves and now >= n.suspected_until]

    @property
    def slowest_us(self) -> float:
        """Typical time of a transfer over the slowest link."""
        return max([n.usual_link_us for n in self.by_name.values()], default=0.0)

    def is_source(self, name: str) -> bool:
        """Return whether a process is a linked source."""
        n = self.by_name.get(name)
        return n is not None and n.hello.role == "source"

    def is_beyond(self, name: str) -> bool:
        """Return whether a process is linked to a neighbor, but not to this process."""
        return name not in self.by_name and self.reach(name)

    def reach(self, name: str) -> bool:
        """Return whether a neighbor reports a link to a process."""
        return any(n.state and name in n.state.reaches for n in self.by_name.values())

    def leads_beyond(self, n: Neighbor) -> bool:
        """Return whether a neighbor is linked to a peer to which this process has no link."""
        return not n.near <= self.by_name.keys()

    def hop_deadline(self, name: str, *, accepted: bool = True, failures: int = 0) -> float:
        """Return the seconds that a transfer may take without progress, including the transfer until it is accepted.

        Each of the ``failures`` of a request doubles the time: on an overloaded machine, further copies of the same
        requests would only add to the load.
        """
        limits, n = self.limits, self.by_name.get(name)
        patience = limits.hop_floor
        if n is None:
            return patience
        if limits.hop_factor * n.block_us > patience * 1e6:
            patience = max(patience, limits.hop_factor * self.usual_call(name))
        wanted, most = patience + limits.hop_factor * n.usual_link_us / 1e6, limits.hop_most
        if not accepted:
            most += limits.transfer
            if not n.usual_link_us:
                wanted += limits.transfer
        if failures:
            wanted *= 2.0 ** min(failures, 6)
        return max(patience, min(wanted, most))

    def usual_call(self, name: str) -> float:
        """Return the seconds that a process announces for a block, at most those measured for it or its engine type.

        An announcement alone would make others wait for a silent process.
        """
        n = self.by_name.get(name)
        if n is None:
            return 0.0
        kind = (other.call_us for other in self if other.hello.engine == n.hello.engine)
        return min(n.block_us, n.call_us or max(kind, default=0.0)) / 1e6

    def have_recovered(self) -> bool:
        """Return whether a suspicion has expired since the last call."""
        found = [n for n in self if not n.was_available and n.available]
        for n in found:
            n.was_available = True
        return bool(found)

    def update(self, name: str, state: State) -> bool:
        """Record a STATE; return whether it differs from the previous one."""
        n = self.by_name.get(name)
        if n is None:
            return False
        before = n.state
        n.reported(state, self.now)
        n.refused_until = 0.0
        if before is None or state.calls > before.calls:
            n.moved_at = self.now
        if n.strikes and state.calls > n.calls_when_suspected:
            n.clear_suspicion()
        was_available, n.was_available = n.was_available, n.available
        if before is None or state.reaches != before.reaches:
            self.reaches_version += 1
            self._were_near(*state.reaches)
        same_reach = before and (state.reach_blocks, state.far_blocks) == (before.reach_blocks, before.far_blocks)
        if n.was_available != was_available or not same_reach:
            self.reach_version += 1
        return before != state
