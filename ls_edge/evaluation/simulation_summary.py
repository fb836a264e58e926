"""Summary of a simulated fleet: the document of ``ls-edge simulate --json`` and the input of tables and reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.parts import ShownPart
from ls_edge.core.text import counted, show_hours, show_nines, show_nines_range
from ls_edge.evaluation.availability import Batches, Interval, ShareEstimate
from ls_edge.evaluation.run_summary import MOST_REASONS, Floats, Quantiles, Skips, quantiles

SCHEMA = 1

WHOLE, DEGRADED, FAILED = 0, 1, 2
"""Outcomes of a request in :attr:`SiteOutcome.states`."""
SPREAD = 0.5
"""Half of an interval, relative to the share of misses, above which a result counts as uncertain. A smaller interval
needs about 40 outages."""


class DeviceLosses(msgspec.Struct, frozen=True):
    """Devices lost during the simulation."""

    count: int
    """Number of devices that were lost while requests were in flight; some may have been lost before."""
    by_kind: dict[str, int]
    up_share: float | None


class ProfileOutcome(msgspec.Struct, frozen=True):
    """Devices with the same profile."""

    devices: int
    busy: float | None
    """Fraction of the total time, including losses, in which the engine computed."""
    watts: float | None = None
    """Mean power of a device, which is 0 while it is lost; None if the profile has no power."""
    battery_h: float | None = None
    """Battery life in hours at the mean power while the device is up."""


class Power(NamedTuple):
    """Power of a device in watts while it computes and while idle, and its battery in watt-hours; None if unknown."""

    watts: float | None
    idle_watts: float | None
    battery_wh: float | None


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulated fleet."""

    devices: int
    requests: int
    policy: str = "nearest"
    max_skips: int = 0
    budget_ms: float = 10_000.0
    replicas: int | None = None
    """Minimum number of holders of a block; None for two if memory allows. Always set in a document."""
    concurrency: int | None = None
    """Concurrent requests per site; None for a number that keeps its devices busy. Always set in a document."""
    rate: float | None = None
    """Images per second for the whole fleet; null for a closed loop."""
    seed: int = 0
    outage_s: float = 0.0
    """Mean time for which a device is lost; 0 without losses."""
    execute: int = 0
    """Number of answers whose orders also run through engines on this machine."""
    until: float | None = None
    """Half of the interval of whole answers, relative to all other answers, at which the simulation may stop."""


class SimulationContext(FleetSettings, frozen=True, kw_only=True):
    """Settings of a simulation, and the sites that were planned for them."""

    bundle_id: str
    sites: int
    devices_per_site: int
    placement: dict[str, tuple[ShownPart, ...]]
    churn: list[str]
    assumptions: list[str]


class SimulationSummary(SimulationContext, frozen=True, kw_only=True):
    """Document of ``ls-edge simulate --json``; the same settings and seed give the same document."""

    schema: int
    answer: str
    """Sentence about the fraction of whole answers and its uncertainty."""
    whole_share: ShareEstimate
    """Fraction of requests for which all blocks ran."""
    answered_share: ShareEstimate
    """Fraction of requests with a whole or degraded answer."""
    answered: int
    degraded: int
    failed: int
    top1: float | None
    """Accuracy of :attr:`executed` orders, each on a different image; null without any."""
    top1_interval: Interval | None
    executed: int
    """Number of randomly chosen answers whose orders ran through engines."""
    throughput: float | None
    """Answers per second of the fleet, the sum over sites from the beginning to the last answer of each."""
    throughput_interval: Interval | None
    """The 95 % interval of :attr:`throughput`."""
    latency_ms: Quantiles
    """Latency of answered requests, from the submission of the preprocessed image to the answer."""
    latency_intervals_ms: dict[str, Interval]
    """The 95 % intervals of the median and of the 95th and 99th percentile; empty for answers of a single batch."""
    seconds: float
    """Simulated seconds from the beginning to the last outcome at the slowest site."""
    skips: Skips
    retries: int
    """Number of branches that sources started in addition to the first one of each request."""
    hops: float | None
    """Mean number of transfers of tokens per answer, including the return to the source."""
    errors: dict[str, int]
    losses: DeviceLosses
    profiles: dict[str, ProfileOutcome]
    energy_mj: float | None
    """Energy of all devices per answer, including idle time; null if a profile has no power."""
    link_bytes: dict[str, int]
    """Payload bytes on each link of the first site, by ``sender > receiver``."""
    warnings: list[str]


