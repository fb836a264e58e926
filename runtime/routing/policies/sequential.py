"""Policy ``sequential``: the trained order, or no answer."""

from __future__ import annotations

from ls_edge.runtime.routing.policies.policy import Policy


class Sequential(Policy):
    """Never reorder and never skip."""

    name = "sequential"
    waits_for_next = True
    may_skip = False
    may_reorder = False
