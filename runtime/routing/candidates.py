"""Inputs of a routing decision: this process, and the processes that could take the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ls_edge.core.bands import Bands
from ls_edge.core.order_costs import OrderCosts

ONE_BAND = Bands(0)
"""Bands of a model of any size whose blocks may run in any order."""

_NONE: frozenset[int] = frozenset()


class Candidate(NamedTuple):
    """A process that could be handed the tokens: linked, warm, not draining, not suspected."""

    name: str
    blocks: frozenset[int]
    reach_blocks: frozenset[int]
    """Blocks of the processes that it has links to."""
    credits: int
    """Transfers that it would accept now."""
    wait_us: int
    """Expected time until its engine would begin."""
    block_us: int = 0
    """Usual time of one of its engine calls."""
    link_us: int = 0
    """Usual time of a transfer to it."""
    trip_us: int = 0
    """Usual time of a track beyond queue and engine: the transfers there and back."""
    far_blocks: tuple[frozenset[int], ...] = ()
    """Blocks that are 2, 3, … links away from it."""
    bundle_id: str = ""
    """The bundle that it serves; empty where it does not keep the demand for a bundle."""

    def blocks_behind(self, distance: int) -> frozenset[int]:
        """Return the blocks of its neighbours (0), of their neighbours (1) and so on."""
        if distance == 0:
            return self.reach_blocks
        return self.far_blocks[distance - 1] if distance <= len(self.far_blocks) else _NONE

    def leads_to(self, blocks: Iterable[int]) -> bool:
        """Return whether some of these blocks can be reached through it, apart from its own."""
        return not self.reach_blocks.isdisjoint(blocks) or any(not far.isdisjoint(blocks) for far in self.far_blocks)


class LocalNode(NamedTuple):
    """Blocks that this process can run, and their times."""

    blocks: frozenset[int] = frozenset()
    wait_us: int = 0
    """Expected time until its engine would begin."""
    block_us: int = 0
    """Usual time of one engine call."""
    costs: OrderCosts | None = None
    """Measured order costs of the model; None where the bundle has none."""
    credit_wait: float = 0.25
    """Seconds that a wait for credit may take."""
    beside_us: int = 0
    """Usual time of one engine call while tokens of other tracks are transferred; 0 if not measured."""
    bands: Bands = ONE_BAND
    """Bands of the model: a block may run once all bands before its own have ended."""
