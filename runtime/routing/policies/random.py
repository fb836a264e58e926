"""The policy ``random``: the reachable block that is closest to a permutation that the source draws."""

from __future__ import annotations

from ls_edge.core.bands import Bands
from ls_edge.runtime.routing.policies.policy import Policy


class Random(Policy):
    """Policy ``nearest`` with an order drawn uniformly within the bands from seed and request."""

    name = "random"
    waits_for_next = True

    def wanted_order(self, bands: Bands, seed: int, request: int) -> tuple[int, ...]:
        """Draw an order; the same for the same seed and request on every machine."""
        return bands.random_order(seed, request)
