"""Intervals of simulated shares: against outages drawn by the test, of which the true share is known."""

import dataclasses

import numpy as np
import pytest

from ls_edge.evaluation.availability import Batches


@dataclasses.dataclass
class Requests:
    submitted_s: np.ndarray
    seconds: float


def observe(rng, *, up, down, seconds, rate=1.0, sites=1):
    """Return the batches of requests at boards that are up and down for exponential times, and which were answered."""
    found, hits = [], []
    for _ in range(sites):
        begins_down = rng.random() < down / (up + down)
        lasts = rng.exponential((down, up) if begins_down else (up, down), (int(3 * seconds / (up + down)) + 20, 2))
        submitted = np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
        is_up = (np.searchsorted(np.cumsum(lasts), submitted) + begins_down) % 2 == 0
        found.append(Requests(submitted, seconds))
        hits.append(is_up)
    return Batches.of(found, down), np.concatenate(hits)


@pytest.mark.parametrize(("outages", "least"), [(4, 0.91), (20, 0.93), (60, 0.93)])
def test_intervals_contain_the_truth_nearly_as_often_as_they_say(outages, least):
    """Intervals of independent requests would in about a fifth of courses."""
    rng = np.random.default_rng(3)
    truth = 57 / 60
    contained = 0
    for _ in range(200):
        batches, hit = observe(rng, up=57.0, down=3.0, seconds=60.0 * outages)
        found = batches.share(hit, apart_s=0.1, spread=0.5)
        contained += found.low <= truth <= found.high
        assert 0 <= found.low <= found.share <= found.high <= 1
    assert contained / 200 >= least


def test_rare_answers_have_the_interval_of_rare_failures():
    rng = np.random.default_rng(5)
    batches, hit = observe(rng, up=60.0, down=3.0, seconds=6000.0)
    often, seldom = (batches.share(one, apart_s=0.1, spread=0.5) for one in (hit, ~hit))
    assert (seldom.low, seldom.high) == pytest.approx((1 - often.high, 1 - often.low))
    assert seldom.spread == pytest.approx(often.spread)


def test_without_an_outage_only_a_bound_is_known():
    """Three outages might have come unseen: the share of misses is at most about that of 3.7 typical outages."""
    batches, _ = observe(np.random.default_rng(1), up=1000.0, down=10.0, seconds=1000.0, rate=10.0)
    found = batches.share(np.ones(len(batches.numbers), dtype=bool), apart_s=0.1, spread=0.5)
    assert (found.share, found.high, found.outages, found.more_hours) == (1.0, 1.0, 0, None)
    assert found.low == pytest.approx(1 - 3.7 * 10 / 1000, abs=0.002)


def test_misses_without_an_answer_between_them_are_one_outage():
    submitted = np.arange(12.0)
    batches = Batches.of([Requests(submitted, 12.0), Requests(submitted, 12.0)], 1.0)
    hit = np.array([1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], dtype=bool)
    assert batches.share(hit, apart_s=0.1, spread=0.5).outages == 5, "one goes on to the next site: two"
    assert batches.share(hit, apart_s=2.0, spread=0.5).outages == 4, "an answer within two seconds is chance"
    assert batches.share(hit, apart_s=2.0, spread=0.5).hours == pytest.approx(24 / 3600)


def test_the_further_hours_make_the_interval_as_narrow_as_wanted():
    rng = np.random.default_rng(11)
    batches, hit = observe(rng, up=60.0, down=3.0, seconds=600.0)
    found = batches.share(hit, apart_s=0.1, spread=0.1)
    batches, hit = observe(rng, up=60.0, down=3.0, seconds=600.0 + 3600 * found.more_hours)
    assert batches.share(hit, apart_s=0.1, spread=0.1).spread == pytest.approx(0.1, rel=0.6)


def test_quantiles_and_rates_have_intervals():
    rng = np.random.default_rng(7)
    contained = known = 0
    for _ in range(100):
        submitted = np.sort(rng.uniform(0, 100.0, rng.poisson(2000)))
        batches = Batches.of([Requests(submitted, 100.0)], 0.0)
        taken, kept = rng.exponential(1.0, len(submitted)), np.ones(len(submitted), dtype=bool)
        low, high = batches.quantile(taken, kept, 0.95)
        contained += low <= -np.log(0.05) <= high
        known += abs(len(submitted) / 2000 - 1) <= batches.spread_of_rate(kept) < 0.1
    assert min(contained, known) >= 88
    assert batches.quantile(taken, ~kept, 0.5) is None
    one = batches.numbers == batches.numbers[0]
    assert batches.quantile(taken, one, 0.5) is None, "nothing shows how much batches differ"
