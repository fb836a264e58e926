"""Settings that hold for every request of a source, the itineraries that follow from them, and checks of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta, inspect

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.order_costs import OrderCosts
from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.peers_file import EngineKind, Threads
from ls_edge.core.validation import describe_type, unknown_name
from ls_edge.runtime.protocol.messages import MAX_LATENCY_WEIGHT, Itinerary
from ls_edge.runtime.routing.policies import POLICIES, policy_of
from ls_edge.runtime.routing.policies.policy import Policy

MAX_BUDGET_MS = 600_000.0
"""Limit on the budget of a request; peers remember a request for that long."""

BudgetMs = Annotated[float, Meta(gt=0, le=MAX_BUDGET_MS)]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number of 64 bits")]
PolicyName = Annotated[str, Meta(pattern=rf"^({'|'.join(POLICIES)})\Z", description=f"one of {', '.join(POLICIES)}")]


@dataclass(frozen=True)
class Settings:
    """Settings of a source; raises :class:`UsageError` for a value that cannot be used."""

    policy: PolicyName = "nearest"
    budget_ms: BudgetMs = 10_000.0
    """Time for a request, including the wait for its turn."""
    max_skips: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    """Maximum of blocks that an answer may leave out; by default a quarter of the model's."""
    seed: Integer = 0
    """Seed of the orders of the policy ``random``."""
    max_inflight: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Requests in flight at the same time; the others wait for their turn."""
    via_source: bool = False
    """Send every hop through this process, for peers that cannot reach one another."""
    threads: Threads | None = None
    """Threads of stem and head; by default those that ``peers.yaml`` gives this source, else one."""
    engine: EngineKind | None = None
    """Engine of stem and head; by default that of ``peers.yaml``, else ``auto``."""
    provider: str | None = None
    """Execution provider of ONNX Runtime for stem and head; by default that of ``peers.yaml``."""
    latency_weight: Annotated[float, Meta(ge=0, le=MAX_LATENCY_WEIGHT)] = 1.0
    """Value of a second to the policy ``quality``, in nats of log-likelihood."""
    waves: Annotated[int, Meta(ge=1, le=1024)] = 2
    """Waves in which the policy ``parallel`` runs a model: fewer are faster, more are closer to a plain order."""
    on_straggler: Literal["later", "skip"] = "later"
    """Run blocks of a track that does not come back later, or leave them out as far as ``max_skips`` allows."""
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of the answers to recompute; see :mod:`ls_edge.runtime.source.audit`."""
    auditor: str = ""
    """Peer that recomputes them for a source without a bundle: it is trusted, and holds everything."""
    strict_bundle: bool = False
    """Use only peers with exactly the source's bundle, not with others of its model."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name, type_ in get_type_hints(Settings, include_extras=True).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), type_))
        if POLICIES[self.policy].runs_in_waves and self.via_source:
            raise UsageError(
                f"policy {self.policy} needs peers that reach one another, not every hop through the source; use "
                "fastest, or leave --via source out"
            )
        if self.auditor and (not self.audit or POLICIES[self.policy].runs_in_waves):
            raise UsageError(
                f"auditor {self.auditor!r} recomputes a share of answers in one order; set audit, and another policy "
                "than parallel"
            )

    @classmethod
    def of(cls, policy: str, given: Mapping[str, Any]) -> Settings:
        """Make settings of keywords; raise :class:`UsageError` for an unknown one."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise UsageError(unknown_name("setting", name, known))
        return cls(policy=policy, **given)

    def check_audit(self, *, is_thin: bool) -> None:
        """Raise :class:`UsageError` if a source cannot audit so; ``is_thin`` where it has no bundle."""
        if is_thin and self.audit and not self.auditor:
            raise UsageError(
                "an audit computes answers again, which needs the bundle; give it, or name a trusted peer that has "
                "everything as auditor, or leave audit out"
            )
        if self.auditor and not is_thin:
            raise UsageError(
                f"auditor {self.auditor!r}: this source has the bundle and audits itself; leave auditor out"
            )

    def skips_of(self, blocks: int) -> int:
        """Return the most blocks that an answer may leave out of a model of ``blocks`` blocks."""
        if self.max_skips is not None and self.max_skips > blocks:
            raise UsageError(f"max_skips {self.max_skips} is more than the model has blocks; use 0 to {blocks}")
        if not POLICIES[self.policy].may_skip:
            return 0
        return blocks // 4 if self.max_skips is None else self.max_skips


