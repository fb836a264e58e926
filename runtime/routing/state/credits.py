"""Credits: the number of further requests that a peer accepts from each sender, given what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ls_edge.runtime.routing.state.held_request import HeldRequest, Stage
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import owner_of

_NOT_HELD = (Stage.NEW, Stage.ENDED)
_HANDED_ON = (Stage.OFFERED, Stage.CUSTODY)


def counted(before: Stage, after: Stage) -> tuple[int, int] | None:
    """Return the change of the numbers of copies and of held requests in a transition, if there is one."""
    copies = (after in _HANDED_ON) - (before in _HANDED_ON)
    held = (after not in _NOT_HELD) - (before not in _NOT_HELD)
    return (copies, held) if copies or held else None


@dataclass
class Credits:
    """Counts of held requests, updated by each transition, and the room that is left for senders.

    A request *works* until it is sent to the next holder; from then on it is a copy. Sources share the credits of a
    peer equally; half of the credits are reserved for transfers between peers.
    """

    limits: Limits = field(repr=False)
    copies: int = 0
    """Number of requests in the stages ``OFFERED`` and ``CUSTODY``."""
    working: int = 0
    working_of: dict[str, int] = field(default_factory=dict)
    """Number of working requests by owner; aliases of a source count as one owner."""
    working_from_owner: int = 0
    """Number of working requests that came directly from their source."""
    held_from_owner: int = 0
    """Number of requests and copies that came directly from their source."""
    last_let_in: dict[str, float] = field(default_factory=dict, compare=False)
    """Time of the last direct transfer by source; aliases count as one source."""

    def moved(self, request: HeldRequest, change: tuple[int, int]) -> None:
        """Update the counts for a transition."""
        copies, held = change
        self.copies += copies
        works = held - copies
        if held and request.upstream == request.owner:
            self.held_from_owner += held
        if works:
            self.working += works
            account, of = owner_of(request.owner), self.working_of
            of[account] = count = of.get(account, 0) + works
            if not count:
                del of[account]
            if request.upstream == request.owner:
                self.working_from_owner += works

    @property
    def total(self) -> int:
        """Number of requests that would be accepted now from all senders together."""
        free, room = self.limits.credits - self.working, self.limits.custody - self.copies
        if free > room:
            free = room
        return free if free > 0 else 0

    def room(self, owner: str) -> int:
        """Return how many more requests a source may have here; sources share the credits equally."""
        account, working_of = owner_of(owner), self.working_of
        sources = len(working_of) + (account not in working_of)
        return max(1, self.limits.credits // sources) - working_of.get(account, 0)

    def of_source(self, name: str, now: float) -> int:
        """Return how many transfers of a linked source would be accepted now."""
        return max(0, min(self.total - self.limits.reserved, self.room(name)), self.guaranteed(name, now))

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
