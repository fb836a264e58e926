"""Inputs of a routing decision besides the request and the neighbors: this process and the model."""

from __future__ import annotations

from typing import NamedTuple

from ls_edge.core.bands import Bands
from ls_edge.core.order_costs import OrderCosts
from ls_edge.runtime.routing.state.limits import Limits

ONE_BAND = Bands(0)
"""Bands of a model of any size whose blocks may run in any order."""


class Model(NamedTuple):
    """What routing knows of the model, from the bundle's manifest."""

    bands: Bands = ONE_BAND
    """A block may run once all bands before its own have ended."""
    costs: OrderCosts | None = None
    """Measured order costs, for policies that need them; None where the bundle has none."""
    bundle_id: str = ""
    """In a peer the bundle that it serves; in a source the only one whose blocks may run, empty for any."""


class LocalNode(NamedTuple):
    """Blocks that this process can run, and their times."""

    blocks: frozenset[int] = frozenset()
    wait_us: int = 0
    """Expected time until its engine would begin."""
    block_us: int = 0
    """Usual time of one engine call."""
    model: Model = Model()
    limits: Limits = Limits()
    beside_us: int = 0
    """Usual time of one engine call while tokens of other tracks are transferred; 0 if not measured."""
