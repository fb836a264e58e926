"""A data set is submitted to a real peer at random times."""

import dataclasses
import io
import random
import threading
import time
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.errors import DataError
from ls_edge.data.datasets import ImageRef, open_data
from ls_edge.runtime.source.arrivals import poisson_arrivals
from ls_edge.runtime.source.run_dataset import run_dataset
from ls_edge.runtime.source.source import Source
from tests.faults.engines import Faults, write


def png():
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def source(serve_peers, open_source):
    """A source with one peer, whose faults are in ``a.faults``."""
    return open_source(serve_peers({"a": range(6)}, faulty=True), seed=5, budget_ms=60_000)


def test_no_image_is_submitted_before_its_arrival_time(source):
    images, read, begun = open_data("digits", "eval").take(10), [], time.monotonic()
    last = ImageRef("camera", None, lambda: read.append(time.monotonic() - begun) or images.images[0].read())
    camera = dataclasses.replace(
        images, images=(*images.images[:9], last), live=SimpleNamespace(problem="", close=bool)
    )
    run = run_dataset(source, camera, concurrency=1, rate=20.0)
    times = list(islice(poisson_arrivals(20.0, random.Random(5)), 10))
    assert read[0] >= times[-1]  # the frame of a camera is not older than that
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


def test_a_run_can_be_stopped_while_it_waits_for_an_image(source):
    """As with a camera that is silent: answers are taken meanwhile."""
    stopped, waited, records = threading.Event(), [], []

    def silent():
        waited.append(stopped.wait(10))
        raise DataError("no frame")

    def stop():
        if len(records) == 2:
            stopped.set()
        return stopped.is_set()

    images = open_data("digits", "eval").take(2)
    images = dataclasses.replace(images, images=(*images.images, ImageRef("camera", None, silent)))
    run = run_dataset(source, images, on_record=records.append, stop=stop)
    assert waited == [True]
    assert run.records == sorted(records, key=lambda record: record.id)


def test_damaged_images_are_skipped_alike_with_and_without_the_bundle(serve_peers, tiny_bundle, tmp_path):
    path = serve_peers({"a": "all"})
    damaged = {"cut.png": png()[:-40], "text.png": b"no image", "good.png": png()}
    for name, content in damaged.items():
        folder = tmp_path / "photos" / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    images = open_data(str(tmp_path / "photos"), "eval")
    told = {"full": [], "thin": []}
    for kind, bundle in (("full", tiny_bundle), ("thin", None)):
        with Source.open(path, bundle) as source:
            assert source.wait_ready(30) == ()
            run = run_dataset(source, images, on_skip=lambda name, _: told[kind].append(name))  # noqa: B023
            assert [(record.image, record.error) for record in run.records] == [("1/good.png", None)]
            twice = run_dataset(source, images.take(6)).context.account
            assert twice == run.context.account
            assert (twice["images"], twice["unreadable"]) == (1, 2)
            assert sorted(name for name, _ in run.skipped_images) == sorted(told[kind]) == ["1/cut.png", "1/text.png"]
            (tmp_path / "photos" / "1" / "good.png").write_bytes(b"no longer one")
            with pytest.raises(DataError, match="none of 3 images can be used; the first: "):
                run_dataset(source, images)
            (tmp_path / "photos" / "1" / "good.png").write_bytes(png())
