"""Model and process that a routing decision is about."""

from __future__ import annotations

from typing import NamedTuple

from ls_edge.core.bands import Bands

ONE_BAND = Bands(0)
"""Bands of a model of any size whose blocks may run in any order."""


class Model(NamedTuple):
    """Properties of the model, from the bundle's manifest."""

    bands: Bands = ONE_BAND
    bundle_id: str = ""
    """In a peer, the bundle that it serves; in a source, the only bundle whose blocks may run, empty for any."""


class LocalNode(NamedTuple):
    """Blocks that this process can run, and how long they take."""

    blocks: frozenset[int] = frozenset()
    wait_us: int = 0
    """Expected time until the engine is free."""
    block_us: int = 0
    """Typical time of an engine call."""
    model: Model = Model()