class Cell(msgspec.Struct, frozen=True):
    """A combination of values and its results over all seeds."""

    values: dict[str, str]
    summary: SimulationSummary


class SweepDocument(msgspec.Struct, frozen=True):
    """Document of ``ls-edge simulate --sweep``."""

    sweep: dict[str, list[str]]
    """Values by option, in the order of the command line."""
    seeds: int
    settings: str
    """All other options as text; a file can be continued only with the same ones."""
    cells: list[Cell]


_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass
class SiteOutcome:
    """Requests and devices of a site; times are simulated seconds since its beginning."""

    submitted_s: Floats
    latency_s: Floats
    """Time until the answer or failure."""
    states: npt.NDArray[np.uint8]
    """:data:`WHOLE`, :data:`DEGRADED`, or :data:`FAILED`, ``[requests]``."""
    devices: Counter[str]
    used: int
    seconds: float = 0.0
    skipped: int = 0
    most_skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    hops: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    has_outage: bool = False
    """Whether a device or the source was lost or slow at some time, the beginning included."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Total engine time of the devices, by profile."""
    power: dict[str, Power] = field(default_factory=dict)
    """Power by profile."""
    link_bytes: dict[str, int] = field(default_factory=dict)
    orders: list[Arrangement] = field(default_factory=list)
    """Arrangements of randomly chosen answers."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """Total seconds for which devices with blocks were lost, by profile."""
    up: list[tuple[float, int]] = field(default_factory=list)
    """Times of changes, and the number of devices with blocks that are up from each time on."""

    @property
    def throughput(self) -> float | None:
        """Answers per second until the last answer."""
        done = (self.submitted_s + self.latency_s)[self.states != FAILED]
        return float(len(done) / done.max()) if done.size and done.max() > 0 else None


def whole_share(outcomes: Sequence[SiteOutcome], settings: FleetSettings) -> ShareEstimate:
    """Return the fraction of whole answers with its interval."""
    hit = np.concatenate([outcome.states for outcome in outcomes]) == WHOLE
    return _share(Batches.of(outcomes, settings.outage_s), hit, settings)


def _share(batches: Batches, hit: npt.NDArray[np.bool_], settings: FleetSettings) -> ShareEstimate:
    return batches.share(hit, apart_s=settings.budget_ms / 1e3, spread=settings.until or SPREAD)


def summarize_simulation(outcomes: Sequence[SiteOutcome], context: SimulationContext) -> SimulationSummary:
    """Combine the outcomes of all sites."""
    states = np.concatenate([outcome.states for outcome in outcomes])
    batches, is_answered = Batches.of(outcomes, context.outage_s), states != FAILED
    taken = np.concatenate([outcome.latency_s for outcome in outcomes]) * 1e3
    latency = taken[is_answered]
    answered = int(is_answered.sum())
    intervals = {name: batches.quantile(taken, is_answered, share) for name, share in _SHARES.items()}
    device_s = sum(outcome.used * outcome.seconds for outcome in outcomes)
    losses = _total(outcome.losses for outcome in outcomes)
    reasons = _total(outcome.reasons for outcome in outcomes)
    whole = _share(batches, states == WHOLE, context)
    rounds = max(1, len(outcomes) // context.sites)
    rate, error = _throughput(outcomes, context)
    up_share = 1 - sum(sum(outcome.lost_s.values()) for outcome in outcomes) / device_s if device_s else None
    powers = {name: power for outcome in outcomes for name, power in outcome.power.items()}
    profiles, joules = {}, 0.0
    for name, count in _total(outcome.devices for outcome in outcomes).items():
        busy = sum(outcome.busy_s.get(name, 0.0) for outcome in outcomes)
        seconds = sum(outcome.devices[name] * outcome.seconds for outcome in outcomes)
        share = min(1.0, busy / seconds) if seconds else None
        power = powers[name]
        watts = hours = None
        if share is not None and power.watts is not None and power.idle_watts is not None:
            up = 1 - sum(outcome.lost_s.get(name, 0.0) for outcome in outcomes) / seconds
            watts = power.idle_watts * up + max(0.0, power.watts - power.idle_watts) * share
            hours = power.battery_wh * up / watts if power.battery_wh is not None and watts else None
        joules += math.nan if watts is None else watts * seconds
        profiles[name] = ProfileOutcome(count // rounds, _rounded(share), _rounded(watts), _rounded(hours))
    skips = (
        Skips(
            _rounded(sum(outcome.skipped for outcome in outcomes) / answered),
            max(outcome.most_skipped for outcome in outcomes),
            dict(reasons.most_common(MOST_REASONS)),
        )
        if answered
        else Skips()
    )
    return SimulationSummary(
        schema=SCHEMA,
        answer=answer_text(whole, context.sites),
        whole_share=whole,
        answered_share=_share(batches, is_answered, context),
        answered=answered,
        degraded=int((states == DEGRADED).sum()),
        failed=len(states) - answered,
        top1=None,
        top1_interval=None,
        executed=0,
        throughput=_rounded(rate) if rate else None,
        throughput_interval=_rounded_interval(max(0.0, rate - error), rate + error) if rate else None,
        latency_ms=Quantiles(**{name: _rounded(v) for name, v in msgspec.structs.asdict(quantiles(latency)).items()}),
        latency_intervals_ms={name: _rounded_interval(*one) for name, one in intervals.items() if one is not None},
        seconds=_rounded(max(outcome.seconds for outcome in outcomes)) or 0.0,
        skips=skips,
        retries=sum(outcome.retries for outcome in outcomes),
        hops=_rounded(sum(outcome.hops for outcome in outcomes) / answered) if answered else None,
        errors=dict(_total(outcome.errors for outcome in outcomes).most_common()),
        losses=DeviceLosses(
            sum(losses.values()),
            dict(losses.most_common()),
            _rounded(up_share),
        ),
        profiles=profiles,
        energy_mj=_rounded(1e3 * joules / answered) if answered and not math.isnan(joules) else None,
        link_bytes=outcomes[0].link_bytes,
        warnings=_warnings(whole, context, has_losses=any(outcome.has_outage for outcome in outcomes)),
        **{**msgspec.structs.asdict(context), "requests": len(states)},
    )


def _throughput(outcomes: Sequence[SiteOutcome], context: SimulationContext) -> tuple[float, float]:
    """Return the throughput of all sites and half of its interval; only sites with the same devices are alike."""
    alike: dict[frozenset[tuple[str, int]], list[SiteOutcome]] = {}
    for outcome in outcomes:
        alike.setdefault(frozenset(outcome.devices.items()), []).append(outcome)
    total = squares = 0.0
    for sites in alike.values():
        rate = sum(one.throughput or 0.0 for one in sites) * context.sites / len(outcomes)
        is_answered = np.concatenate([one.states for one in sites]) != FAILED
        total += rate
        squares += (rate * Batches.of(sites, context.outage_s).spread_of_rate(is_answered)) ** 2
    return total, math.sqrt(squares)


def answer_text(whole: ShareEstimate, sites: int) -> str:
    """Return a sentence about the fraction of whole answers and its uncertainty."""
    seen = counted(whole.outages, "outage") if whole.outages else "no outage"
    hours = f"{show_hours(whole.hours)}{' of all sites together' if sites > 1 else ''}"
    return (
        f"{show_nines(whole.share)} of the requests get a whole answer (95 % interval "
        f"{show_nines_range(whole.low, whole.high)}; {seen} in {hours})"
    )


def _warnings(whole: ShareEstimate, context: SimulationContext, *, has_losses: bool) -> list[str]:
    """Return warnings about a result that is less certain than it seems."""
    if not context.churn:
        return []
    longer = "more --requests or a lower --rate" + ("" if context.until else ", or with --until 10%")
    if not has_losses and not whole.outages:
        return [
            f"no device was lost in {show_hours(whole.hours)}, so this says nothing about outages; simulate longer "
            f"with {longer}"
        ]
    if not whole.outages:
        return [
            f"no outage was seen, so the share of whole answers is only known to be {show_nines(whole.low)} or more"
        ]
    wanted = context.until or SPREAD
    if whole.spread <= wanted:
        return []
    more = f"; about {show_hours(whole.more_hours)} more are enough" if whole.more_hours else ""
    option = f" (--until {100 * wanted:.0f}%)" if more else ""
    how = f"; --until {100 * wanted:.3g}% was not reached, so give {longer}" if context.until else option
    return [f"{counted(whole.outages, 'outage')} seen: the answer is uncertain{more}{how}"]


def _total(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter[str]())


def _rounded_interval(low: float, high: float) -> Interval:
    return Interval(round(low, 6), round(high, 6))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
