"""A data set is submitted to a real peer at random times."""

import random
from itertools import islice

import pytest

from ls_edge.data.datasets import open_data
from ls_edge.runtime.source.arrivals import poisson_arrivals
from ls_edge.runtime.source.run_dataset import run_dataset
from tests.faults.engines import Faults, write


@pytest.fixture
def source(serve_peers, open_source):
    """A source with one peer, whose faults are in ``a.faults``."""
    return open_source(serve_peers({"a": range(6)}, faulty=True), seed=5, budget_ms=60_000)


def test_no_image_is_submitted_before_its_arrival_time(source):
    run = run_dataset(source, open_data("digits", "eval").take(10), concurrency=1, rate=20.0)
    times = islice(poisson_arrivals(20.0, random.Random(5)), 10)
    assert [record.error for record in run.records] == [None] * 10
    assert all(record.submitted_us >= round(at * 1e6) - 1 for record, at in zip(run.records, times, strict=True))
    assert (run.context.settings["rate"], run.context.seed) == (20.0, 5)


def test_images_arrive_even_if_earlier_ones_have_no_answer(source, tmp_path):
    write(tmp_path / "a.faults", Faults(hang=True))
    images = open_data("digits", "eval").take(40)
    run = run_dataset(source, images, concurrency=1, rate=500.0, stop=lambda: source.counts.submitted >= 6)
    write(tmp_path / "a.faults", Faults())
    assert run.records == []
    assert run.given_up >= 6
