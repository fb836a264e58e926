"""What a decision goes by: this process, the others, and what orders cost; made from what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from ls_edge.runtime.routing.block_assignment import OrderCostTables as OrderCostTables

__all__ = ["Candidate", "OrderCostTables", "Own"]


@dataclass(frozen=True)
class Candidate:
    """A process that could be handed the tokens: linked, warm, not draining, not suspected."""

    name: str
    blocks: frozenset[int]
    reach_blocks: frozenset[int]
    """Blocks of the processes that it reaches itself."""
    credits: int
    """Transfers that it would accept now."""
    wait_us: int
    """Expected time until its engine would begin."""
    block_us: int = 0
    """What one engine call usually takes it."""
    link_us: int = 0
    """What handing tokens over to it usually takes."""
    trip_us: int = 0
    """What a track of it usually takes beyond queue and engine: the way there and back."""


@dataclass(frozen=True)
class Own:
    """What this process can run itself."""

    blocks: frozenset[int] = frozenset()
    wait_us: int = 0
    block_us: int = 0
    costs: OrderCostTables | None = None
    """What orders cost this model, where it was measured."""
    credit_wait: float = 0.25
    """Seconds that a wait for credit may take."""
    beside_us: int = 0
    """What one engine call usually takes while tokens of other tracks are on their way; 0 where that is not known."""