def check_policy(bundle: Bundle, policy: Policy, costs: OrderCosts | None) -> None:
    """Raise :class:`UsageError` if the model of a bundle cannot run with a policy; ``costs`` are its order costs."""
    if policy.needs_order_costs and costs is None:
        raise UsageError(
            f"{bundle.folder} has no order_costs, which the policy {policy.name} needs; export it again with "
            "--calibrate DATA, or use nearest"
        )
    if policy.runs_in_waves and bundle.shares_weights:
        raise UsageError(
            f"{bundle.folder} has blocks that are steps of one block and run one after the other, so the policy "
            f"{policy.name} cannot run them side by side; use nearest or fastest"
        )


def checked(name: str, value: Any, type_: Any) -> Any:
    """Return a value that fits a type, numbers of NumPy as Python's; raise :class:`UsageError` for any other."""
    try:
        return msgspec.convert(value.item() if isinstance(value, np.generic) else value, type_)
    except (msgspec.ValidationError, OverflowError):
        allowed = describe_type(inspect.type_info(type_))
        raise UsageError(f"{name} {value!r}: use {allowed}") from None


class Itineraries:
    """Makes the itineraries of a source's requests."""

    def __init__(self, alias: str, settings: Settings, bundle: Bundle, *, is_thin: bool = False) -> None:
        """``alias`` is the name by which peers know the source; ``is_thin`` where they run stem and head too."""
        self._is_thin, self._auditor = is_thin, settings.auditor
        self._policy, self._seed, self._bands = POLICIES[settings.policy], settings.seed, bundle.bands
        self._template = Itinerary(
            alias,
            settings.policy,
            (),
            settings.skips_of(bundle.num_blocks),
            settings.via_source,
            latency_weight=settings.latency_weight,
            waves_wanted=settings.waves if self._policy.runs_in_waves else 0,
            on_straggler=settings.on_straggler,
        )

    def of(self, request: int) -> Itinerary:
        """Return the itinerary of a request."""
        order = self._policy.wanted_order(self._bands, self._seed, request)
        return msgspec.structs.replace(self._template, remaining=(STEM, *order, HEAD) if self._is_thin else order)

    def challenge(self, answer: Itinerary) -> Itinerary:
        """Return the itinerary of a challenge of an answer, or of its audit by a peer."""
        if self._is_thin:  # one peer repeats the answer, its order and skipped blocks included
            return msgspec.structs.replace(
                self._template,
                policy="sequential",
                remaining=tuple(part for wave in answer.waves for track in wave for part, _ in track),
                skipped=answer.skipped,
                max_skips=len(answer.skipped),
                via_source=False,
                hand_to=self._auditor,
            )
        return challenge_itinerary(self._template, answer, self._bands)


def challenge_itinerary(asked: Itinerary, answer: Itinerary, bands: Bands) -> Itinerary:
    """Return the itinerary of a challenge: the blocks in the order of the answer, all via the source.

    In each band the blocks that the answer skipped come last.
    """
    ran = tuple(block for wave in answer.waves for track in wave for block, _ in track)
    return msgspec.structs.replace(
        asked,
        policy="nearest" if policy_of(asked.policy).runs_in_waves else asked.policy,
        remaining=bands.sort((*ran, *answer.skipped)),
        via_source=True,
        waves_wanted=0,
        on_straggler="later",
    )
