"""Settings of a source, the itineraries that follow from them, and checks of values."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, inspect

from ls_edge.core import validation
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.peers_file import EngineKind, Threads
from ls_edge.core.validation import describe_type
from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.routing.policies.policy import Policy

MAX_BUDGET_MS = 600_000.0
"""Maximum budget of a request; peers remember a request for that long."""

BudgetMs = Annotated[float, Meta(gt=0, le=MAX_BUDGET_MS)]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number of 64 bits")]


class Settings(validation.Settings, frozen=True):
    """Settings of a source; :meth:`of` checks every value."""

    policy: str = "nearest"
    budget_ms: BudgetMs = 10_000.0
    """Time limit of a request, including the wait for its turn."""
    max_skips: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    """Maximum number of blocks that an answer may skip; by default a quarter of the model's blocks."""
    seed: Integer = 0
    """Seed of the orders of policy ``random``."""
    max_inflight: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Maximum number of requests in flight; others wait for their turn."""
    threads: Threads | None = None
    """Threads of stem and head; by default as in ``peers.yaml``, else one."""
    engine: EngineKind | None = None
    """Engine of stem and head; by default as in ``peers.yaml``, else ``auto``."""
    provider: str | None = None
    """Execution provider of ONNX Runtime for stem and head; by default as in ``peers.yaml``."""
    waves: Annotated[int, Meta(ge=1, le=1024)] = 2
    """Maximum number of waves of policy ``parallel``: fewer are faster, more are closer to a plain order."""
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of the answers to recompute; see :mod:`ls_edge.runtime.source.audit`."""
    model_wait_s: Annotated[float, Meta(ge=0)] = 5.0
    """Seconds that a source without a bundle waits for a peer that sends its manifest."""
    strict_bundle: bool = False
    """Whether to use only peers with exactly this bundle, not with other bundles of its model."""

    def __post_init__(self) -> None:
        """Check that the policy exists."""
        find_policy(self.policy)

    def check_audit(self, *, is_thin: bool) -> None:
        """Raise :class:`UsageError` if a source cannot audit with these settings; ``is_thin``: without a bundle."""
        if is_thin and self.audit:
            raise UsageError("an audit recomputes answers, which needs the bundle; give it, or omit audit")

    def skips_of(self, blocks: int) -> int:
        """Return the maximum number of blocks that an answer may skip, for a model of ``blocks`` blocks."""
        if self.max_skips is not None and self.max_skips > blocks:
            raise UsageError(f"max_skips {self.max_skips} is larger than the number of blocks; use 0 to {blocks}")
        if not find_policy(self.policy).may_skip:
            return 0
        return blocks // 4 if self.max_skips is None else self.max_skips


def check_policy(bundle: Bundle, policy: Policy) -> None:
    """Raise :class:`UsageError` if a policy cannot run the model of a bundle."""
    if policy.runs_in_waves and bundle.shares_weights:
        raise UsageError(
            f"the blocks of {bundle.folder} are steps of one shared block and run one after the other, so policy "
            f"{policy.name} cannot run them in parallel; use nearest or fastest"
        )


def checked(name: str, value: Any, type_: Any) -> Any:
    """Return a value of a type, with NumPy scalars as Python numbers; raise :class:`UsageError` if it is invalid."""
    try:
        return msgspec.convert(value.item() if isinstance(value, np.generic) else value, type_)
    except (msgspec.ValidationError, OverflowError):
        allowed = describe_type(inspect.type_info(type_))
        raise UsageError(f"{name} {value!r}: use {allowed}") from None


class Itineraries:
    """Factory of the itineraries of a source's requests."""

    def __init__(self, alias: str, settings: Settings, bundle: Bundle, *, is_thin: bool = False) -> None:
        """Use the name ``alias``, by which peers know the source; with ``is_thin``, peers run stem and head."""
        self._is_thin = is_thin
        self._policy, self._seed, self._bands = find_policy(settings.policy), settings.seed, bundle.bands
        self._template = Itinerary(
            alias,
            settings.policy,
            (),
            settings.skips_of(bundle.num_blocks),
            waves_wanted=settings.waves if self._policy.runs_in_waves else 0,
        )

    def of(self, request: int) -> Itinerary:
        """Return the itinerary of a request."""
        order = self._policy.wanted_order(self._bands, self._seed, request)
        return msgspec.structs.replace(self._template, remaining=(STEM, *order, HEAD) if self._is_thin else order)
