"""Random arrival times of requests, for measured and simulated runs."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process of ``rate`` arrivals per second, in seconds from the first arrival."""
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)
