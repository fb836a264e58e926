"""A data set that is submitted at a rate, through a real peer."""

import random
from itertools import islice

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.data.datasets import open_data
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.arrivals import poisson_arrivals
from ls_edge.runtime.source.run_dataset import run_dataset
from ls_edge.runtime.source.source import Settings, Source
from tests.faults.engines import Faults, inject, write


@pytest.fixture
def source(tiny_bundle, write_peers, serve, tmp_path):
    """A source with one peer, whose faults are in ``a.faults``."""
    file, bundle = load_peers(write_peers({"a": range(6)})), Bundle.open(tiny_bundle)
    serve(inject(Peer(file, "a", bundle), tmp_path / "a.faults"))
    with Source(file, bundle, Settings(seed=5, budget_ms=60_000)) as opened:
        assert opened.wait_ready(30) == ()
        yield opened


def test_no_image_is_submitted_before_the_time_that_the_seed_gives(source):
    run = run_dataset(source, open_data("digits", "eval").take(10), concurrency=1, rate=20.0)
    times = islice(poisson_arrivals(20.0, random.Random(5)), 10)
    assert [record.error for record in run.records] == [None] * 10
    assert all(record.submitted_us >= round(at * 1e6) - 1 for record, at in zip(run.records, times, strict=True))
    assert (run.context.settings["rate"], run.context.seed) == (20.0, 5)


def test_images_arrive_whether_or_not_those_before_were_answered(source, tmp_path):
    write(tmp_path / "a.faults", Faults(hang=True))
    images = open_data("digits", "eval").take(40)
    run = run_dataset(source, images, concurrency=1, rate=500.0, stop=lambda: source.counts.submitted >= 6)
    write(tmp_path / "a.faults", Faults())
    assert run.records == []
    assert run.given_up >= 6
