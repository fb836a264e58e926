"""Policies by name. A new policy is a file in this folder and a line of :data:`POLICIES`."""

from __future__ import annotations

from ls_edge.runtime.routing.policies.fastest import Fastest
from ls_edge.runtime.routing.policies.nearest import Nearest
from ls_edge.runtime.routing.policies.parallel import Parallel
from ls_edge.runtime.routing.policies.policy import Policy
from ls_edge.runtime.routing.policies.quality import Quality
from ls_edge.runtime.routing.policies.random import Random
from ls_edge.runtime.routing.policies.sequential import Sequential

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (Nearest(), Sequential(), Fastest(), Random(), Quality(), Parallel())
}


def policy_of(name: str) -> Policy:
    """Return the policy that an itinerary names; ``nearest`` if this version does not know it."""
    return POLICIES.get(name) or POLICIES["nearest"]
