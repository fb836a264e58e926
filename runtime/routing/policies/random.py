"""The policy ``random``: the reachable block that is closest to a permutation that the source draws."""

from __future__ import annotations

from ls_edge.arrangement import random_order
from ls_edge.runtime.routing.policies.policy import Policy


class Random(Policy):
    """As ``nearest``, with one uniform permutation drawn from seed and request in place of the trained order."""

    name = "random"

    def wanted_order(self, num_blocks: int, seed: int, request: int) -> tuple[int, ...]:
        """Draw a permutation; the same for the same seed and request on every machine."""
        return random_order(num_blocks, seed, request)
