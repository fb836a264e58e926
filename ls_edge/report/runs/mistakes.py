"""Wrong answers of a run: accuracy by class, confused classes, and images."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ls_edge.core.errors import DataError
from ls_edge.core.records import RequestRecord
from ls_edge.evaluation.run_summary import Tally

if TYPE_CHECKING:
    from ls_edge.data.datasets import ImageRef

MOST_CONFUSED = 10
MOST_IMAGES = 24


class Confusion(NamedTuple):
    """Images of one class that were classified as another."""

    label: int
    prediction: int
    images: int
    share: float
    """Fraction of the labeled answers of the class."""


class WrongImage(NamedTuple):
    """An image with a wrong answer, as a data URI."""

    record: RequestRecord
    source: str


def by_class(records: Iterable[RequestRecord]) -> list[tuple[int, Tally]]:
    """Return the label and the labeled answers of each class, the worst class first."""
    tallies: dict[int, Tally] = defaultdict(Tally)
    for record in records:
        if record.error is None and record.label is not None:
            tallies[record.label].add(record.label, record.prediction, record.image)
    return sorted(tallies.items(), key=lambda item: (item[1].top1 or 0.0, item[0]))


def confusions(records: Sequence[RequestRecord]) -> list[Confusion]:
    """Return the pairs of classes that were confused most often, at most :data:`MOST_CONFUSED`."""
    tallies = dict(by_class(records))
    pairs = Counter((record.label, record.prediction) for record in wrong_answers(records))
    return [
        Confusion(label, prediction, count, count / tallies[label].answers)
        for (label, prediction), count in pairs.most_common(MOST_CONFUSED)
        if label is not None and prediction is not None
    ]


def wrong_answers(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Return the answers whose class differs from the label."""
    return [
        record
        for record in records
        if record.error is None and record.label is not None and record.prediction != record.label
    ]


def wrong_images(records: Iterable[RequestRecord], images: Iterable[ImageRef]) -> list[WrongImage]:
    """Return at most :data:`MOST_IMAGES` different images with wrong answers, spread evenly over the run.

    Images that can no longer be read are left out.
    """
    from ls_edge.data.decoding import decode  # Pillow, which most reports do not need
    from ls_edge.report.pictures import data_uri

    wrong = list({record.image: record for record in wrong_answers(records)}.values())
    step = max(1, -(-len(wrong) // MOST_IMAGES))
    chosen = {record.image: record for record in wrong[::step]}
    readers = {image.name: image.read for image in images if image.name in chosen}
    found = []
    for name, record in chosen.items():
        with contextlib.suppress(DataError, KeyError):
            image = decode(readers[name](), exif_orientation=True)
            image.thumbnail((96, 96))
            found.append(WrongImage(record, data_uri(image)))
    return found
