"""Arrival times are those of a Poisson process, and repeat with the seed."""

import random
from itertools import islice, pairwise

import pytest

from ls_edge.runtime.source.arrivals import poisson_arrivals


def gaps(rate, seed, count):
    return [after - before for before, after in pairwise(islice(poisson_arrivals(rate, random.Random(seed)), count))]


def test_the_first_arrival_is_immediate_and_times_repeat_with_the_seed():
    assert next(poisson_arrivals(3.0, random.Random(0))) == 0.0
    assert gaps(50.0, 1, 100) == gaps(50.0, 1, 100) != gaps(50.0, 2, 100)


@pytest.mark.parametrize("rate", [0.5, 200.0])
def test_gaps_are_exponential_with_the_rate(rate):
    found = gaps(rate, 0, 40_001)
    assert sum(found) / len(found) == pytest.approx(1 / rate, rel=0.03)
    assert sum(gap > 1 / rate for gap in found) / len(found) == pytest.approx(0.3679, rel=0.03)
