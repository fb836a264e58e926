"""Sample standard deviations (n - 1 in the denominator), which every ± shows, and significance tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

LEVEL = 0.05
"""Significance level: the accepted fraction of false findings."""


def deviation(values: Iterable[float]) -> float | None:
    """Return the sample standard deviation; None for fewer than two values."""
    found = np.fromiter(values, dtype=np.float64)
    return float(found.std(ddof=1)) if len(found) > 1 else None


def pooled(groups: Iterable[tuple[int, float, float | None]]) -> float | None:
    """Return the sample standard deviation over all groups, given the number, mean, and deviation of each group."""
    counts, means, deviations = np.array([(n, mean, of or 0.0) for n, mean, of in groups]).T
    total, center = counts.sum(), np.average(means, weights=counts)
    squares = (counts - 1) * deviations**2 + counts * (means - center) ** 2
    return float(np.sqrt(squares.sum() / (total - 1))) if total > 1 else None


def plus_minus(value: float | None, show: Callable[[float], str] = "{:.3f}".format) -> str:
    """Return ``± 0.012``, or an empty string for None."""
    return "" if value is None else f"± {show(value)}"


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for multiple tests (Holm)."""
    found = [0.0] * len(ps)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, ps[place] * (len(ps) - rank)))
        found[place] = largest
    return found


def chi_square_p(x: float, freedom: int) -> float:
    """Return the p-value of chi-square for an integer number of degrees of freedom (a finite sum)."""
    half, is_odd = x / 2, freedom % 2
    found = math.erfc(math.sqrt(half)) if is_odd else 0.0
    for i in range(freedom // 2):
        power = i + 0.5 * is_odd
        found += math.exp(power * math.log(half) - half - math.lgamma(power + 1)) if half else float(not power)
    return min(1.0, found)


def sign_test_p(ones: int, others: int) -> float:
    """Return the two-sided p-value of a sign test, such as McNemar's for two classifiers."""
    count = ones + others
    if count > 200:  # the normal approximation is accurate enough, and faster
        return math.erfc(max(0.0, abs(ones - others) - 1) / math.sqrt(2 * count))
    below = sum(math.comb(count, k) for k in range(min(ones, others) + 1))
    return min(1.0, 2 * below / (1 << count))
