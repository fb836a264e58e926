"""A simulated fleet in figures: the document of ``ls-edge simulate --json`` and the input of its table and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from ls_edge.evaluation.run_summary import MOST_REASONS, Floats, Quantiles, Skips, quantiles

SCHEMA = 1

WHOLE, DEGRADED, FAILED = 0, 1, 2
"""What became of a request, in :attr:`SiteOutcome.states`."""


class DeviceLosses(msgspec.Struct, frozen=True):
    """What became of the devices."""

    count: int
    """Devices that were lost while requests were under way."""
    by_kind: dict[str, int]
    up_share: float | None
    """Share of the time that a device was up, on average."""


class ProfileOutcome(msgspec.Struct, frozen=True):
    """The devices of one profile."""

    devices: int
    busy: float | None
    """Share of the time that the engine computed, times of loss included."""


class SimulationSummary(msgspec.Struct, frozen=True):
    """What ``ls-edge simulate --json`` prints; the same settings and seed give the same document."""

    schema: int
    bundle_id: str
    devices: int
    requests: int
    answered: int
    degraded: int
    failed: int
    top1: float | None
    """Always null: no engine runs, so nothing is classified."""
    throughput: float | None
    """Answers a second of the whole fleet: the sum over sites, each from its first submission to its last answer."""
    latency_ms: Quantiles
    """Over answered requests, from the submission of the preprocessed image to the answer."""
    seconds: float
    """Simulated seconds from the first submission to the last outcome, of the site where it took longest."""
    seed: int
    policy: str
    sites: int
    devices_per_site: int
    """Of the largest site."""
    replicas: int
    """Least holders of a block at a site."""
    concurrency: int
    """Requests under way at once at a site, at most."""
    rate: float | None
    """Images a second that were submitted; null for a closed loop."""
    skips: Skips
    retries: int
    """Branches that sources started beyond the first of each request."""
    hops: float | None
    """Transfers of tokens that an answer took, the one back to the source included, on average."""
    errors: dict[str, int]
    """Failed requests by type of error."""
    losses: DeviceLosses
    profiles: dict[str, ProfileOutcome]
    """By name of the profile."""
    placement: dict[str, tuple[int, ...]]
    """Blocks by device, of the first site."""
    churn: str | None
    max_skips: int
    budget_ms: float
    assumptions: list[str]


@dataclass
class SiteOutcome:
    """What became of the requests and devices of one site; times in simulated seconds since its first submission."""

    submitted_s: Floats
    latency_s: Floats
    """Of failed requests until they failed."""
    states: npt.NDArray[np.uint8]
    """:data:`WHOLE`, :data:`DEGRADED` or :data:`FAILED`, ``[requests]``."""
    devices: Counter[str]
    """How many devices the site has of each profile."""
    used: int
    """Devices with blocks."""
    seconds: float = 0.0
    skipped: int = 0
    most_skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why blocks were skipped."""
    retries: int = 0
    hops: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    busy_s: dict[str, float] = field(default_factory=dict)
    """Engine time by profile, summed over its devices."""
    up: list[tuple[float, int]] = field(default_factory=list)
    """How many devices with blocks are up from when on."""

    @property
    def throughput(self) -> float | None:
        """Answers a second, until the last of them."""
        done = (self.submitted_s + self.latency_s)[self.states != FAILED]
        return float(len(done) / done.max()) if done.size and done.max() > 0 else None

    @property
    def up_seconds(self) -> float:
        """Seconds that devices with blocks were up, summed over them."""
        ends = [at for at, _ in self.up[1:]] + [self.seconds]
        return sum(count * (end - at) for (at, count), end in zip(self.up, ends, strict=True))


class SimulationContext(msgspec.Struct, frozen=True):
    """Facts about a simulation that its outcomes do not contain; see :class:`SimulationSummary`."""

    bundle_id: str
    devices: int
    sites: int
    devices_per_site: int
    seed: int
    policy: str
    replicas: int
    concurrency: int
    rate: float | None
    placement: dict[str, tuple[int, ...]]
    churn: str | None
    max_skips: int
    budget_ms: float
    assumptions: list[str]


def summarise_simulation(outcomes: Sequence[SiteOutcome], context: SimulationContext) -> SimulationSummary:
    """Sum the outcomes of all sites up."""
    states = np.concatenate([outcome.states for outcome in outcomes])
    latency = np.concatenate([outcome.latency_s for outcome in outcomes])[states != FAILED] * 1e3
    answered = int((states != FAILED).sum())
    rates = [rate for outcome in outcomes if (rate := outcome.throughput) is not None]
    device_s = sum(outcome.used * outcome.seconds for outcome in outcomes)
    losses = _total(outcome.losses for outcome in outcomes)
    reasons = _total(outcome.reasons for outcome in outcomes)
    skips = Skips(
        _rounded(sum(outcome.skipped for outcome in outcomes) / answered),
        max(outcome.most_skipped for outcome in outcomes), dict(reasons.most_common(MOST_REASONS)),
    ) if answered else Skips()  # fmt: skip
    return SimulationSummary(
        schema=SCHEMA, requests=len(states), answered=answered, degraded=int((states == DEGRADED).sum()),
        failed=len(states) - answered, top1=None, throughput=_rounded(sum(rates)) if rates else None,
        latency_ms=Quantiles(**{name: _rounded(v) for name, v in msgspec.structs.asdict(quantiles(latency)).items()}),
        seconds=_rounded(max(outcome.seconds for outcome in outcomes)) or 0.0, skips=skips,
        retries=sum(outcome.retries for outcome in outcomes),
        hops=_rounded(sum(outcome.hops for outcome in outcomes) / answered) if answered else None,
        errors=dict(_total(outcome.errors for outcome in outcomes).most_common()),
        losses=DeviceLosses(
            sum(losses.values()), dict(losses.most_common()),
            _rounded(sum(outcome.up_seconds for outcome in outcomes) / device_s) if device_s else None,
        ),
        profiles=_profiles(outcomes), **msgspec.structs.asdict(context),
    )  # fmt: skip


def _total(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _profiles(outcomes: Sequence[SiteOutcome]) -> dict[str, ProfileOutcome]:
    devices = _total(outcome.devices for outcome in outcomes)
    busy = {name: sum(outcome.busy_s.get(name, 0.0) for outcome in outcomes) for name in devices}
    seconds = {name: sum(outcome.devices[name] * outcome.seconds for outcome in outcomes) for name in devices}
    return {
        name: ProfileOutcome(count, _rounded(min(1.0, busy[name] / seconds[name])) if seconds[name] else None)
        for name, count in devices.items()
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
