"""Inputs of a routing decision: this process, and the processes that could take the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from ls_edge.core.bands import Bands
from ls_edge.core.order_costs import OrderCosts
from ls_edge.runtime.routing.limits import Limits

ONE_BAND = Bands(0)
"""Bands of a model of any size whose blocks may run in any order."""


class Candidate(Protocol):
    """A process that could be handed the tokens: linked, warm, not draining, not suspected."""

    @property
    def name(self) -> str:
        """Name of the process."""

    @property
    def blocks(self) -> frozenset[int]:
        """Blocks that it serves."""

    @property
    def reach_blocks(self) -> frozenset[int]:
        """Blocks of the processes that it is linked to."""

    @property
    def far_blocks(self) -> tuple[frozenset[int], ...]:
        """Blocks that are 2, 3, … links away from it."""

    @property
    def credits(self) -> int:
        """Number of transfers that it would accept now."""

    @property
    def wait_us(self) -> int:
        """Expected time until its engine would begin."""

    @property
    def block_us(self) -> int:
        """Usual time of one of its engine calls."""

    @property
    def link_us(self) -> int:
        """Usual time of a transfer to it."""

    @property
    def trip_us(self) -> int:
        """Usual time of a track beyond queue and engine: the transfers there and back."""


class FixedCandidate(NamedTuple):
    """A candidate as it is at one moment; see :class:`Candidate`."""

    name: str
    blocks: frozenset[int]
    reach_blocks: frozenset[int]
    credits: int
    wait_us: int
    block_us: int = 0
    link_us: int = 0
    trip_us: int = 0
    far_blocks: tuple[frozenset[int], ...] = ()


def leads_to(candidate: Candidate, blocks: Iterable[int]) -> bool:
    """Return whether some of these blocks can be reached through a candidate, apart from its own."""
    return any(not far.isdisjoint(blocks) for far in (candidate.reach_blocks, *candidate.far_blocks))


class LocalNode(NamedTuple):
    """Blocks that this process can run, and their times."""

    blocks: frozenset[int] = frozenset()
    wait_us: int = 0
    """Expected time until its engine would begin."""
    block_us: int = 0
    """Usual time of one engine call."""
    costs: OrderCosts | None = None
    """Measured order costs of the model; None where the bundle has none."""
    limits: Limits = Limits()
    beside_us: int = 0
    """Usual time of one engine call while tokens of other tracks are transferred; 0 if not measured."""
    bands: Bands = ONE_BAND
    """Bands of the model: a block may run once all bands before its own have ended."""


class Model(NamedTuple):
    """What routing knows of the model, from the bundle's manifest."""

    bands: Bands = ONE_BAND
    costs: OrderCosts | None = None
    """Measured order costs, for policies that need them."""
    bundle_id: str = ""
    """In a peer the bundle that it serves; in a source the only one whose blocks may run, empty for any."""
