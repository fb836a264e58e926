"""Policy ``random``: the reachable block that is closest to a permutation drawn by the source."""

from __future__ import annotations

from ls_edge.core.bands import Bands
from ls_edge.runtime.routing.policies.policy import Policy


class Random(Policy):
    """Run blocks as ``nearest`` does, in an order drawn uniformly within the bands."""

    name = "random"
    waits_for_next = True

    def wanted_order(self, bands: Bands, seed: int, request: int) -> tuple[int, ...]:
        """Draw an order, the same for a seed and request on every machine."""
        return bands.random_order(seed, request)
