"""What holds for every request of a source, and the check of each value that a user gives."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.order_costs import OrderCosts
from ls_edge.core.peers_file import EngineKind
from ls_edge.runtime.protocol.messages import MAX_LATENCY_WEIGHT
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.routing.policies.policy import Policy

MAX_BUDGET_MS = 600_000.0
"""Longest budget of a request, which is also how long peers remember one that has ended."""


@dataclass(frozen=True)
class Settings:
    """What holds for every request of a source; raises :class:`UsageError` for a value that cannot be used."""

    policy: str = "nearest"
    budget_ms: float = 10_000.0
    """Time for a request, waiting for its turn included; at most :data:`MAX_BUDGET_MS`."""
    max_skips: int | None = None
    """Most blocks that an answer may leave out; a quarter of the model's where it is None."""
    seed: int = 0
    """Draws the orders of the policy ``random``."""
    max_inflight: int = 64
    """Requests on their way at once; the others wait their turn."""
    via_source: bool = False
    """Every hop through this process, for peers that cannot reach each other."""
    threads: int | None = None
    """Threads of stem and head; what ``peers.yaml`` says of the source where it is None, else one."""
    engine: EngineKind | None = None
    """What runs stem and head: ``auto``, ``onnx`` or ``tensorrt``; as :attr:`threads`, else ``auto``."""
    provider: str | None = None
    """Execution provider of ONNX Runtime for stem and head; as :attr:`threads`."""
    latency_weight: float = 1.0
    """What a second is worth to the policy ``quality``, in nats of log-likelihood."""
    waves: int = 2
    """Waves in which the policy ``parallel`` runs a model: fewer are faster, more are nearer to a plain order."""
    on_straggler: Literal["later", "skip"] = "later"
    """What becomes of the blocks of a track that does not come back: they run later, or are left out while
    :attr:`max_skips` allows."""
    audit: float = 0.0
    """Share of the answers that are computed a second time in this process; see :mod:`ls_edge.runtime.source.audit`."""

    def __post_init__(self) -> None:
        """Check every field and make numbers of other libraries Python's own."""
        if str(self.policy) not in POLICIES:
            raise UsageError(f"policy {self.policy!r} is not known here; use one of {', '.join(POLICIES)}")
        if self.on_straggler not in ("later", "skip"):
            raise UsageError(f"on_straggler {self.on_straggler!r} is not known; use later or skip")
        if not isinstance(self.via_source, bool):
            raise UsageError(f"via_source {self.via_source!r} is not True or False")
        checked: dict[str, Any] = {
            "budget_ms": checked_budget(self.budget_ms),
            "seed": whole_number("seed", self.seed, -(2**63), 2**63 - 1),
            "max_inflight": whole_number("max_inflight", self.max_inflight, 1, 1_000_000),
            "latency_weight": _number("latency_weight", self.latency_weight, 0.0, MAX_LATENCY_WEIGHT),
            "waves": whole_number("waves", self.waves, 1, 1024),
            "audit": _number("audit", self.audit, 0.0, 1.0),
        }
        if self.threads is not None:
            checked["threads"] = whole_number("threads", self.threads, 1, 1024)
        if self.max_skips is not None:
            checked["max_skips"] = whole_number("max_skips", self.max_skips, 0, 2**31)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, policy: str, given: Mapping[str, Any]) -> Settings:
        """Make settings of keywords; raises :class:`UsageError` for a name that is none."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise UsageError(f"setting {name!r} is not known; use {', '.join(known)}")
        return cls(policy=policy, **given)

    def skips_of(self, blocks: int) -> int:
        """Most blocks that an answer of a model of ``blocks`` blocks may leave out."""
        if self.max_skips is not None and self.max_skips > blocks:
            raise UsageError(f"max_skips {self.max_skips} is more than the model has blocks; use 0 to {blocks}")
        if not POLICIES[self.policy].may_skip:
            return 0
        return blocks // 4 if self.max_skips is None else self.max_skips


def check_policy(bundle: Bundle, policy: Policy, costs: OrderCosts | None) -> None:
    """Raise :class:`UsageError` where a bundle's model cannot be run with a policy; ``costs`` are its order costs."""
    if policy.needs_order_costs and costs is None:
        raise UsageError(
            f"{bundle.folder} has no order_costs, which the policy {policy.name} goes by; export it again "
            "with --calibrate DATA, or use nearest"
        )
    if policy.runs_in_waves and bundle.shares_weights:
        raise UsageError(
            f"{bundle.folder} has blocks that are steps of one block and run one after the other, so the policy "
            f"{policy.name} cannot run them side by side; use nearest or fastest"
        )


def checked_budget(budget_ms: object) -> float:
    """The budget as a float; raises :class:`UsageError` unless it is above 0 and at most :data:`MAX_BUDGET_MS`."""
    number = _finite(budget_ms)
    if number is None or not 0 < number <= MAX_BUDGET_MS:
        raise UsageError(f"budget_ms {budget_ms!r}: use milliseconds above 0 and at most {MAX_BUDGET_MS:.0f}")
    return number


def whole_number(name: str, value: object, least: int, most: int) -> int:
    """The value as an int; raises :class:`UsageError` unless it is a whole number from ``least`` to ``most``."""
    if type(value) is not bool and isinstance(value, numbers.Integral) and least <= int(value) <= most:
        return int(value)
    raise UsageError(f"{name} {value!r}: use a whole number from {least} to {most}")


def _number(name: str, value: object, least: float, most: float) -> float:
    number = _finite(value)
    if number is None or not least <= number <= most:
        raise UsageError(f"{name} {value!r}: use a number from {least:.7g} to {most:.7g}")
    return number


def _finite(value: object) -> float | None:
    """A number of any library as a float; None for what is no number, or not a finite one."""
    if type(value) is bool or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
