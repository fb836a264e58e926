"""Sample standard deviations (n - 1 in the denominator): the meaning of every ± in tables, charts and documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np


def deviation(values: Iterable[float]) -> float | None:
    """Return the sample standard deviation; None for fewer than two values."""
    found = np.fromiter(values, dtype=np.float64)
    return float(found.std(ddof=1)) if len(found) > 1 else None


def pooled(groups: Iterable[tuple[int, float, float | None]]) -> float | None:
    """Return the sample standard deviation of all values of several groups: number, mean and deviation of each."""
    counts, means, deviations = np.array([(n, mean, of or 0.0) for n, mean, of in groups]).T
    total, center = counts.sum(), np.average(means, weights=counts)
    squares = (counts - 1) * deviations**2 + counts * (means - center) ** 2
    return float(np.sqrt(squares.sum() / (total - 1))) if total > 1 else None


def plus_minus(value: float | None, show: Callable[[float], str] = "{:.3f}".format) -> str:
    """Return ``± 0.012``; empty if there is no deviation."""
    return "" if value is None else f"± {show(value)}"
