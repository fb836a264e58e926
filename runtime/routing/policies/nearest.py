"""Policy ``nearest``: the reachable block that is closest to the trained order."""

from __future__ import annotations

from ls_edge.runtime.routing.policies.policy import Policy


class Nearest(Policy):
    """Run the first remaining block that can be reached."""

    name = "nearest"
    waits_for_next = True
