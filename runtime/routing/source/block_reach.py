"""Blocks that a source reaches, and since when it does not reach the others."""

from __future__ import annotations

from collections.abc import Iterable

from ls_edge.runtime.routing.state.events import Event
from ls_edge.runtime.routing.state.held_request import INFINITY
from ls_edge.runtime.routing.state.turn import Turn


class BlockReach:
    """Times at which blocks were last reachable, at or through neighbors that are not silent."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._reachable: frozenset[int] = frozenset()
        """Blocks that were reachable when last checked."""
        self._last_reachable: dict[int, float] = {}
        """Time at which each block was last reachable, before that check."""
        self._looked_at, self._since = -INFINITY, INFINITY

    def look(self, event: Event | None = None) -> None:
        """Record which blocks are reachable.

        Blocks of the previous check count as reachable until now if an event may have changed them, otherwise until
        that check. If the source demands a bundle, blocks behind neighbors do not count.
        """
        until = self._looked_at if event is None else self._turn.now
        good = [n for n in self._turn.neighbors if n.serves and not n.is_silent]
        behind = [] if self._turn.model.bundle_id else [n.reach_blocks for n in good]
        self._last_reachable |= dict.fromkeys(self._reachable, until)
        self._reachable = frozenset().union(*[n.blocks for n in good], *behind)
        self._looked_at, self._since = self._turn.now, min(self._since, self._turn.now)

    def lost_since(self, blocks: Iterable[int]) -> float:
        """Return the time from which none of the blocks was reachable; for those never seen, the first look."""
        self.look()
        seen = self._last_reachable | dict.fromkeys(self._reachable, self._turn.now)
        return max(seen.get(block, self._since) for block in blocks)
