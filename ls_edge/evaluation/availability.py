"""Confidence intervals of simulated shares and quantiles, whose uncertainty comes from outages, not from requests.

Requests during one outage share their fate, so a million requests during three outages carry little information. The
time of each site is divided into batches that are long compared with an outage, so the misses of batches are
independent, and few batches have any. Their sum is approximately a compound Poisson variable. For such variables, the
gamma interval of Fay and Feuer (1997, "Confidence intervals for directly standardized rates") has correct coverage even
after a handful of outages, when the normal interval is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ls_edge.evaluation.run_summary import Floats

LEVEL = 0.95
OUTAGES_A_BATCH = 20
"""Length of a batch in typical outages, so that an outage seldom extends into the next batch."""
LEAST_BATCHES, MOST_BATCHES = 10, 50
"""Number of batches of all sites: fewer do not show the variance; more are unnecessary without outages."""
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)

Bools = npt.NDArray[np.bool_]


class Requests(Protocol):
    """Requests of one site."""

    submitted_s: Floats
    seconds: float


class ShareEstimate(msgspec.Struct, frozen=True):
    """A fraction of the requests with its 95 % interval."""

    share: float
    low: float
    high: float
    outages: int
    """Number of outages; an outage is a series of misses at a site."""
    hours: float
    """Total simulated hours of all sites."""
    more_hours: float | None = None
    """Additional hours that would make the interval narrow enough; None if it is, or without outages."""

    @property
    def spread(self) -> float:
        """Half of the interval relative to the share of misses, or of hits if these are rarer."""
        rarer = min(self.share, 1 - self.share)
        return (self.high - self.low) / 2 / rarer if rarer > 0 else math.inf


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Batches:
    """Requests of all sites, in batches of time."""

    numbers: npt.NDArray[np.int64]
    """Batch of each request."""
    lengths: Floats
    """Seconds of each batch."""
    sites: npt.NDArray[np.int64]
    """Site of each request."""
    submitted_s: Floats
    outage_s: float
    """Typical length of an outage; 0 if no device is lost."""

    @classmethod
    def of(cls, sites: Sequence[Requests], outage_s: float) -> Batches:
        """Divide the requests of ``sites`` into batches; ``outage_s`` is the mean time for which a device is lost."""
        seconds = sum(site.seconds for site in sites)
        length = min(max(OUTAGES_A_BATCH * outage_s, seconds / MOST_BATCHES), seconds / LEAST_BATCHES) or 1.0
        numbers: list[npt.NDArray[np.int64]] = []
        lengths: list[float] = []
        for site in sites:
            numbers.append(len(lengths) + (site.submitted_s / length).astype(np.int64))
            full = int(site.seconds / length)
            lengths += [*[length] * full, site.seconds - full * length]
        each = np.repeat(np.arange(len(sites)), [len(site.submitted_s) for site in sites])
        submitted = np.concatenate([site.submitted_s for site in sites])
        return cls(np.concatenate(numbers), np.array(lengths), each, submitted, outage_s)

    @property
    def seconds(self) -> float:
        """Total simulated time of all sites."""
        return float(self.lengths.sum())

    def share(self, hit: Bools, *, apart_s: float, spread: float) -> ShareEstimate:
        """Return the fraction of requests that are a ``hit``.

        Misses at a site belong to the same outage if there is no hit between them or if they are less than ``apart_s``
        apart. ``spread`` is the largest acceptable :attr:`ShareEstimate.spread`.
        """
        found = ShareEstimate(
            float(hit.mean()), *self._interval(hit), self._outages(~hit, apart_s), self.seconds / 3600
        )
        more = found.hours * ((found.spread / spread) ** 2 - 1)
        return msgspec.structs.replace(found, more_hours=more) if 0 < more < math.inf else found

    def quantile(self, values: Floats, kept: Bools, share: float) -> Interval | None:
        """Return the interval of a quantile over the requests that are ``kept``; None if all are of one batch."""
        known = values[kept]
        if len(np.unique(self.numbers[kept])) < 2:
            return None
        rank = _Z * self._deviation((known > np.quantile(known, share)), kept) / len(known)
        low, high = np.quantile(known, [max(0.0, share - rank), min(1.0, share + rank)])
        return Interval(float(low), float(high))

    def spread_of_rate(self, kept: Bools) -> float:
        """Return half of the interval of the ``kept`` requests per second, relative to them; all sites are alike."""
        counts = np.bincount(self.numbers[kept], minlength=len(self.lengths))
        total, batches = int(counts.sum()), len(counts)
        beyond = float(((counts - total / self.seconds * self.lengths) ** 2).sum()) * batches / max(1, batches - 1)
        student = _Z + (_Z**3 + _Z) / (4 * max(1, batches - 1))
        return student * math.sqrt(beyond) / max(1, total)

    def _interval(self, hit: Bools) -> Interval:
        """Return the interval of the fraction of hits, computed from the rarer of hits and misses."""
        if hit.mean() < 0.5:
            low, high = self._interval(~hit)
            return Interval(1 - high, 1 - low)
        counts = np.bincount(self.numbers, ~hit)
        total, variance = float(counts.sum()), self._deviation(~hit) ** 2
        # Weight of a possible next outage: that of the largest one so far, or of a typical one.
        weight = max(float(counts.max()), len(hit) * self.outage_s / self.seconds, 1.0)
        least = variance / (2 * total) * _chi_square(-_Z, 2 * total**2 / variance) if variance else total
        more, most = total + weight, variance + weight**2
        high = most / (2 * more) * _chi_square(_Z, 2 * more**2 / most)
        return Interval(max(0.0, 1 - high / len(hit)), 1 - least / len(hit))

    def _deviation(self, missed: Bools, kept: Bools | slice = slice(None)) -> float:
        """Return the standard deviation of the number of misses among the requests that are ``kept``."""
        numbers = self.numbers[kept]
        counts, all_of = np.bincount(numbers, missed), np.bincount(numbers)
        beyond = counts - counts.sum() / all_of.sum() * all_of
        batches = int((all_of > 0).sum())
        return math.sqrt(float((beyond**2).sum()) * batches / max(1, batches - 1))

    def _outages(self, missed: Bools, apart_s: float) -> int:
        at = np.flatnonzero(missed)
        is_later = (np.diff(at) > 1) & (np.diff(self.submitted_s[at]) > apart_s)
        return int(len(at) > 0) + int((is_later | (np.diff(self.sites[at]) > 0)).sum())


def _chi_square(z: float, freedom: float) -> float:
    """Approximate the quantile of a chi-square variable from the normal quantile ``z`` (Wilson and Hilferty, 1931)."""
    return freedom * max(0.0, 1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
