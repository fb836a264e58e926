"""Credits: the number of further requests that a process accepts, given what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ls_edge.runtime.routing.state.held_request import AWAY, CUSTODY, ENDED, NEW, OFFERED, HeldRequest, Stage
from ls_edge.runtime.routing.state.limits import Limits

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

    Half of the credits are reserved for transfers between peers, and each linked source has a few in any case.
    """

    limits: Limits = field(repr=False)
    copies: int = 0
    """Number of requests that were sent to a next holder, or that came on their way home."""
    working: int = 0
    working_of: dict[str, int] = field(default_factory=dict)
    """Number of working requests by source."""

    def moved(self, request: HeldRequest, change: tuple[int, int]) -> None:
        """Update the counts for a transition."""
        copies, held = change
        if held > 0:
            copies = int(bool(request.returning))
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
        if works:
            self.working += works
            counts, owner = self.working_of, request.owner
            counts[owner] = count = counts.get(owner, 0) + works
            if not count:
                del counts[owner]

    @property
    def total(self) -> int:
        """Number of requests that would be accepted now from all senders together."""
        free, room = self.limits.credits - self.working, self.limits.custody - self.copies
        if free > room:
            free = room
        return free if free > 0 else 0

    def of_source(self, name: str) -> int:
        """Return how many transfers of a linked source would be accepted now."""
        return max(0, self.total - self.limits.reserved, self.guaranteed(name))

    def guaranteed(self, source: str) -> int:
        """Return how many transfers of a linked source are accepted whatever others hold, within a bound for all."""
        limits = self.limits
        if self.working + self.copies >= 2 * limits.credits + limits.custody:
            return 0
        return limits.guaranteed - self.working_of.get(source, 0)

    @property
    def lets_through(self) -> bool:
        """Whether there is room for tokens on their way home: as much again as for everything else."""
        return self.working + self.copies < 2 * (self.limits.credits + self.limits.custody)
