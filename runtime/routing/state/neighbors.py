"""Neighbors of the process: linked processes, their latest STATE, measurements, and pauses.

A neighbor that is silent, unwilling or unable, or whose link loses tokens, is given none for a while: its
:class:`~.pause.Pause` has the reason and the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ls_edge.runtime.protocol.messages import Hello, State, TransferId
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.link_times import WINDOW, LinkTimes
from ls_edge.runtime.routing.state.pause import Pause, PauseReason

MAX_UNANSWERED = 1024
"""Limit on remembered transfers without a reply, whose time is measured."""
CUTS = 3
"""Links to a process in a row that end while it is sent tokens, after which it gets new ones only after a pause."""
_as_set = lru_cache(1024)(frozenset[int])
"""Cached conversion of tuples of blocks: most of them repeat."""


@dataclass(slots=True, eq=False)
class Neighbor:
    """Linked process: its description, its latest STATE, and measurements."""

    hello: Hello
    all: Neighbors
    name: str
    blocks: frozenset[int] = frozenset()
    reach_blocks: frozenset[int] = frozenset()
    """Blocks that its own neighbors serve."""
    bundle_id: str = ""
    block_us: int = 0
    """Typical time of one of its engine calls."""
    state: State | None = None
    state_at: float = 0.0
    serves: bool = False
    """Whether it is a peer that is warm, not draining and not stuck."""
    offers: int = 0
    """Number of transfers that it has neither accepted nor refused yet."""
    pause: Pause = field(default_factory=Pause)
    link: LinkTimes = field(default_factory=LinkTimes)
    reported_credits: int = 0
    """Credits in its latest STATE, ACCEPT or REFUSE."""
    calls_when_silent: int = -1
    """Number of its engine calls when it was last found silent."""
    moved_at: float = 0.0
    """Time of its latest finished engine call or accepted transfer."""

    def reported(self, state: State, now: float) -> None:
        """Record a STATE, which ends a pause if it shows that the reason has gone."""
        if self.state is None or state.calls > self.state.calls:
            self.moved_at = now
        self.state, self.state_at, self.reported_credits = state, now, state.credits
        self.serves = self.is_peer and state.warm and not state.draining and not state.stuck
        self.block_us = state.block_us
        self.reach_blocks = _as_set(state.reach_blocks)
        self.pause.end(PauseReason.UNABLE)
        if state.calls > self.calls_when_silent:
            self.pause.end(PauseReason.SILENT)

    @property
    def is_peer(self) -> bool:
        """Whether it serves blocks."""
        return self.hello.role == "peer"

    @property
    def is_source(self) -> bool:
        """Whether it has images and serves no blocks."""
        return self.hello.role == "source"

    @property
    def available(self) -> bool:
        """Whether it may be given tokens at all."""
        return self.serves and not self.pause.excludes(self.all.now)

    @property
    def is_silent(self) -> bool:
        """Whether it has sent no STATE since it was found silent."""
        pause = self.pause
        return pause.reason is PauseReason.SILENT and self.state_at < pause.since

    @property
    def loses_tokens(self) -> bool:
        """Whether it gets no tokens for a while, since its links ended each time that tokens were sent on them."""
        return self.pause.reason is PauseReason.LOSES_TOKENS and self.all.now < self.pause.until

    # Cost of handing tokens to it, on which policies base their choice.

    @property
    def credits(self) -> int:
        """Number of transfers that it would accept now, besides those in flight; a slow link allows only a few."""
        now = self.all.now
        if self.state is None or now < self.pause.until:
            return 0
        reported, link_us = self.reported_credits, self.link.usual_us
        if reported * (link_us + 1) <= WINDOW * 1e6 and link_us:
            return max(0, reported - self.offers)  # not a slow link; the exact window would cost more than a decision
        return max(0, min(reported, self.link.window(now)) - self.offers)

    @property
    def window_left(self) -> int:
        """Number of further transfers that may be in flight; few on a slow link, none on one that loses tokens."""
        return 0 if self.loses_tokens else self.link.window(self.all.now) - self.offers

    @property
    def link_us(self) -> int:
        """Expected time of a transfer."""
        return self.link.expected_us(self.all.now)

    @property
    def trip_us(self) -> int:
        """Expected time of both transfers of a track."""
        return self.link.expected_trip_us(self.all.now)

    @property
    def wait_us(self) -> int:
        """Expected time until its engine could begin a new request.

        Its queue has become shorter since its STATE, and transfers in flight come first. A process that remains silent
        counts as busier every second.
        """
        state, now = self.state, self.all.now
        if state is None:
            return 0
        left = max(0, state.wait_us - round((now - self.state_at) * 1e6)) if state.wait_us else 0
        if self.offers:
            left += self.offers * max(self.block_us, self.link_us)
        return left + round((now - self.pause.since) * 1e6) if self.is_silent else left

    # Events.

    def accepted_after(self, seconds: float) -> None:
        """Record an accepted transfer that took ``seconds``."""
        self.link.accepted_after(seconds, self.all.now)
        self.moved_at = self.all.now

    def track_took(self, seconds: float, inside_us: int) -> None:
        """Record a track that took ``seconds``, ``inside_us`` of them in queue and engine."""
        self.link.track_took(seconds, inside_us, self.all.now)

    def hold_off(self, reason: PauseReason) -> float:
        """Begin a pause; return its end."""
        self.pause.begin(reason, self.all.now)
        if reason is PauseReason.SILENT:
            self.calls_when_silent = self.state.calls if self.state else -1
            self.all.silent[self.name] = None
        return self.pause.until

    def has_worked(self) -> None:
        """End any pause, after it has run blocks or passed tokens on."""
        self.pause.end()
        self.all.cuts.pop(self.name, None)


class Neighbors:
    """All neighbors of a process."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.by_name: dict[str, Neighbor] = {}
        self.now = 0.0
        self._unanswered: dict[TransferId, tuple[str, float]] = {}
        """Receiver and time of each transfer without a reply, including those given up."""
        self.reach_version = 0
        """Counter of changes of links, of the availability of neighbors, and of the blocks that they reach."""
        self.reaches_version = 0
        """Counter of changes of the links that neighbors report."""
        self.silent: dict[str, None] = {}
        """Neighbors that were found silent and have not recovered, as far as :meth:`have_recovered` has noticed."""
        self.cuts: dict[str, tuple[int, int]] = {}
        """Incarnation of a process, and the number of its links in a row that ended while it was sent tokens."""

    def __iter__(self) -> Iterator[Neighbor]:
        return iter(self.by_name.values())

    def get(self, name: str) -> Neighbor | None:
        """Return the neighbor of this name, or None."""
        return self.by_name.get(name)

    def add(self, hello: Hello) -> Neighbor:
        """Add a process that has a link now, or update its description."""
        n = self.by_name.setdefault(hello.name, Neighbor(hello, self, hello.name))
        n.hello, n.blocks, n.bundle_id = hello, _as_set(hello.blocks), hello.bundle_id
        self.reach_version += 1
        if hello.name in self.losing_tokens and self.cuts[hello.name][0] == hello.incarnation:
            self.give_no_tokens(n)
        return n

    def forget(self, n: Neighbor) -> None:
        """Forget a process whose last link has ended, and count a link on which some transfers got no reply.

        That happens where packets of their size do not pass. A link that ends sooner was cut for another reason.
        """
        del self.by_name[n.name]
        self.reach_version += 1
        lost = {transfer: at for transfer, (to, at) in self._unanswered.items() if to == n.name}
        for transfer in lost:
            del self._unanswered[transfer]
        if self.now - min(lost.values(), default=self.now) < self.limits.hop.floor:
            return
        incarnation, count = self.cuts.pop(n.name, (0, 0))
        self.cuts[n.name] = n.hello.incarnation, (count + 1 if incarnation == n.hello.incarnation else 1)
        if len(self.cuts) > MAX_UNANSWERED:
            del self.cuts[next(iter(self.cuts))]

    def give_no_tokens(self, n: Neighbor) -> None:
        """Give no tokens to a process whose links end each time that tokens are sent on them."""
        self.cuts[n.name] = n.hello.incarnation, CUTS
        n.hold_off(PauseReason.LOSES_TOKENS)

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
        return [n for n in self.by_name.values() if n.available]

    def reach(self, name: str) -> bool:
        """Return whether a neighbor reports a link to a process."""
        return any(n.state and name in n.state.reaches for n in self.by_name.values())

    def hop_deadline(self, name: str, *, accepted: bool = True, failures: int = 0) -> float:
        """Return the seconds that a transfer to a neighbor may take without progress."""
        n = self.by_name.get(name)
        block_us, link_us = (0.0, 0.0) if n is None else (n.block_us, n.link.usual_us)
        return self.limits.hop.seconds(block_us, link_us, accepted=accepted, failures=failures)

    def have_recovered(self) -> bool:
        """Return whether a pause for silence has ended since the last call."""
        linked = self.by_name
        ended = [name for name in self.silent if name not in linked or not linked[name].pause.excludes(self.now)]
        for name in ended:
            del self.silent[name]
        return bool(ended)

    def update(self, name: str, state: State) -> bool:
        """Record a STATE; return whether it differs from the previous one."""
        n = self.by_name.get(name)
        if n is None:
            return False
        before, was_available = n.state, n.available
        n.reported(state, self.now)
        if before is None or state.reaches != before.reaches:
            self.reaches_version += 1
        if n.available != was_available or before is None or state.reach_blocks != before.reach_blocks:
            self.reach_version += 1
        return before != state
