"""Policies by name: a file in this folder and a line of :data:`POLICIES`, or a class of another package."""

from __future__ import annotations

import logging

from ls_edge.core import plugins
from ls_edge.core.errors import UsageError
from ls_edge.runtime.routing.policies.fastest import Fastest
from ls_edge.runtime.routing.policies.nearest import Nearest
from ls_edge.runtime.routing.policies.parallel import Parallel
from ls_edge.runtime.routing.policies.policy import Policy
from ls_edge.runtime.routing.policies.random import Random
from ls_edge.runtime.routing.policies.sequential import Sequential

logger = logging.getLogger(__name__)

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (Nearest(), Sequential(), Fastest(), Random(), Parallel())
}


def find_policy(name: str) -> Policy:
    """Return a policy of this or another package (:mod:`ls_edge.core.plugins`); raise :class:`UsageError` for none."""
    if name not in POLICIES:
        kind = plugins.load("policies", name, Policy, POLICIES)
        if getattr(kind, "name", None) != name:
            raise UsageError(f"policy {name!r}: {kind.__module__}.{kind.__name__} needs the attribute name = {name!r}")
        POLICIES[name] = kind()
    return POLICIES[name]


def policy_of(name: str) -> Policy:
    """Return the policy that an itinerary names; ``nearest`` if it is not installed here."""
    if name not in POLICIES and name in plugins.registered("policies"):
        try:
            return find_policy(name)
        except UsageError as error:
            logger.warning("%s; nearest is used", error)
            POLICIES[name] = POLICIES["nearest"]
    return POLICIES.get(name) or POLICIES["nearest"]
