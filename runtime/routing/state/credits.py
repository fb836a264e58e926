"""Credits: the number of further requests that a peer accepts from each sender, given what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ls_edge.runtime.routing.state.held_request import AWAY, CUSTODY, ENDED, NEW, OFFERED, HeldRequest, Stage
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import owner_of

WORKS_AGAIN = (-1, 0)
"""Change of the numbers of copies and of held requests if a block is to run on a copy."""
_NOT_HELD = (NEW, ENDED)
_HANDED_ON = (OFFERED, CUSTODY)


def counted(before: Stage, after: Stage) -> tuple[int, int] | None:
    """Return the change of the numbers of copies and of held requests in a transition, if there may be one."""
    held = (after not in _NOT_HELD) - (before not in _NOT_HELD)
    copies = (after in _HANDED_ON and before not in _HANDED_ON) - (after is AWAY)
    return (copies, held) if copies or held else None


@dataclass
class Credits:
    """Counts of held requests, updated by each transition, and the room that is left for senders.

    A request *works* until it is first sent to a next holder; from then on it is a copy, unless another block is to run
    here, and so is one that only passes on its way home. An offer that is refused must not take back the credit that it
    has freed: two peers that need one another would refuse each other forever.

    Sources share the credits of a peer equally, and so do peers that send work of unknown sources. Half of the credits
    are reserved for transfers between peers.
    """

    limits: Limits = field(repr=False)
    copies: int = 0
    """Number of requests that were sent to a next holder, or that came on their way home."""
    working: int = 0
    working_of: dict[str, int] = field(default_factory=dict)
    """Number of working requests by account: their source, or the peer that they came from if that is not linked."""
    working_from_owner: int = 0
    """Number of working requests that came directly from their source."""
    held_from_owner: int = 0
    """Number of requests and copies that came directly from their source."""
    held_from: dict[str, int] = field(default_factory=dict)
    """Number of requests and copies by the peer that they came from, except those on their way home."""
    last_let_in: dict[str, float] = field(default_factory=dict, compare=False)
    """Time of the last direct transfer by source; aliases count as one source."""

    def moved(self, request: HeldRequest, change: tuple[int, int]) -> None:
        """Update the counts for a transition."""
        copies, held = change
        if held > 0:
            copies = int(request.passes_through)
        elif held < 0:
            copies = -int(request.is_copy)
        elif request.is_copy == (copies > 0):
            return
        request.is_copy = copies > 0
        self.count(request, copies, held)

    def count(self, request: HeldRequest, copies: int, held: int) -> None:
        """Add to the numbers of copies and of held requests."""
        self.copies += copies
        works = held - copies
        is_direct = request.upstream == request.owner
        if held and is_direct:
            self.held_from_owner += held
        elif held and request.relay:
            _add(self.held_from, request.relay, held)
        if works:
            self.working += works
            _add(self.working_of, request.account, works)
            if is_direct:
                self.working_from_owner += works

    @property
    def total(self) -> int:
        """Number of requests that would be accepted now from all senders together."""
        free, room = self.limits.credits - self.working, self.limits.custody - self.copies
        if free > room:
            free = room
        return free if free > 0 else 0

    @property
    def takes_relayed(self) -> bool:
        """Whether this process holds less from peers than it may hold from sources."""
        return sum(self.held_from.values()) < self.limits.credits + self.limits.custody

    def room(self, account: str) -> int:
        """Return how many more requests an account may have here; all share the credits equally."""
        working_of = self.working_of
        accounts = len(working_of) + (account not in working_of)
        return max(1, self.limits.credits // accounts) - working_of.get(account, 0)

    def of_source(self, name: str, now: float) -> int:
        """Return how many transfers of a linked source would be accepted now."""
        return max(0, min(self.total - self.limits.reserved, self.room(owner_of(name))), self.guaranteed(name, now))

    def of_relay(self, name: str) -> int:
        """Return how many transfers of a peer that leads to others would be accepted now.

        It may be the only way of sources to this process, so another peer must not hold all credits.
        """
        return max(0, min(self.total, self.room(name)), self.limits.guaranteed - self.held_from.get(name, 0))

    def guaranteed(self, source: str, now: float) -> int:
        """Return how many transfers of a linked source are accepted even if others hold all credits forever.

        A peer that passes on a request may lie about its source. A source that was not let in for a while may therefore
        make one transfer, whatever is held in its name.
        """
        limits, account = self.limits, owner_of(source)
        if self.working_from_owner >= limits.credits or self.held_from_owner >= limits.credits + limits.custody:
            return 0
        starved = now - self.last_let_in.get(account, float("-inf")) >= limits.starved
        return max(int(starved), limits.guaranteed - self.working_of.get(account, 0))

    def let_in(self, source: str, now: float) -> None:
        """Record a direct transfer of a source."""
        self.last_let_in[owner_of(source)] = now

    def forget(self, source: str) -> None:
        """Forget a source whose link has ended."""
        self.last_let_in.pop(owner_of(source), None)


def _add(counts: dict[str, int], key: str, change: int) -> None:
    counts[key] = count = counts.get(key, 0) + change
    if not count:
        del counts[key]
