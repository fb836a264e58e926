"""When each block was last reachable: a source skips blocks only after they have been out of reach for a while."""

from __future__ import annotations

from ls_edge.runtime.routing.neighbours import Neighbours

_NONE: frozenset[int] = frozenset()
_NEVER = float("-inf")


class LastSeen:
    """Times at which blocks were last reachable, if only through other processes."""

    def __init__(self, neighbours: Neighbours, *, behind: bool) -> None:
        """``behind``: blocks behind neighbours count, too; not where one bundle is demanded."""
        self._neighbours = neighbours
        self._behind = behind
        self._before: dict[int, float] = {}
        """Times of blocks that were reachable at earlier looks."""
        self._blocks = _NONE
        self._at = _NEVER
        """Time of the latest look."""
        self._suspicions = 0

    def changed(self) -> None:
        """Note that what was reachable until now was so, and what is after a STATE or the loss of a link."""
        self._at = self._neighbours.now
        self.look()

    def look(self) -> None:
        """Note what is reachable now."""
        self._update(self._reachable())
        self._at = self._neighbours.now

    def look_at_suspicions(self) -> None:
        """Look again if a neighbour has fallen silent, or is trusted again."""
        if self._suspicions != self._neighbours.suspicions:
            self._suspicions = self._neighbours.suspicions
            self._update(self._reachable())

    def time(self, block: int) -> float:
        """Return the time at which a holder of ``block`` was last reachable; -inf if never."""
        return max(self._at if block in self._blocks else _NEVER, self._before.get(block, _NEVER))

    def _update(self, blocks: frozenset[int]) -> None:
        if blocks != self._blocks:
            if self._at > _NEVER:
                self._before |= dict.fromkeys(self._blocks, self._at)
            self._blocks, self._at = blocks, _NEVER

    def _reachable(self) -> frozenset[int]:
        good = [n for n in self._neighbours if n.serves and not n.is_silent]
        behind = [far for n in good for far in (n.reach_blocks, *n.far_blocks)] if self._behind else []
        return _NONE.union(*[n.blocks for n in good], *behind)
