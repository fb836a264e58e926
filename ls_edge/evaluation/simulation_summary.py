"""Summary of a simulated fleet: the document of ``ls-edge simulate --json`` and the input of tables and reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from ls_edge.core.parts import ShownPart
from ls_edge.core.text import counted, show_nines
from ls_edge.evaluation.run_summary import Floats, Quantiles, Skips, quantiles

WHOLE, DEGRADED, FAILED = 0, 1, 2
"""Outcomes of a request in :attr:`SiteOutcome.states`."""


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulated fleet."""

    devices: int
    requests: int
    policy: str = "nearest"
    max_skips: int = 0
    budget_ms: float = 10_000.0
    rate: float | None = None
    """Images per second for the whole fleet; null for a closed loop."""
    seed: int = 0


class SimulationContext(FleetSettings, frozen=True, kw_only=True):
    """Settings of a simulation, and the sites that were planned for them."""

    bundle_id: str
    replicas: int
    """Minimum number of holders of a block."""
    concurrency: int
    """Concurrent requests per site."""
    churn: str | None
    sites: int
    placement: dict[str, tuple[ShownPart, ...]]
    """Parts of each device of the first site."""
    assumptions: list[str]


class SimulationSummary(SimulationContext, frozen=True, kw_only=True):
    """Document of ``ls-edge simulate --json``; the same settings and seed give the same document."""

    answered: int
    degraded: int
    failed: int
    top1: None = None
    """Null: no engine runs."""
    throughput: float | None
    """Answers per second of the fleet, the sum over sites from the beginning to the last answer of each."""
    latency_ms: Quantiles
    """Latency of answered requests, from the submission of the preprocessed image to the answer."""
    seconds: float
    """Simulated seconds from the beginning to the last outcome at the slowest site."""
    skips: Skips
    retries: int
    """Number of branches that sources started in addition to the first one of each request."""
    hops: float | None
    """Mean number of transfers of tokens per answer, including the return to the source."""
    errors: dict[str, int]
    losses: int
    """Number of times that a device was lost while requests were in flight."""
    up_share: float | None
    """Fraction of the time in which devices with blocks were up."""
    busy: dict[str, float]
    """Fraction of the time in which the engines of the devices with a profile computed."""

    @property
    def answer(self) -> str:
        """Sentence about the outcomes."""
        whole = (self.answered - self.degraded) / self.requests
        return (
            f"{show_nines(whole)} of the requests get a complete answer, {counted(self.degraded, 'answer')} skipped "
            f"blocks, {counted(self.failed, 'request')} failed"
        )


@dataclass
class SiteOutcome:
    """Requests and devices of a site; times are simulated seconds since its beginning."""

    submitted_s: Floats
    latency_s: Floats
    """Time until the answer or failure."""
    states: npt.NDArray[np.uint8]
    """:data:`WHOLE`, :data:`DEGRADED`, or :data:`FAILED`, ``[requests]``."""
    devices: Counter[str]
    """Number of devices with blocks, by profile."""
    seconds: float = 0.0
    skipped: int = 0
    most_skipped: int = 0
    retries: int = 0
    hops: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    losses: int = 0
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Total engine time of the devices, by profile."""
    up: list[tuple[float, int]] = field(default_factory=list)
    """Times of changes, and the number of devices with blocks that are up from each time on."""

    @property
    def throughput(self) -> float:
        """Answers per second until the last answer."""
        done = (self.submitted_s + self.latency_s)[self.states != FAILED]
        return float(len(done) / done.max()) if done.size and done.max() > 0 else 0.0

    @property
    def up_s(self) -> float:
        """Total seconds for which devices with blocks were up."""
        times = [*(at for at, _ in self.up), self.seconds]
        return float(np.dot(np.diff(times), [count for _, count in self.up]))


def summarize_simulation(outcomes: Sequence[SiteOutcome], context: SimulationContext) -> SimulationSummary:
    """Combine the outcomes of all sites."""
    states = np.concatenate([outcome.states for outcome in outcomes])
    latency = np.concatenate([outcome.latency_s for outcome in outcomes])[states != FAILED] * 1e3
    answered = len(latency)
    skipped = sum(outcome.skipped for outcome in outcomes)
    device_s: dict[str, float] = defaultdict(float)
    busy_s: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        for name, count in outcome.devices.items():
            device_s[name] += count * outcome.seconds
            busy_s[name] += outcome.busy_s[name]
    up_s, total_s = sum(outcome.up_s for outcome in outcomes), sum(device_s.values())
    return SimulationSummary(
        answered=answered,
        degraded=int((states == DEGRADED).sum()),
        failed=len(states) - answered,
        throughput=round(sum(outcome.throughput for outcome in outcomes), 6) if answered else None,
        latency_ms=quantiles(latency),
        seconds=round(max(outcome.seconds for outcome in outcomes), 6),
        skips=Skips(skipped / answered, max(outcome.most_skipped for outcome in outcomes)) if answered else Skips(),
        retries=sum(outcome.retries for outcome in outcomes),
        hops=sum(outcome.hops for outcome in outcomes) / answered if answered else None,
        errors=dict(sum((outcome.errors for outcome in outcomes), Counter[str]()).most_common()),
        losses=sum(outcome.losses for outcome in outcomes),
        up_share=round(up_s / total_s, 6) if total_s else None,
        busy={name: round(min(1.0, busy_s[name] / seconds), 6) for name, seconds in device_s.items() if seconds},
        **msgspec.structs.asdict(context),
    )
